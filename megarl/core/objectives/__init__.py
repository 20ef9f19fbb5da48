"""Objectives: from the columns of a batch to one coefficient per token.

The way through: ``responses`` (rewards -> advantages) -> ``columns`` (inputs, checked) ->
``weights`` (factors, gate, penalties) and ``masks`` -> ``loss`` (the one equation). ``functions`` does the same for a
function of the user. The records themselves (``Objective``, its parts, the named rows) are in ``megarl.core.choices``,
which imports no torch.
"""

from megarl.core.choices.parts import Factor, Gate, Mask, Objective, Penalty
from megarl.core.choices.table import OBJECTIVES
from megarl.core.objectives.columns import Denominators, TokenColumns, TopK
from megarl.core.objectives.functions import function_coefficients, try_functions
from megarl.core.objectives.loss import BatchFacts, Coefficients, coefficients, gather_facts, policy_loss
from megarl.core.objectives.responses import advantages_of, select_responses, step_advantages, token_advantages

__all__ = ["OBJECTIVES", "Factor", "Gate", "Mask", "Objective", "Penalty"]
__all__ += ["Denominators", "TokenColumns", "TopK", "function_coefficients", "try_functions"]
__all__ += ["BatchFacts", "Coefficients", "coefficients", "gather_facts", "policy_loss"]
__all__ += ["advantages_of", "select_responses", "step_advantages", "token_advantages"]
