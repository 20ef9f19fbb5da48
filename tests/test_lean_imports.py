"""What a fresh interpreter imports: for the formulas and for replay, nothing but torch and Megatron-Core."""

from __future__ import annotations

import subprocess
import sys

import pytest

REPLAY = "import megarl.megatron.replay"
MEGATRON = "import torch, megatron.core.models.gpt, megatron.core.transformer.moe.moe_layer"
CORE = "import " + ", ".join(
    f"megarl.core.{name}" for name in ("objectives", "advantages", "ratios", "sampling", "routing")
)


def third_party(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after this import, without those of Python."""
    tell = f"{statement}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    names = subprocess.run([sys.executable, "-c", tell], capture_output=True, text=True, check=True).stdout.split()
    return set(names) - sys.stdlib_module_names


@pytest.mark.parametrize(
    ("statement", "peers"),
    [(REPLAY, MEGATRON), (CORE, "import torch, numpy")],
    ids=["replay", "core"],
)
def test_nothing_comes_along_but_torch_and_megatron(statement, peers):
    assert third_party(statement) - third_party(peers) == {"megarl"}


def test_the_measure_sees_what_a_configuration_brings():
    assert {"megarl", "pydantic"} <= third_party("import megarl.config")
