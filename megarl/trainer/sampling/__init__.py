"""The sampling half of a training step.

- ``sampler``: samples, judges and distributes the responses of a step; evaluates held-out prompts.
- ``evaluation``: benchmarks, their scores, and what is read before sampling: tokenizer, prompts, reward, environment.
- ``requests``: prompts, seeds and sampling parameters; sampling in a thread, for one-step-off runs.
- ``assignment``: the ranks that draw and train each sample.
- ``step_rollouts``: from samples to the rank's training data: the exchange between ranks, and advantages from rewards.
- ``allocators``: numbers of samples by prompt, for Ada-Est and GVM (with ``gradient_norms``).

Imports ``megarl.trainer.step`` and packages below ``megarl.trainer``.
"""
