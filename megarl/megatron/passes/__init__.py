"""One pass of the model over packed sequences: micro-batches in, log-probabilities and gradients out.

Read ``micro_batches``, ``forward``, ``logprobs``. Imports what lies below ``replay``.
"""
