"""megarl's rows as losses and advantages of the real verl, in its environment (`make verl`, .venv-verl)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("verl", reason="runs in .venv-verl: make test-verl")

import torch
from tensordict import TensorDict
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


def batch_of(seed: int = 0, spread: float = 0.3) -> TensorDict:
    """Responses in float64 with holes, as tool turns leave them, and one without a loss token."""
    random = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(N, R, generator=random, dtype=torch.float64)

    logprobs = -2.0 - normal().abs()
    mask = (torch.rand(N, R, generator=random) < 0.7) & (torch.arange(R) < torch.randint(3, R + 1, (N, 1), generator=random))
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


@pytest.fixture(autouse=True)
def _padded_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probabilities are given padded already; verl's workers have them packed."""
    monkeypatch.setattr(losses, "no_padding_2_padding", lambda column, data: column)


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
        print(row, (found - expected).abs().max() / expected.abs().max(), (found != 0).sum())
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8 * float(expected.abs().max()))
