"""The policy under training: a Megatron model with its optimizer, learning-rate schedule and routing replay."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config import Config, megatron_fields
from megarl.errors import NumericsError
from megarl.megatron.config_errors import as_config_error
from megarl.megatron.hf_weights import export_hf, load_hf
from megarl.megatron.model import build_model, transformer_config
from megarl.megatron.replay import RoutingReplay
from megarl.models.shapes import ModelShape, read_shape

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rate over optimizer steps, as Megatron's scheduler understands it."""

    lr: float
    min_lr: float
    warmup_steps: int
    decay_steps: int
    """Optimizer steps until ``min_lr``, warm-up included."""
    decay_style: str
    weight_decay: float


def schedule_of(config: Config) -> Schedule:
    """The schedule of an RL run."""
    optim = config.optim
    return Schedule(
        lr=optim.lr,
        min_lr=optim.min_lr,
        warmup_steps=optim.warmup_steps,
        decay_steps=optim.decay_steps or max(config.optimizer_steps, optim.warmup_steps + 1),
        decay_style=optim.decay_style,
        weight_decay=optim.weight_decay,
    )


class Policy:
    """A model on this rank's share of a layout. Needs ``distributed.initialize``; construction is a collective call."""

    def __init__(self, config: Config, schedule: Schedule) -> None:
        self.config = config
        self.shape: ModelShape = read_shape(config.model.path)
        checked = megatron_fields.check(config.megatron)
        tables = {name: megatron_fields.realize(name, values) for name, values in checked.items()}
        with as_config_error("build the model", config.megatron):
            self.megatron_config: TransformerConfig = transformer_config(
                self.shape, {**layout_fields(config), **tables["TransformerConfig"]}, DTYPES[config.model.dtype]
            )
            chunks: Sequence[torch.nn.Module] = build_model(self.shape, self.megatron_config)
        load_hf(chunks, self.shape, config.model.path)
        if config.model.dtype != "fp32":
            chunks = [Float16Module(self.megatron_config, chunk) for chunk in chunks]
        with as_config_error("build the optimizer", config.megatron):
            ddp = _ddp_config(config, tables["DistributedDataParallelConfig"])
            self.chunks = [
                DistributedDataParallel(self.megatron_config, ddp, chunk, disable_bucketing=index > 0)
                for index, chunk in enumerate(chunks)
            ]
            optimizer_config = _optimizer_config(config, schedule, tables["OptimizerConfig"])
            self.optimizer = get_megatron_optimizer(optimizer_config, self.chunks)
            self.scheduler = _scheduler(self.optimizer, schedule)
        self._connect_schedules()
        # Without replay the hook only watches, so a setting that bypasses it costs a metric and is no error.
        watched = config.train.replay != "none" or not megatron_fields.replay_blockers(vars(self.megatron_config))
        train = config.train
        self.replay = RoutingReplay(self.chunks, train.replay_aux_loss, train.min_route_agreement) if watched else None

    def _connect_schedules(self) -> None:
        """Tell Megatron's forward-backward functions how to finish gradients, and when not to communicate yet."""
        no_sync: list[Any] = [chunk.no_sync for chunk in self.chunks]
        self.megatron_config.finalize_model_grads_func = finalize_model_grads
        self.megatron_config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.megatron_config.grad_scale_func = self.optimizer.scale_loss

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def optimizer_step(self) -> tuple[float, float]:
        """Clip, step, advance the schedule; returns (gradient norm before clipping, learning rate used).

        NumericsError if the norm is not finite: the update is refused and the weights keep their values.
        """
        lr = self.learning_rate
        if self.optimizer.prepare_grads():
            raise NumericsError(
                "gradients are not finite; the optimizer step was refused and the weights are unchanged"
            )
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise NumericsError(f"gradient norm is {norm}; the optimizer step was refused, the weights are unchanged")
        succeeded, norm_seen, _ = self.optimizer.step()
        if not succeeded:
            raise NumericsError("Megatron's optimizer refused the step; look for non-finite gradients")
        self.scheduler.step(1)
        return (norm if norm_seen is None else float(norm_seen)), lr

    @property
    def learning_rate(self) -> float:
        """Of the next optimizer step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All weights under their Hugging Face names, on every rank; a collective call."""
        return export_hf(self.chunks, self.shape)


def layout_fields(config: Config) -> dict[str, Any]:
    parallel, recompute = config.parallel, config.recompute
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.expert_tp,
        "context_parallel_size": parallel.cp,
        "sequence_parallel": parallel.uses_sequence_parallel,
        "moe_token_dispatcher_type": parallel.dispatcher,
        "recompute_granularity": recompute.granularity,
        "recompute_method": recompute.method,
        "recompute_num_layers": recompute.num_layers,
        "deterministic_mode": config.run.deterministic and torch.cuda.is_available(),
    }
    if recompute.modules is not None:
        fields["recompute_modules"] = list(recompute.modules)
    return fields


def _ddp_config(config: Config, overrides: dict[str, Any]) -> DistributedDataParallelConfig:
    defaults = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": config.parallel.distributed_optimizer,
        "overlap_grad_reduce": False,
    }
    return DistributedDataParallelConfig(**{**defaults, **overrides})


def _optimizer_config(config: Config, schedule: Schedule, overrides: dict[str, Any]) -> OptimizerConfig:
    dtype = DTYPES[config.model.dtype]
    defaults = {
        "optimizer": "adam",
        "lr": schedule.lr,
        "min_lr": schedule.min_lr,
        "weight_decay": schedule.weight_decay,
        "adam_beta1": config.optim.adam_beta1,
        "adam_beta2": config.optim.adam_beta2,
        "adam_eps": config.optim.adam_eps,
        "clip_grad": config.optim.clip_grad,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": config.parallel.distributed_optimizer,
    }
    return OptimizerConfig(**{**defaults, **overrides})


def _scheduler(optimizer: Any, schedule: Schedule) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=schedule.lr,
        min_lr=schedule.min_lr,
        lr_warmup_steps=schedule.warmup_steps,
        lr_decay_steps=schedule.decay_steps,
        lr_decay_style=schedule.decay_style,
        start_wd=schedule.weight_decay,
        end_wd=schedule.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # A resumed run may have more steps; the checkpoint then only says how far the schedule has come.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
