"""The sampling half of a training step.

- ``sampler``: samples, judges and distributes the responses of a step; evaluates held-out prompts.
- ``assignment``: which rank draws and which rank trains each sample.
- ``sample_table``: what all ranks know of each sample, one row of numbers.
- ``background``: sampling in a thread, for runs that are one step off.
- ``allotment``: how many samples each prompt gets, for the rules that estimate this before they sample (Ada-Est, GVM).
  Ada-Est can use a ``value_head``, and GVM uses ``gradient_norms``.
"""
