"""The sampling engine that a configuration asks for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig

from megarl.config import Config
from megarl.errors import ConfigError
from megarl.megatron import distributed
from megarl.megatron.policy import DTYPES
from megarl.rollout.engine import Engine
from megarl.rollout.local import LocalEngine
from megarl.rollout.sglang_buckets import FP8Form, WeightForm
from megarl.rollout.sglang_client import ClientSettings
from megarl.rollout.sglang_engine import SGLangEngine
from megarl.rollout.sglang_fleet import Fleet, FleetSettings
from megarl.rollout.sglang_server import ServerSpec
from megarl.rollout.weight_folder import write_fp8_model


def make_engine(config: Config, tell: Callable[[str], None]) -> Engine:
    """An engine without weights; a collective call. ``tell`` gets lines about servers, on the rank that owns them."""
    return _sglang(config, tell) if config.rollout.engine == "sglang" else _local(config)


def _local(config: Config) -> LocalEngine:
    return LocalEngine(
        AutoConfig.from_pretrained(config.model.path),
        dtype=DTYPES[config.rollout.dtype],
        device="cuda" if torch.cuda.is_available() else "cpu",
        fp8_rounding=config.rollout.fp8_rounding,
        max_batch_size=config.rollout.max_batch_size,
    )


def _sglang(config: Config, tell: Callable[[str], None]) -> SGLangEngine:
    """The main rank starts the servers, or meets those that run, and tells the others where they are."""
    settings, key = config.sglang, _api_key(config)
    fleet = None
    told: list[list[str] | BaseException] = [[]]
    if distributed.is_main_rank():
        try:
            fleet = _fleet(config, key, tell)
            told = [fleet.start()]
        except Exception as error:  # the others wait for the URLs: they must hear of it
            told = [error]
    dist.broadcast_object_list(told)
    if isinstance(told[0], BaseException):
        raise told[0]
    client = ClientSettings(
        concurrency=settings.concurrency,
        deadline_s=settings.deadline_s,
        attempts=settings.attempts,
        api_key=key,
        recovery_s=settings.start_deadline_s,
    )
    return SGLangEngine(
        told[0],
        json.loads((Path(config.model.path) / "config.json").read_text()),
        fleet=fleet,
        agree=lambda failure: distributed.fail_together(failure, "the weight update"),
        settings=client,
        form=WeightForm(DTYPES[config.rollout.dtype], _fp8_form(config)),
    )


def _fleet(config: Config, key: str | None, tell: Callable[[str], None]) -> Fleet:
    settings = config.sglang
    served = _served(config)
    return Fleet(
        specs=[] if settings.urls else [_spec(config, index, key, served) for index in range(settings.servers)],
        urls=settings.urls,
        tp=settings.tp,
        api_key=key,
        folder=config.run_dir / "sglang" / "weights" if settings.sync == "disk" else None,
        broadcast=settings.sync == "distributed",
        checksums=settings.checksums,
        source=Path(config.model.path),
        served=served,
        settings=FleetSettings(settings.start_deadline_s, max_restarts=settings.max_restarts),
        tell=tell,
    )


def _fp8_form(config: Config) -> FP8Form:
    if config.sglang.fp8:
        return "blocks"
    return "rounded" if config.rollout.fp8_rounding else "off"


def _served(config: Config) -> Path:
    """Where servers find config and tokenizer of their model; that of an FP8 model is made here."""
    source = Path(config.model.path)
    return write_fp8_model(source, config.run_dir / "sglang" / "model") if config.sglang.fp8 else source


def _spec(config: Config, index: int, key: str | None, model: Path) -> ServerSpec:
    settings = config.sglang
    logs = config.run_dir / "sglang"
    logs.mkdir(parents=True, exist_ok=True)
    return ServerSpec(
        model_path=model,
        python=settings.python,
        dtype={"fp32": "float32", "bf16": "bfloat16"}[config.rollout.dtype],
        tp=settings.tp,
        mem_fraction=settings.mem_fraction,
        max_total_tokens=settings.max_total_tokens,
        log_file=logs / f"server{index}.log",
        api_key=key,
        # Weights come with the first update; an FP8 folder has none to read.
        extra_args=(*(["--load-format", "dummy"] if settings.fp8 else []), *settings.arguments),
    )


def _api_key(config: Config) -> str | None:
    name = config.sglang.api_key_env
    if name is None:
        return None
    if not os.environ.get(name):
        raise ConfigError(f"sglang.api_key_env: the environment has no variable {name}; export it, or remove the key")
    return os.environ[name]
