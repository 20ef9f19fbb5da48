"""The policy under training: a Megatron model with its optimizer, learning-rate schedule and routing replay."""

import enum
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.transformer_config import TransformerConfig
from pydantic import TypeAdapter

from megarl.config import Config, megatron_fields
from megarl.core.devices import HostCopies, to_device
from megarl.core.replay_blockers import replay_blockers
from megarl.errors import ConfigError, NumericsError, did_you_mean, refuse_if
from megarl.files.texts import read_table
from megarl.megatron.distributed import SIZES
from megarl.megatron.hf_weights import export_hf, load_hf
from megarl.megatron.model import build_model, release_after_use, transformer_config
from megarl.megatron.versions import as_config_error
from megarl.models.names import is_fp32
from megarl.models.shapes import ModelShape, read_shape
from megarl.replay import RoutingReplay
from megarl.replay.megatron_state import Replaced
from megarl.stand_ins.te import uses_te

Settings = TypeVar("Settings")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Schedule(NamedTuple):
    """Learning rate over optimizer steps, as Megatron's scheduler understands it."""

    table: Any
    """The [optim] or [sft] table, with lr, min_lr, warmup_steps, decay_style and weight_decay."""
    decay_steps: int
    """Optimizer steps until ``min_lr``, warm-up included."""


def schedule_of(config: Config) -> Schedule:
    """Return the schedule of an RL run."""
    optim = config.optim
    return Schedule(optim, optim.decay_steps or max(config.optimizer_steps, optim.warmup_steps + 1))


