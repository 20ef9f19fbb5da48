"""Training: the loop of a run, the steps of the optimizer, and the supervised cold start.

- ``loop``: a run, step by step: sample, train, sync the engine, log, evaluate, checkpoint. ``saving`` has checkpoints
  and endings, ``records`` what a run reports: metrics, samples and their routes.
- ``sampling``: the samples of a step, and the ranks that draw and train them.
- ``mini_batch``, ``passes``, ``step``: the plan and the records of a step, passes as functions, and their order.
- ``engines``: builds the engine named by the configuration.
- ``sft``: the supervised cold start.

May import ``watch``, ``run``, ``engines``, ``megatron``, ``data``, ``config``, ``core``.
"""
