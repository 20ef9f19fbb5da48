"""Checkpoints of Hugging Face and Megatron into each other, and into FP8, without building a model.

The way through:

    command         ``megarl convert``: direction, checks, summary
    conversion      Hugging Face <-> torch_dist
    quantization    either format -> Hugging Face with FP8 blocks; fp8_selection: which tensors
    job             the one writer of all three: resumes, verifies, publishes
    integrity       checksums, fingerprints, comparison of bits, ranks
    megatron_files  the parameters of a model in a torch_dist checkpoint
    torch_dist      reads and writes the torch_dist format; keys: Megatron's names in it
    logits          compares the logits of both formats; the only file that builds a model

May import models, megatron and what is below them.
"""
