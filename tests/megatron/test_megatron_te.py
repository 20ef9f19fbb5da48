"""Whether Transformer Engine is used is decided by importing it, and Megatron sees the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import importlib.util, sys, warnings
import torch
torch.cuda.is_available = lambda: {cuda}
path = importlib.util.find_spec("megarl").submodule_search_locations[0] + "/megatron/stand_ins/te.py"
spec = importlib.util.spec_from_file_location("te_alone", path)  # the whole package would go on to use the device
te = importlib.util.module_from_spec(spec)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    spec.loader.exec_module(te)
try:
    import transformer_engine
    print("imported", end="; ")
except ImportError:
    print("hidden", end="; ")
print(te.HAVE_TE, [str(each.message) for each in caught])
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
