"""Training: the loop of a run, the steps of the optimizer, and the supervised cold start.

- ``loop``: a run, step by step: sample, train, sync the engine, log, evaluate, checkpoint. ``monitor`` reports,
  ``saving`` has checkpoints and endings, ``records`` the samples and their routes.
- ``sampling``: the samples of a step, and the ranks that draw and train them.
- ``step_plan``, ``mini_batch``, ``passes``, ``step``: a frozen plan of a step, the records, passes as functions, and
  their order. ``token_advantages`` is for objectives with advantages by token, ``tripwires`` drops sequences.
- ``engines``, ``environments``: build the parts named by the configuration.
- ``sft``: the supervised cold start.

May import ``watch``, ``run``, ``engines``, ``megatron``, ``data``, ``config``, ``core``.
"""
