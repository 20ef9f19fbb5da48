"""What megarl uses where CUDA, Transformer Engine or a fused kernel is absent.

``te.enable`` changes the process (``megarl.enable_cpu`` says what); importing this package does not. ``cpu`` lets
Megatron run without CUDA. ``te`` finds Transformer Engine, and stands in for it. ``attention`` has layers of the local
layer spec.
"""
