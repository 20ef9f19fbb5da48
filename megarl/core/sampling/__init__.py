"""Adaptive sampling: which prompts get how many samples, which of them train, and with what credit.

The way through:

    stopping      rules, asked prompt by prompt: uniform, allotted counts, Ada-Seq-Pos and -Balance
    subsampling   which samples of a prompt train
    collector     drives a rule as samples arrive; dynamic sampling (DAPO) replaces prompts without contrast
    credit        the choices of baseline, unbiased combination and weights (credit_assignment computes them)
    nonlinear     names of objectives f(p)
    allocation    counts from estimated pass rates (Ada-Est), for nonlinear objectives
    gvm           counts from acceptance rates and gradient norms
    pass_rates    estimates that last from step to step
    stopping_law  the exact law of any rule, and unbiased estimates from its pools
    expectations  the expected number of samples in closed form
    pass_at_k     avg@k and pass@k with intervals

Nothing here draws a sample: a driver asks the engine, and tells the collector what came.
"""

from megarl.core.choices.credit import Credit
from megarl.core.choices.stopping import (
    POSITIVE,
    Allotted,
    SamplingRule,
    Sequential,
    Uniform,
    ada_seq_balance,
    ada_seq_pos,
)
from megarl.core.sampling.allocation import (
    ada_est_weights,
    allocate,
    allocate_by_weights,
    clamp_rates,
    objective_slope,
)
from megarl.core.sampling.collector import Ask, Collector, Selection
from megarl.core.sampling.credit_assignment import assign
from megarl.core.sampling.expectations import (
    expected_samples,
)
from megarl.core.sampling.gvm import gvm_allocate, gvm_estimates
from megarl.core.sampling.pass_at_k import Interval, fixed_prompts_interval, mean_interval, pass_at_k, wilson_interval
from megarl.core.sampling.pass_rates import PassRateCounts, pass_rate_loss
from megarl.core.sampling.pools import Pool
from megarl.core.sampling.stopping_law import StoppingLaw, UnbiasedRates, stopping_law, unbiased_rates
from megarl.core.sampling.subsampling import subsample

__all__ = [
    "POSITIVE",
    "Allotted",
    "Ask",
    "Collector",
    "Credit",
    "Interval",
    "PassRateCounts",
    "Pool",
    "SamplingRule",
    "Selection",
    "Sequential",
    "StoppingLaw",
    "UnbiasedRates",
    "Uniform",
    "ada_est_weights",
    "ada_seq_balance",
    "ada_seq_pos",
    "allocate",
    "allocate_by_weights",
    "assign",
    "clamp_rates",
    "expected_samples",
    "fixed_prompts_interval",
    "gvm_allocate",
    "gvm_estimates",
    "mean_interval",
    "objective_slope",
    "pass_at_k",
    "pass_rate_loss",
    "stopping_law",
    "subsample",
    "unbiased_rates",
    "wilson_interval",
]
