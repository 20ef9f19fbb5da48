"""Checkpoints of Hugging Face and Megatron into each other, and into FP8.

The way through:

    command         ``megarl convert`` and ``megarl quantize``
    convert         direction, checks, summary; compares the logits of built models
    conversion      Hugging Face <-> torch_dist
    quantization    either format -> Hugging Face with FP8 blocks; fp8_selection: which tensors
    job             the one writer of all three: resumes, verifies, publishes; the ranks that share it
    megatron_files  the parameters of a model in a torch_dist checkpoint, and Megatron's names for them
    torch_dist      reads and writes the torch_dist format

May import models, megatron and what is below them.
"""
