"""The local engine with the weights of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.engines.local.engine import LocalEngine
from megarl.engines.weights import read_model_config
from megarl.models.hf_files import HFCheckpoint


def local_engine(path: str | Path, *, weight_version: int = 0, **options: Any) -> LocalEngine:
    engine = LocalEngine(read_model_config(path), **options)
    with HFCheckpoint(path) as checkpoint:
        engine.update_weights(((name, checkpoint.read(name)) for name in checkpoint.names_of_text()), weight_version)
    return engine
