"""Convert checkpoints of Hugging Face and Megatron into each other, and into FP8.

Files, in the order of a conversion:

    command         ``megarl convert`` and ``megarl quantize``
    convert         choose the direction, print the summary, compare the logits of built models
    conversion      Hugging Face <-> torch_dist
    quantization    both formats -> Hugging Face with FP8 blocks; fp8_selection: which tensors
    job             options; write, resume, verify and publish the output folder, on several ranks
    megatron_files  the parameters of a model in a torch_dist checkpoint, and Megatron's names of the parameters
    torch_dist      read and write the torch_dist format
"""
