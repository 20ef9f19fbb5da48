"""Training: the loop of a run, the steps of the optimizer, and the supervised cold start.

- ``loop``: a run, step by step: sample, train, sync the engine, log, evaluate, checkpoint. ``saving`` has its
  checkpoints and how it ends.
- ``sampling``: which samples a step consists of, and which rank draws and trains each of them.
- ``step``: the forward passes and optimizer updates of a step, on each ``mini_batch``; ``token_advantages`` for the
  objectives that compute advantages from log-probabilities.
- ``engines``, ``environments``: build what the configuration names.
- ``trace_dump``: writes the routes of a step to files.
- ``sft``: the supervised cold start.

May import everything below it: ``run``, ``rollout``, ``megatron``, ``data``, ``config``, ``core``.
"""
