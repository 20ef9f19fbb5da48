"""megarl: stable reinforcement learning of Mixture-of-Experts language models on Megatron-Core."""

__version__ = "0.1.0"


def enable_cpu() -> bool:
    """Let Megatron-Core 0.12 to 0.19 run in this process without CUDA, and without Transformer Engine (TE).

    Importing megarl changes nothing; this call does, once. Further calls change nothing more. It imports torch and
    Megatron, and returns whether there is no CUDA.

    Without CUDA:

    1. ``torch.cuda``: ``synchronize``, ``set_device`` and ``empty_cache`` do nothing. ``current_device`` returns
       ``"cpu"``. ``current_stream``, ``default_stream``, ``stream``, ``Stream`` and ``Event`` describe work that is
       finished. ``get_rng_state``, ``set_rng_state`` and ``manual_seed`` act on the generator of the CPU.
    2. ``torch.Tensor.cuda`` returns the tensor itself.
    3. ``torch.distributed.distributed_c10d.ProcessGroupGloo``: all groups of the process share one event loop.
    4. ``torch.compile`` returns functions unchanged while Megatron is imported. If Megatron was imported before,
       ``torch.compiler.set_stance("force_eager")`` is set instead, for the whole process.
    5. Megatron's functions name ``"cpu"`` where they named ``"cuda"`` (``stand_ins/cpu.toml`` lists the modules).
    6. Megatron: the token dispatcher, unequal shares of expert-tensor parallelism, the generator of tensor
       parallelism, and rotary embeddings of packed sequences have versions for a CPU.

    Without TE, with or without CUDA:

    7. ``sys.modules["transformer_engine"]`` becomes None if TE is installed but not usable here, so that all parts of
       Megatron see none. ConfigError if Megatron was imported before.
    8. Megatron gets the symbols of TE that it uses but does not define. torch's Adam keeps its step counts when a
       checkpoint is loaded (``stand_ins/te.py``).

    Always:

    9. ``warnings``: nine messages that every rank would print and no user can act on are ignored
       (``stand_ins/te.toml`` lists them).
    """
    from megarl.stand_ins.te import enable  # imports torch

    return enable()
