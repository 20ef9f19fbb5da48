"""The training side: Megatron-Core models, packed batches, routing replay, optimizer, checkpoints, weights.

A file imports only files above in the list:

- ``versions``: differences of releases, Megatron's refusals as ConfigError.
- ``distributed``: process groups and small collective calls.
- ``model``, ``hf_weights``: the model, and its weights under Hugging Face names.
- ``passes``: micro-batches, forward and backward, log-probabilities.
- ``replay``: routing replay.
- ``policy``: model, optimizer, schedule and replay together.
- ``checkpoints``: checkpoints of a run, and models that are not trained.

It may import ``models``, ``data``, ``config``, ``core`` and ``errors``.
"""
