"""Environment variables of a training process: which are set, whose value wins, and that torch comes later."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from run_configs import parsed as config

from megarl.config import Config, process_environment
from megarl.config.process_environment import compile_caches, without_expandable_segments
from megarl.errors import ConfigError

ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}


def found(made: Config, **variables: str) -> dict[str, str]:
    return process_environment.process_environment(made, variables)


def test_each_setting_brings_its_variables():
    assert found(config()) == ALLOCATOR
    assert found(config(run__deterministic=True)) == ALLOCATOR | DETERMINISTIC
    for layout in ({"parallel__tp": 2}, {"parallel__cp": 2}):
        assert found(config(**layout)) == ALLOCATOR | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in found(config(parallel__pp=2))
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Tree"}
    users = found(config(run__deterministic=True, parallel__tp=2), **own)
    assert users == ALLOCATOR | {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1"), ("CUBLAS_WORKSPACE_CONFIG", ":0:0"), ("NCCL_ALGO", "NVLS")],
)
def test_a_value_that_contradicts_the_configuration_is_refused(name: str, value: str):
    with pytest.raises(
        ConfigError, match=rf"run\.deterministic: found true with .* {name}={value}, expected .*; unset"
    ):
        found(config(run__deterministic=True), **{name: value})
    assert found(config(), **{name: value}) == ALLOCATOR


@pytest.mark.parametrize("name", process_environment.ALLOCATOR_VARIABLES)
def test_the_allocator_keeps_the_settings_of_the_user(name: str):
    own = "max_split_size_mb:64"
    assert found(config(), **{name: own}) == {name: f"{own},expandable_segments:True"}


def test_servers_lose_only_expandable_segments():
    environment = {
        "PYTORCH_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2], expandable_segments: True,max_split_size_mb:64",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PATH": "/bin",
    }
    expected = "roundup_power2_divisions:[256:1,512:2],max_split_size_mb:64"
    assert without_expandable_segments(environment) == {"PYTORCH_ALLOC_CONF": expected, "PATH": "/bin"}


WATCHED = """
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("before torch:", {name: os.environ.get(name) for name in sys.argv[1].split()}, flush=True)
            os._exit(0)  # nothing else is asked
sys.meta_path.insert(0, Watch())
from megarl import cli
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("command", ["train", "sft", "eval"])
def test_ranks_set_them_before_torch_is_imported(command: str, here: Path):
    expected = DETERMINISTIC | ALLOCATOR | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    clean = {name: value for name, value in os.environ.items() if name not in expected}
    words = [sys.executable, "-c", WATCHED, " ".join(expected), command, "run.toml"]
    words += ["--parallel.tp", "2", "--run.deterministic", *(["--data", "aime24"] if command == "eval" else [])]
    clean |= {"RANK": "0", "WORLD_SIZE": "2"}
    result = subprocess.run(words, capture_output=True, text=True, env=clean, timeout=3600, cwd=here)
    assert result.stdout.splitlines()[:1] == [f"before torch: {expected}"], result.stderr


class TestCompileCaches:
    """Of folders from which programs load code."""

    @pytest.fixture(autouse=True)
    def places(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home = tmp_path / "home"
        self.temporary = tmp_path / "tmp"
        for folder, mode in ((self.home, 0o755), (self.temporary, 0o1777)):
            folder.mkdir()
            folder.chmod(mode)
        monkeypatch.setenv("HOME", str(self.home))
        monkeypatch.setattr(process_environment.tempfile, "gettempdir", lambda: str(self.temporary))

    @property
    def own(self) -> Path:
        return self.temporary / f"megarl-{os.geteuid()}"

    def test_all_go_below_one_folder_at_home_or_of_the_users_own(self, tmp_path: Path):
        found = compile_caches({})
        assert len(found) == 9
        assert found["TORCHINDUCTOR_CACHE_DIR"] == f"{self.home}/.cache/megarl/compiled/inductor"
        assert (self.home / ".cache/megarl/compiled").stat().st_mode & 0o777 == 0o700
        self.home.chmod(0o777)  # others can write it: it is not used for any
        found = compile_caches({})
        assert len(found) == 9
        assert all(Path(folder).parent == self.own / "megarl/compiled" for folder in found.values())
        assert self.own.stat().st_mode & 0o777 == 0o700
        folder = tmp_path / "triton"
        assert compile_caches({"TRITON_CACHE_DIR": str(folder)})["TRITON_CACHE_DIR"] == str(folder)
        folder.chmod(0o777)
        with pytest.raises(ConfigError, match=f"TRITON_CACHE_DIR={folder}: .*others can write"):
            compile_caches({"TRITON_CACHE_DIR": str(folder)})

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
    def test_a_folder_that_somebody_else_has_taken_first_is_refused(self):
        self.home.chmod(0o777)
        self.own.mkdir()
        os.chown(self.own, 12345, -1)
        with pytest.raises(ConfigError, match=rf"{self.own} belongs to user 12345\. Set XDG_CACHE_HOME"):
            compile_caches({})
        assert compile_caches({"XDG_CACHE_HOME": str(self.temporary / "mine")}).keys() > {"TRITON_CACHE_DIR"}
