from __future__ import annotations

import io
import sys
from importlib.metadata import PackageNotFoundError

import pytest
from rich.console import Console

from megarl import doctor, megatron_fields
from megarl.errors import ConfigError
from megarl.megatron_fields import REPLAY_BLOCKERS

CONFIG = """
[run]
steps = 3
[model]
path = "models/tiny"
[parallel]
ep = 2
[data]
train = "train.jsonl"
max_prompt_tokens = 16
[rollout]
prompts_per_step = 32
group_size = 8
max_response_tokens = 10
[optim]
lr = 1e-4
"""


def shown(*arguments, **keywords) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=200)
    code = doctor.doctor(*arguments, console=console, **keywords)
    return code, console.file.getvalue()


def test_this_environment_is_found_complete():
    code, text = shown()
    assert code == 0
    assert "Everything that is required is here." in text
    assert "megatron-core" in text
    assert "0.16.1" in text
    assert "native replay hook" in text
    assert "pip install 'megarl[gpu]'" in text  # square brackets are no markup
    for blocker in REPLAY_BLOCKERS:
        assert blocker.setting in text
        assert blocker.reason in text


def test_nothing_installed_is_a_result_and_not_a_crash(monkeypatch):
    def absent(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", absent)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "torch", None)  # `import torch` now raises ImportError
    code, text = shown()
    assert code == 1
    assert "Missing: torch, megatron-core, native replay hook, transformers" in text


def test_a_broken_torch_is_a_result_and_not_a_crash(monkeypatch):
    def broken(name):
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    code, text = shown()
    assert code == 1
    assert "libcudart.so.12" in text


def test_a_megatron_without_the_hook_is_missing_something_required(monkeypatch, tmp_path):
    moe = tmp_path / "transformer" / "moe"
    moe.mkdir(parents=True)
    (moe / "moe_utils.py").write_text("def topk_routing_with_score_function(logits, topk): ...")
    (moe / "router.py").write_text("class TopKRouter: ...")
    monkeypatch.setattr(megatron_fields, "source_root", lambda: tmp_path)
    code, text = shown()
    assert code == 1
    assert "Missing: native replay hook." in text


def test_a_configuration_shows_its_layout_and_is_not_hit(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    code, text = shown(path)
    assert code == 0
    assert "HIT" not in text
    assert "2; must be a multiple of 2" in text
    assert "etp 1 x ep 2 x pp 1 x dp 1" in text
    assert "128 sequences per rank" in text
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "etp 1 x ep 2 x pp 1 x dp 2" in shown(path)[1]


def test_an_objective_outside_the_family_is_warned_of_and_its_reference_shown(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    code, text = shown(path, {"train.objective_overrides.cap": 0.5} | KL)
    assert code == 0
    assert "warning: objective: the weight ('identity', power 0.5, cap 0.5)" in text
    assert "models/tiny" in text[text.index("reference policy") :]
    plain = shown(path)[1]
    assert "warning" not in plain
    assert "reference policy" not in plain


def test_sampling_from_a_nucleus_is_warned_of(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    code, text = shown(path, {"rollout.top_p": 0.9})
    assert code == 0
    assert text.count("warning: ") == 1
    assert "warning: rollout.top_p: found 0.9: tokens outside of the nucleus are never sampled" in text


KL = {"train.objective_overrides.kl": "k3", "train.objective_overrides.kl_coef": 0.1}


def test_a_blocker_in_the_file_or_in_a_flag_is_marked_and_then_refused(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG + "[megatron]\nmoe_router_fusion = true\n")
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(ConfigError, match="moe_router_fusion"):
        doctor.doctor(path, console=console)
    rows = [line for line in console.file.getvalue().splitlines() if "HIT" in line]
    assert len(rows) == 1
    assert "moe_router_fusion" in rows[0]

    code, text = shown(path, {"train.replay": "none", "megatron.moe_router_force_load_balancing": True})
    assert code == 0
    assert text.count("HIT") == 2


def test_an_unreadable_file_is_explained_after_the_tables(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(ConfigError, match="cannot be read"):
        doctor.doctor(tmp_path / "absent.toml", console=console)
    assert "Installed" in console.file.getvalue()
