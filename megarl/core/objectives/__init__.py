"""Objectives: from the columns of a batch to one coefficient per token.

The way through: ``responses`` (rewards -> advantages) -> ``columns`` (inputs, checked) -> ``weights`` (importance
weight, trust mask, KL) -> ``loss`` (the one equation). ``functions`` does the same for a function of the user. The
records themselves (``Objective``, its parts, the named rows) are in ``megarl.core.choices``, which imports no torch.
"""

from megarl.core.choices.parts import Objective
from megarl.core.choices.table import OBJECTIVES
from megarl.core.objectives.columns import Denominators, TokenColumns
from megarl.core.objectives.functions import function_coefficients, try_functions
from megarl.core.objectives.loss import Coefficients, coefficients, mini_batch_power, policy_loss
from megarl.core.objectives.responses import (
    select_responses,
    sequence_advantages,
    step_advantages,
    token_advantages,
)

__all__ = [
    "OBJECTIVES",
    "Coefficients",
    "Denominators",
    "Objective",
    "TokenColumns",
    "coefficients",
    "function_coefficients",
    "mini_batch_power",
    "policy_loss",
    "select_responses",
    "sequence_advantages",
    "step_advantages",
    "token_advantages",
    "try_functions",
]
