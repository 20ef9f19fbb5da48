"""Convert checkpoints of Hugging Face and Megatron into each other, and into FP8.

Files, in the order of a conversion:

    command         ``megarl convert`` and ``megarl quantize``
    conversion      Hugging Face <-> torch_dist, the summary, the comparison of logits of built models
    quantization    both formats -> Hugging Face with FP8 blocks
    job             options; write, verify and publish the output folder
    megatron_files  the parameters of a model in a torch_dist checkpoint, and Megatron's names of the parameters
    torch_dist      read and write the torch_dist format
"""
