"""Whether Transformer Engine is used is decided by importing it, and Megatron sees the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import warnings
import torch
torch.cuda.is_available = lambda: {cuda}
from megarl.stand_ins import te
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    te.hide_unusable()
try:
    import transformer_engine
    print("imported", end="; ")
except ImportError:
    print("hidden", end="; ")
print(te.find_te()[0], [str(each.message) for each in caught])
"""


@pytest.mark.parametrize(
    ("cuda", "code", "said"),
    [
        (True, "", "imported; True []"),
        (
            True,
            "import sys; sys.modules.pop(__name__); raise OSError('libcublas.so.13: no such file')",
            "hidden; False",
        ),
        (True, "raise ImportError('undefined symbol')", "(ImportError: undefined symbol)"),
        (False, "raise RuntimeError('not asked for')", "hidden; False []"),
    ],
)
def test_transformer_engine_is_used_if_it_can_be_imported(cuda: bool, code: str, said: str, tmp_path: Path) -> None:
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "pytorch.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", CODE.format(cuda=cuda)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert ("cannot be imported" in done.stdout) == (cuda and bool(code))
