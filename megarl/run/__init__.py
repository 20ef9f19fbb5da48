"""A run as others see it: its folder, what is written there while it runs, and how it ends.

- **Begin**: ``folder`` (resolved configuration, new run or resumption), ``lock`` (one writer).
- **While it runs**: ``progress`` (terminal), ``metrics_log`` (metrics.jsonl, TensorBoard, wandb), ``audit`` (which
  samples trained), ``vitals`` (signs of life); ``stop_request``, ``signals``.
- **What it is worth**: ``health`` (verdicts on the records).
- **From outside**: ``status`` (``megarl status``, and why a rank failed).

Nothing here trains. From ``megarl.megatron`` it imports the names of checkpoints and collective calls only.
"""
