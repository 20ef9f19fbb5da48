"""Adaptive sampling: the number of samples per prompt, the samples that train, and their credit.

The way through (rules and choices of a configuration: ``megarl.core.choices``):

    collector          drives a rule as samples arrive; dynamic sampling (DAPO) replaces prompts without contrast
    subsampling        which samples of a prompt train
    credit_assignment  advantages and weights of the samples that train
    allocation         counts from estimated pass rates (Ada-Est), for nonlinear objectives
    gvm                counts from acceptance rates and gradient norms
    pass_rates         estimates that last from step to step
    pass_at_k          avg@k and pass@k with intervals

Nothing here samples from a model: the caller asks the engine, and reports samples to the collector.
"""

from megarl.core.sampling.allocation import allocate, expected_samples
from megarl.core.sampling.gvm import gvm_allocate
from megarl.core.sampling.subsampling import subsample

__all__ = ["allocate", "expected_samples", "gvm_allocate", "subsample"]
