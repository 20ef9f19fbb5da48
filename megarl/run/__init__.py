"""A run as others see it: its folder, what is written there while it runs, and how it ends.

- **Begin**: ``folder`` (resolved configuration, new run or resumption), ``lock`` (one writer).
- **While it runs**: ``progress`` (terminal), ``metrics_log`` (metrics.jsonl, TensorBoard, wandb), ``audit`` (which
  samples trained), ``vitals`` and ``signs`` (signs of life, written and read).
- **End**: ``stop_request`` (signals), ``ending`` (recorded in the status), ``failure`` (the error, for the launcher).
- **From outside**: ``status`` (``megarl status``).

Nothing here trains. From ``megarl.megatron`` it imports the names of checkpoints and collective calls only.
"""
