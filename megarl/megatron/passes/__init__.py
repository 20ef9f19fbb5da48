"""One pass of the model over packed sequences: micro-batches in, log-probabilities and gradients out.

Read in this order:

- ``micro_batches``: packed columns to what a Megatron model takes, and its outputs back to columns.
- ``forward``: runs micro-batches through Megatron's schedules.
- ``logprobs``: log-probabilities from hidden states, without whole logits.

Imports ``model`` and what lies below it; neither ``replay`` nor ``policy``.
"""
