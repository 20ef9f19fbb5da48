"""What megarl uses where CUDA, Transformer Engine or a fused kernel is absent.

``cpu`` lets Megatron run without CUDA, with ``rotation`` for its rotary embeddings. ``te`` says whether Transformer
Engine is used, and stands in for it. ``attention`` and ``experts`` are layers of the local layer spec. Imports nothing
else of ``megatron``.
"""
