"""A run, seen from outside: the folder, the files of a running run, and the end of a run.

- **Begin**: ``folder`` (resolved configuration and inputs, new run or resumption), ``starts``, ``lock``.
- **While it runs**: ``progress`` (terminal), ``metrics_log`` (metrics.jsonl), ``feed`` and ``sinks`` (the same for
  TensorBoard, wandb, MLflow), ``samples`` (which trained, and texts), ``vitals`` (signs of life), ``stop_request``,
  ``signals``.
- **From outside**: ``status`` (``megarl status``, why a rank failed, verdicts of health); ``fields`` of the files.

Nothing here trains. ``megarl.megatron`` gives the names of checkpoints and collective calls only.
"""
