"""megarl's rows as losses and advantages of the real verl, in its environment (`make verl`, .venv-verl)."""

# verl has an environment of its own: make verl
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="runs in .venv-verl: make test-verl")

import torch
from tensordict import TensorDict
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig
from verl.workers.utils import losses

from megarl.adapters import verl as adapter
from megarl.core.choices.parts import Mask, Penalty
from megarl.core.objectives import OBJECTIVES
from megarl.errors import ConfigError

pytestmark = pytest.mark.gate
N, R = 8, 11
WIDE = 1e9
PAIRS = [  # megarl's row, verl's loss, verl's settings
    ("grpo", "vanilla", {"clip_ratio_c": WIDE}),
    ("dapo", "vanilla", {"clip_ratio_c": WIDE, "clip_ratio_high": 0.28}),
    ("dual_clip", "vanilla", {"clip_ratio_high": 0.28}),
    ("dr_grpo", "vanilla", {"clip_ratio_c": WIDE, "loss_scale_factor": 7}),
    ("gspo", "gspo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    ("cispo", "cispo", {"clip_ratio_low": 1.0}),
    ("sapo", "sapo", {}),
    ("gmpo", "geo_mean", {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
    ("reinforce", "gpg", {}),
    ("dppo_tv", "dppo_tv", {"clip_ratio_c": WIDE, "clip_ratio_low": 0.15, "clip_ratio_high": 0.15}),
    ("dppo_kl", "dppo_kl", {"clip_ratio_c": WIDE, "clip_ratio_low": 0.05, "clip_ratio_high": 0.05}),
    ("minirl", "vanilla", {"clip_ratio_c": WIDE, "clip_ratio_high": 0.27}),
    ("icepop", "vanilla", {"clip_ratio_c": WIDE}),
]
ROLLOUT_IS = {"minirl": "100.0", "icepop": "0.5_5.0"}
"""verl's weights old/mu between these bounds, for rows that read mu themselves."""
adapter.register(
    "megarl_dual_clip",
    replace(OBJECTIVES["dapo"], masks=(*OBJECTIVES["dapo"].masks, Mask("theta_old", high=3.0, sign="negative"))),
)
adapter.register("megarl_kl", replace(OBJECTIVES["grpo"], penalties=(Penalty("k3", coef=0.1),)))


def objective_of(row: str):
    return adapter.core_algos.get_policy_loss_fn(f"megarl_{row}").args[1]


def config_for(row: str, loss: str, **settings) -> FSDPActorConfig:
    made = {"strategy": "fsdp2", "rollout_n": 4, "ppo_micro_batch_size_per_gpu": 1}
    made |= {"loss_agg_mode": objective_of(row).aggregation, **settings}
    config = FSDPActorConfig(**made)
    config.policy_loss.__dict__["loss_mode"] = loss
    return config


def batch_of(seed: int = 0, spread: float = 0.6) -> TensorDict:
    """Responses in float64 with holes, as tool turns leave them, and one without a loss token."""
    random = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(N, R, generator=random, dtype=torch.float64)

    logprobs = -2.0 - normal().abs()
    mask = (torch.rand(N, R, generator=random) < 0.7) & (
        torch.arange(R) < torch.randint(3, R + 1, (N, 1), generator=random)
    )
    mask[:, 0], mask[3] = True, False
    old = (logprobs + spread * normal()).clamp(max=0)
    columns = {
        "log_prob": logprobs,
        "old_log_probs": old,
        "rollout_log_probs": (old + 0.3 * spread * normal()).clamp(max=0),
        "ref_log_prob": (old + spread * normal()).clamp(max=0),
        "advantages": normal()[:, :1].expand(N, R) * mask,
        "response_mask": mask,
    }
    return TensorDict({name: column.contiguous() for name, column in columns.items()}, batch_size=N)


def gradient(config, batch: TensorDict, num_micros: int = 1, num_ranks: int = 1) -> torch.Tensor:
    """verl's ppo_loss over micro-batches; data-parallel ranks average their gradients, as FSDP does."""
    logprobs = batch["log_prob"].clone().requires_grad_()
    whole = {"dp_size": num_ranks, "batch_num_tokens": int(batch["response_mask"].sum()), "global_batch_size": N}
    for rows in torch.arange(N).chunk(num_micros * num_ranks):
        part = batch[rows]
        tu.assign_non_tensor(part, **whole)
        loss, metrics = losses.ppo_loss(config=config, model_output={"log_probs": logprobs[rows]}, data=part)
        (loss / num_ranks).backward()
        assert "actor/pg_loss" in metrics
    return logprobs.grad


@pytest.fixture
def _padded_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probabilities are given padded already; verl's workers have them packed."""
    monkeypatch.setattr(losses, "no_padding_2_padding", lambda column, data: column)


@pytest.mark.usefixtures("_padded_columns")
@pytest.mark.parametrize(("row", "loss", "settings"), PAIRS, ids=[pair[0] for pair in PAIRS])
def test_gradients_are_verls_own(row, loss, settings):
    batch = batch_of()
    theirs = batch.clone()
    if row in ROLLOUT_IS:
        weights, _, _ = compute_rollout_correction_and_rejection_mask(
            batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"].double(),
            rollout_is="token", rollout_is_threshold=ROLLOUT_IS[row],
        )  # fmt: skip
        theirs["rollout_is_weights"] = weights.batch["rollout_is_weights"]
    elif "theta_mu" in objective_of(row).pairs:  # verl's DPPO takes old for mu
        batch["rollout_log_probs"] = batch["old_log_probs"]
    expected = gradient(config_for(row, loss, **settings), theirs)
    config = config_for(row, f"megarl_{row}", **settings)
    for num_micros, num_ranks in ((1, 1), (2, 1), (1, 2), (2, 2)):
        found = gradient(config, batch, num_micros, num_ranks)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8 * float(expected.abs().max()))


def test_every_row_is_registered():
    for name in OBJECTIVES:
        assert core_algos.get_policy_loss_fn(f"megarl_{name}").args[1] is OBJECTIVES[name]
        assert core_algos.get_adv_estimator_fn(f"megarl_{name}").args[1] is OBJECTIVES[name]


@pytest.mark.parametrize(("row", "estimator", "options"), [
    ("grpo", "grpo", {}),
    ("rloo", "rloo", {}),
    ("minirl", "grpo", {"norm_adv_by_std_in_grpo": False}),
])  # fmt: skip
def test_advantages_are_verls_own(row, estimator, options):
    random = torch.Generator().manual_seed(0)
    mask = torch.rand(10, 4, generator=random) < 0.7
    rewards = torch.randn(10, 4, generator=random, dtype=torch.float64) * mask
    columns = {"token_level_rewards": rewards, "response_mask": mask.double(), "index": [*"aaabbbbccd"]}
    found, _ = core_algos.get_adv_estimator_fn(f"megarl_{row}")(**columns, config=None)
    expected, _ = core_algos.get_adv_estimator_fn(estimator)(**columns, config=None, **options)
    torch.testing.assert_close(found[:9], expected[:9], rtol=1e-12, atol=1e-12)
    # A single response has no group to be compared with; verl takes its reward for the advantage.
    assert not found[9].any()
    assert expected[9].any()


def test_a_group_without_contrast_has_no_advantage():
    """In verl, the rounding of a mean is divided by 1e-6."""
    rewards = torch.full((8, 1), 0.9)
    columns = {"token_level_rewards": rewards, "response_mask": torch.ones(8, 1), "index": [0] * 8}
    assert not core_algos.get_adv_estimator_fn("megarl_grpo")(**columns)[0].any()
    assert core_algos.get_adv_estimator_fn("grpo")(**columns)[0].abs().max() > 0.05


REFUSED = [  # row, settings, columns to leave out or put in, part of the message
    ("minirl", {"loss_agg_mode": "token-mean"}, {}, "set actor.loss_agg_mode=seq-mean-token-sum"),
    ("minirl", {}, {"rollout_log_probs": None}, "set rollout.calculate_log_probs=True"),
    ("icepop", {}, {"rollout_is_weights": torch.ones(N, R)}, "set algorithm.rollout_correction.rollout_is=null"),
    ("dr_grpo", {}, {}, "set actor.loss_scale_factor"),
    ("kl", {}, {"ref_log_prob": None}, "set actor.use_kl_loss=True"),
    ("kl", {"use_kl_loss": True}, {}, "set actor.kl_loss_coef=0"),
    ("dppo_topk", {}, {}, "top K tokens, which verl does not record"),
    ("geo_rs", {}, {}, "set actor.ppo_micro_batch_size_per_gpu"),
    ("adaptive_power", {}, {}, "set actor.ppo_micro_batch_size_per_gpu"),
    ("m2po", {}, {}, "set actor.ppo_micro_batch_size_per_gpu"),
    ("rspo", {}, {}, "drift of routers"),
    ("kl_grpo", {}, {}, "choose megarl_grpo"),
    ("kl_grpo_token", {}, {}, "choose megarl_grpo"),
]


@pytest.mark.usefixtures("_padded_columns")
@pytest.mark.parametrize(("row", "settings", "columns", "told"), REFUSED)
def test_what_verl_cannot_give_is_refused_by_name(row, settings, columns, told):
    batch = batch_of()
    for name, column in columns.items():
        batch = batch.exclude(name) if column is None else batch.set(name, column)
    with pytest.raises(ConfigError, match=f"^megarl_{row}: .*{told}"):
        gradient(config_for(row, f"megarl_{row}", **settings), batch, num_micros=2)


@pytest.mark.usefixtures("_padded_columns")
def test_rows_that_run_do_so_for_any_split():
    refused = {row for row, *_ in REFUSED} - {"minirl", "icepop", "dr_grpo", "kl"}
    for row in sorted({*OBJECTIVES, "kl"} - refused):
        config = config_for(row, f"megarl_{row}", loss_scale_factor=7, kl_loss_coef=0)
        for spread in (0.6, 1e-3):  # where the policies differ by much, some rows drop every response
            batch = batch_of(spread=spread)
            batch["advantages"] = batch["advantages"].abs()  # raft's are never negative
            whole = gradient(config, batch)
            if whole[batch["response_mask"]].any():
                break
        assert whole[batch["response_mask"]].any(), row
        for split in ((4, 1), (2, 2)):
            torch.testing.assert_close(gradient(config, batch, *split), whole, rtol=1e-10, atol=1e-12)
    batch = batch_of()
    batch["advantages"] = batch["advantages"].abs()
    for row in ("geo_rs", "adaptive_power", "m2po"):  # one micro-batch is the whole mini-batch
        assert gradient(config_for(row, f"megarl_{row}"), batch).isfinite().all()


def test_left_out_responses_must_not_reach_the_batch():
    columns = {"token_level_rewards": torch.tensor([[1.0], [0.0], [1.0], [1.0]]), "response_mask": torch.ones(4, 1)}
    estimate = core_algos.get_adv_estimator_fn("megarl_reinforce_rej_signed")
    with pytest.raises(ConfigError, match=r"^megarl_reinforce_rej_signed: .*filter_groups.enable=True"):
        estimate(**columns, index=["a", "a", "b", "b"])
    assert estimate(**columns, index=["a", "a", "a", "a"])[0].flatten().tolist() == [1, -1, 1, 1]


HERE = Path(__file__).parent
PLATFORM = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu"}


def run(*words: object, **variables: str) -> str:
    """Output of a Python of its own, on verl's platform of CPUs (examples/verl_on_cpu.py)."""
    folders = [HERE.parents[1] / "examples", HERE.parent, *filter(None, [os.environ.get("PYTHONPATH")])]
    path = os.pathsep.join(map(str, folders))
    environment = {**os.environ, **PLATFORM, "PYTHONPATH": path, **variables}
    command = [sys.executable, "-W", "ignore", *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_verls_worker_trains_by_it(tmp_path: Path):
    """The whole actor worker with the FSDP2 engine, in fp32, on one process and on two: the gradient of the model."""
    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 2}
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts)).save_pretrained(tmp_path / "model")
    found = {}
    for ranks in (1, 2):
        launch = "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"
        run(*launch, HERE / "verl_worker.py", tmp_path / "model", tmp_path / f"{ranks}.pt")
        found[ranks] = torch.load(tmp_path / f"{ranks}.pt", weights_only=False)
    for row in ("dapo", "gspo", "minirl"):
        expected, _ = found[1][row, "verl", 4]
        for results in found.values():
            for size in (4, 8):
                gradient_found, metrics = results[row, "megarl", size]
                assert (gradient_found - expected).norm() < 1e-6 * expected.norm()
                assert metrics["actor/megarl/ratio_mean"][0] > 0


def test_verls_megatron_engine_is_watched(tmp_path: Path):
    """Its R3 and R2 with recomputation, its loss, and routes that reach the wrong layer (examples/verl_watch.py)."""
    modules = {"VERL_USE_EXTERNAL_MODULES": "verl_on_cpu,verl_watch", "VERL_ENGINE_VENDOR": "megarl"}
    told = json.loads(run(HERE / "verl_megatron.py", tmp_path, **modules).splitlines()[-1])
    assert told["engine"] == "WatchedEngine"
    for mode, compared in (("right", 90), ("R2", 102)):  # 34 tokens, 4 of them without routes, 3 layers
        assert told[mode]["watch/compared"] == told[mode]["watch/right"] == compared
        assert told[mode]["watch/recomputed_right"] == 102
    assert max(told["difference of 2"], told["difference of 4"]) < 1e-6
    assert "column 0 has those of column 2" in told["wrong"]