class Policy:
    """A model on this rank's share of a layout. Needs ``distributed.initialize``; construction is a collective call."""

    def __init__(self, config: Config, schedule: Schedule) -> None:
        self.config, self._host_copies = config, HostCopies()
        self.shape: ModelShape = read_shape(config.model.path)
        self.megatron_config, chunks = build_chunks(config, self.shape)
        self.left_out = load_hf(chunks, self.shape, config.model.path)
        """A line about prediction layers of the checkpoint, or ""."""
        with as_config_error("build the optimizer", config.megatron):
            ddp = _ddp_config(config)
            self.chunks = [
                DistributedDataParallel(self.megatron_config, ddp, chunk, disable_bucketing=index > 0)
                for index, chunk in enumerate(chunks)
            ]
            self.optimizer = get_megatron_optimizer(_optimizer_config(config, schedule), [*self.chunks])
            self.scheduler = _scheduler(self.optimizer, schedule)
        modules: list[Any] = [module for chunk in self.chunks for module in chunk.modules()]
        self._routers = [module for module in modules if isinstance(module, Router)]
        # How Megatron's schedules reduce gradients, and when they skip the reduction.
        no_sync: Any = [chunk.no_sync for chunk in self.chunks]
        self.megatron_config.finalize_model_grads_func = finalize_model_grads
        self.megatron_config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.megatron_config.grad_scale_func = self.optimizer.scale_loss
        # Without replay the hook only observes: a setting that bypasses the hook costs a metric and is no error.
        train, self.replay = config.train, None
        blocked = train.replay == "none" and replay_blockers(vars(self.megatron_config))
        if self.shape.moe_layers and not blocked:
            self.replay = RoutingReplay(self.chunks, train.min_route_agreement, min_score=train.replay_min_score)

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def expert_biases(self) -> list[torch.Tensor]:
        """The buffers of the routers, fp32 [E], that a backward pass may move."""
        return [bias for router in self._routers if (bias := router._buffers.get("expert_bias")) is not None]

    def optimizer_step(self, more_follow: bool = False) -> tuple[float, float]:
        """Clip, step, advance the schedule; returns (gradient norm before clipping, learning rate used).

        more_follow: a pass uses the weights next, where ``overlap_param_gather`` may gather them. NumericsError if the
        norm is not finite: the update is refused and the weights keep their values.
        """
        lr = float(self.optimizer.param_groups[0]["lr"])
        refuse_if(self.optimizer.prepare_grads(), NumericsError, "not_finite_gradients")
        norm = float(self.optimizer.get_grad_norm())
        refuse_if(not math.isfinite(norm), NumericsError, "not_finite_norm", norm=norm)
        step: Any = self.optimizer.step  # the abstract method returns None
        # Megatron's step would prepare the gradients and take their norm again.
        with Replaced(self.optimizer, prepare_grads=lambda: False, get_grad_norm=lambda: norm):
            was_taken = step()[0]
        refuse_if(not was_taken, NumericsError, "refused_step")
        self.scheduler.step(1)
        if not more_follow:
            for chunk in self.chunks if self.chunks[0].use_forward_hook else ():
                chunk.start_param_sync(force_sync=True)
        return norm, lr

    def export(self, receive: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights, whole [...], under Hugging Face names, on ranks that ``receive``; a collective call."""
        return export_hf(self.chunks, self.shape, receive)

    def offload(self) -> None:
        """Free memory for servers on the trainer's GPUs during sampling. Then ``reload``.

        Gradient buffers, empty between steps, are released; Adam's moments and fp32 main weights move to host memory.
        """
        for buffer in self._grad_buffers():
            buffer.untyped_storage().resize_(0)
        self._host_copies.park([tensor for tensor in self._optimizer_tensors() if tensor.is_cuda])
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """Undo ``offload``: gradients are zero, the optimizer's state is unchanged."""
        for buffer in self._grad_buffers():
            storage = buffer.untyped_storage()
            if storage.nbytes() == 0:
                storage.resize_(buffer.numel() * buffer.element_size())
                buffer.zero_()
        if torch.cuda.is_available():
            for tensor in self._optimizer_tensors():
                tensor.data = to_device(tensor.data, torch.cuda.current_device())

    def _grad_buffers(self) -> Iterator[torch.Tensor]:
        for chunk in map(vars, self.chunks):  # Megatron's list has the name of torch's method
            yield from (buffer.grad_data for buffer in (*chunk["buffers"], *chunk["expert_parallel_buffers"]))

    def _optimizer_tensors(self) -> Iterator[torch.Tensor]:
        """Adam's moments, and the main weights that are not views of the model's own."""
        of_the_model = {p.untyped_storage().data_ptr() for chunk in self.chunks for p in chunk.parameters()}
        for adam in (inner.optimizer for inner in getattr(self.optimizer, "chained_optimizers", [self.optimizer])):
            for state in adam.state.values():
                yield from (tensor for name, tensor in state.items() if name in ("exp_avg", "exp_avg_sq"))
            for group in adam.param_groups:
                yield from (p for p in group["params"] if p.untyped_storage().data_ptr() not in of_the_model)


def build_chunks(config: Config, shape: ModelShape) -> tuple[TransformerConfig, list[torch.nn.Module]]:
    """Megatron's config and this rank's chunks with random weights; a collective call, ConfigError as of Megatron."""
    with as_config_error("build the model", config.megatron):
        megatron_config = model_config(config, shape)
        chunks: list[torch.nn.Module] = [*build_model(shape, megatron_config)]
    for chunk in chunks:
        release_after_use(chunk)
    if config.model.dtype != "fp32":
        chunks = [_in_16_bits(megatron_config, chunk) for chunk in chunks]
    return megatron_config, chunks


def _in_16_bits(megatron_config: TransformerConfig, chunk: torch.nn.Module) -> Float16Module:
    """Return Megatron's wrapper, which casts parameters and buffers, without casting the fp32 buffers."""
    buffers = [(module, name, buffer) for module in chunk.modules() for name, buffer in module._buffers.items()]
    wrapped = Float16Module(megatron_config, chunk)
    for module, name, buffer in buffers:
        if is_fp32(name):
            module._buffers[name] = buffer
    return wrapped


def model_config(config: Config, shape: ModelShape) -> TransformerConfig:
    """Return Megatron's config of the model in the run's layout; errors as of Megatron, for values that do not fit."""
    fields = {**layout_fields(config), **_overrides(config, TransformerConfig, uses_te(shape))}
    return transformer_config(shape, fields, DTYPES[config.model.dtype])


def check_settings(config: Config, shape: ModelShape) -> None:
    """Make Megatron's records of model and optimizer, as ``Policy`` does; ConfigError for what Megatron refuses."""
    with as_config_error("build the model", config.megatron):
        model_config(config, shape)
    with as_config_error("build the optimizer", config.megatron):
        _ddp_config(config)
        _optimizer_config(config, schedule_of(config))


def _ddp_config(config: Config) -> DistributedDataParallelConfig:
    return _configure(DistributedDataParallelConfig, config, grad_reduce_in_fp32=True)


def _overrides(config: Config, cls: type, has_te: bool = False) -> dict[str, Any]:
    """Return the GPU defaults and the [megatron] table's values for a dataclass of Megatron."""
    defaults = megatron_fields.gpu_defaults(config, on_gpu=torch.cuda.is_available(), has_te=has_te)
    return check_fields({**defaults, **config.megatron})[cls]


def _configure(cls: type[Settings], config: Config, **defaults: Any) -> Settings:
    defaults["use_distributed_optimizer"] = config.parallel.distributed_optimizer
    return cls(**{**defaults, **_overrides(config, cls)})


def layout_fields(config: Config) -> dict[str, Any]:
    """The fields of TransformerConfig that the [parallel] and [recompute] tables set."""
    parallel, recompute = config.parallel, config.recompute
    fields: dict[str, Any] = {
        **{name: getattr(parallel, size) for name, size in SIZES.items()},
        "expert_tensor_parallel_size": parallel.expert_tp,
        "sequence_parallel": parallel.tp > 1,  # which Megatron's MoE needs
        "moe_token_dispatcher_type": parallel.dispatcher,
        **{f"recompute_{name}": getattr(recompute, name) for name in ("granularity", "method", "num_layers")},
        "deterministic_mode": config.run.deterministic and torch.cuda.is_available(),
    }
    if recompute.modules is not None:
        fields["recompute_modules"] = list(recompute.modules)
    return fields


def _optimizer_config(config: Config, schedule: Schedule) -> OptimizerConfig:
    dtype = DTYPES[config.model.dtype]
    fields = {name: getattr(schedule.table, name) for name in ("lr", "min_lr", "weight_decay")}
    fields |= {name: getattr(config.optim, name) for name in ("adam_beta1", "adam_beta2", "adam_eps", "clip_grad")}
    return _configure(OptimizerConfig, config, **fields, bf16=dtype is torch.bfloat16, params_dtype=dtype)


def _scheduler(optimizer: Any, schedule: Schedule) -> OptimizerParamScheduler:
    tables = read_table(__file__)
    of_table = {name: getattr(schedule.table, key) for name, key in tables["scheduler_of_table"].items()}
    return OptimizerParamScheduler(optimizer, lr_decay_steps=schedule.decay_steps, **of_table, **tables["scheduler"])


def check_fields(table: Mapping[str, Any]) -> dict[type, dict[str, Any]]:
    """Sort a flat [megatron] table by Megatron's dataclasses (a key may be in several), as values of the fields.

    Names of dtypes and attention backends are replaced by the objects. Names of what a CUDA graph captures stay
    strings, because Megatron parses the names. ConfigError for an unknown key, or for a value of another type.
    """
    hints: dict[type, dict[str, Any]] = {cls: get_type_hints(cls) for cls in _DATACLASSES}
    known = {field for fields in hints.values() for field in fields if not field.startswith("_")}
    for key in table:
        if key not in known:
            hint = did_you_mean(key, known, "see `megarl doctor` for the installed version", most=3)
            names = ", ".join(cls.__name__ for cls in _DATACLASSES)
            raise ConfigError(f"megatron.{key}: no field of Megatron's {names} has this name; {hint}")
    of_class = {cls: {key: table[key] for key in table if key in fields} for cls, fields in hints.items()}
    return {cls: {k: _field_value(k, v, hints[cls][k]) for k, v in values.items()} for cls, values in of_class.items()}


_DATACLASSES: tuple[type, ...] = (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)


def _field_value(key: str, value: Any, hint: Any) -> Any:
    kind = next(iter(get_args(hint)), hint)  # of Optional[torch.dtype], the dtype
    is_enum = isinstance(kind, enum.EnumMeta)
    if kind is torch.dtype or is_enum:
        found = getattr(kind if is_enum else torch, str(value), None)
        if isinstance(found, kind):
            return found
    else:
        adapter = TypeAdapter(hint, config={"arbitrary_types_allowed": True, "strict": True})
        with suppress(TypeError, ValueError):
            return adapter.validate_json(json.dumps(value))  # as JSON, since Python's strict tuple refuses a list
    choices = f", one of {', '.join(kind.__members__)}" if is_enum else ""
    expected = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
    raise ConfigError(f"megatron.{key}: found {value!r}, expected {expected}{choices}")
