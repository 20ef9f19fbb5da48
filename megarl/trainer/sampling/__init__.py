"""The sampling half of a training step.

- ``sampler``: samples, judges and distributes the responses of a step; evaluates held-out prompts.
- ``inputs``: what is read before: tokenizer, prompts, benchmarks, reward, environment.
- ``requests``: prompts, seeds and sampling parameters; sampling in a thread, for runs that are one step off.
- ``assignment``: which rank draws and which rank trains each sample.
- ``step_rollouts``: from samples to what this rank trains on: the exchange between ranks, and advantages from rewards.
- ``allocators``: how many samples each prompt gets, for Ada-Est, which can use a ``value_head``, and GVM, which uses
  ``gradient_norms``.

Imports ``megarl.trainer.step`` and what is below ``megarl.trainer``.
"""
