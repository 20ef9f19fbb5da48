"""The sampling half of a training step.

- ``sampler``: samples, judges and distributes the responses of a step; evaluates held-out prompts.
- ``requests``: prompts, seeds and sampling parameters.
- ``assignment``: which rank draws and which rank trains each sample.
- ``sample_table``: what all ranks know of each sample, one row of numbers.
- ``step_rollouts``: what this rank trains on, after the ranks of a model copy have exchanged rollouts.
- ``advantages``: advantages that follow from rewards alone.
- ``background``: sampling in a thread, for runs that are one step off.
- ``allocators``, ``gvm``: how many samples each prompt gets, for the rules that decide this before they sample (Ada-Est
  and GVM). Ada-Est can use a ``value_head``; GVM uses ``gradient_norms``.

Imports ``megarl.train.step`` and what is below ``megarl.train``.
"""
