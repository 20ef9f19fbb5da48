"""Finds Transformer Engine (TE), and stands in for symbols that Megatron 0.12 to 0.19 lacks without TE.

megarl uses TE on a machine with CUDA if TE can be imported, except for the models of ``uses_te``. A warning names an
installed TE that cannot be imported, because of another torch or CUDA. ``hide_unusable`` then hides TE from Megatron
too, whose files look for TE in different ways and would disagree.

Without TE, three things stop a run, on a CPU and on a GPU:

1. Megatron uses symbols of TE that it never defined: in routers, in latent attention and in recomputation.
2. 0.12 writes parameters in FP8 where there are none.
3. torch's Adam, the fallback for TE's, has a step count for each parameter. Loading a reshardable checkpoint of the
   distributed optimizer drops it. Megatron restores the count right before, so the current value is kept.
"""

import contextlib
import importlib
import importlib.util
import sys
import types
import warnings
from functools import cache
from typing import Any

import torch

from megarl.errors import ConfigError, refusal, refuse_if
from megarl.files.texts import read_table
from megarl.models.shapes import ModelShape
from megarl.stand_ins import cpu

_NAME = "transformer_engine"


def enable() -> bool:
    """Apply all stand-ins to this process; see ``megarl.enable_cpu``."""
    hide_unusable()
    for message in read_table(__file__)["silenced"]:
        warnings.filterwarnings("ignore", message=message)
    is_on_cpu = cpu.enable()
    stand_in()
    return is_on_cpu


@cache
def find_te() -> tuple[bool, str | None]:
    """Whether TE is used, and why an installed one cannot be imported where there are GPUs; imports TE there."""
    if not torch.cuda.is_available() or importlib.util.find_spec(_NAME) is None:
        return False, None
    try:
        importlib.import_module(f"{_NAME}.pytorch")
    except Exception as error:  # of any kind: shared libraries of another torch or CUDA
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        warnings.warn(refusal("unfit_te", problem=problem), stacklevel=2)
        return False, problem
    return True, None


def uses_te(shape: ModelShape) -> bool:
    """Whether the model is built from TE's layers: not OLMoE's norm over all heads, not sparse attention."""
    return find_te()[0] and not shape.needs_local_layers


def hide_unusable() -> None:
    """Let imports of an installed TE fail if it is not used. ConfigError if Megatron has been imported before."""
    if find_te()[0] or importlib.util.find_spec(_NAME) is None:
        return
    refuse_if("megatron.core" in sys.modules, ConfigError, "late_enable_cpu")
    for module in [name for name in sys.modules if name.partition(".")[0] == _NAME]:
        del sys.modules[module]
    sys.modules[_NAME] = None  # type: ignore[assignment] # Python's way to say that an import fails


@cache
def stand_in() -> None:
    """Define for Megatron what it lacks without TE; nothing where TE is used, or the second time."""
    if find_te()[0]:
        return

    def core(name: str) -> Any:
        return importlib.import_module(f"megatron.core.{name}")

    moe_utils, random = core("transformer.moe.moe_utils"), core("tensor_parallel.random")
    latent, fp8 = core("transformer.multi_latent_attention"), core("fp8_utils")
    distributed = core("optimizer.distrib_optimizer")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not hasattr(random, "FP8GlobalStateManager"):
        random.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
        random.activation_recompute_forward = random.fp8_autocast = lambda **_: contextlib.nullcontext()
    latent.HAVE_TE = False  # it mistakes Megatron's dummies for TE
    if getattr(latent, "Linear", latent) is None:  # from 0.17 on: the class of its own local layers
        latent.Linear = importlib.import_module("megatron.core.post_training.modelopt.layers").Linear
    quantize = fp8._quantize_param_shard_impl

    def quantize_any(parameters: list[Any], *arguments: Any, **options: Any) -> None:
        if parameters:
            quantize(parameters, *arguments, **options)

    fp8._quantize_param_shard_impl = quantize_any
    _keep_adam_steps(distributed.DistributedOptimizer)


def _keep_adam_steps(optimizer: Any) -> None:
    """Loading the state of a parameter keeps its step count."""
    set_states = optimizer._set_main_param_and_optimizer_states

    def set_states_and_step(self: Any, model_param: Any, tensors: dict[str, torch.Tensor]) -> None:
        current = self._get_main_param_and_optimizer_states(model_param)
        set_states(self, model_param, {**{key: current[key] for key in ("step",) if key in current}, **tensors})

    optimizer._set_main_param_and_optimizer_states = set_states_and_step
