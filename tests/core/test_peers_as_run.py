"""Lines of docs/coming_from.md against the functions of verl and TRL themselves, where both are installed.

The page says how. `pytest -s` prints its table.
"""

from __future__ import annotations

import collections
import functools
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from differences import LENGTHS, batch_of
from test_coming_from import AS_RUN, of_page
from torch import Tensor

from megarl.core.objectives import TokenColumns, coefficients

pytestmark = [pytest.mark.slow, pytest.mark.needs("peers")]
NAMES = ("logprobs", "old_logprobs", "rollout_logprobs", "advantages", "ref_logprobs")
SEEDS = range(20)


@functools.cache
def peers() -> SimpleNamespace:
    """The modules of both packages. They are imported late: that takes half a minute."""
    load = importlib.import_module
    return SimpleNamespace(
        algos=load("verl.trainer.ppo.core_algos"),
        corrections=load("verl.trainer.ppo.rollout_corr_helper"),
        configs=load("verl.workers.config.actor"),
        trainer=load("trl.trainer.grpo_trainer").GRPOTrainer,
    )


def padded(column: Tensor) -> Tensor:
    parts = column.split(list(LENGTHS))
    return torch.nn.utils.rnn.pad_sequence(
        list(parts), batch_first=True, padding_value=-1.0 if column.dtype != torch.bool else False
    )


def batch(seed: int) -> tuple[TokenColumns, dict[str, Tensor], Tensor]:
    columns = batch_of(seed)[0]
    wide = {name: padded(getattr(columns, name)) for name in NAMES}
    wide["logprobs"].requires_grad_()
    return columns, wide, padded(columns.loss_mask).double()


def gradient(loss: Tensor, wide: dict[str, Tensor], mask: Tensor) -> Tensor:
    found = torch.autograd.grad(-loss, wide["logprobs"], allow_unused=True)[0]
    return torch.cat([row[:length] for row, length in zip(found * mask, LENGTHS, strict=True)])


def verl_loss(mode: str, how: str = "token-mean", **config: Any) -> Any:
    correction = config.pop("correction", None)
    anchor = config.pop("anchor", "old_logprobs")
    rejection = config.pop("rejection", {})
    bypass = config.pop("bypass", None)
    length = config.pop("length", None)

    def loss(wide: dict[str, Tensor], mask: Tensor) -> Tensor:
        policy = peers().configs.PolicyLossConfig(rollout_correction=bypass)
        settings = peers().configs.ActorConfig(
            strategy="fsdp", rollout_n=2, ppo_micro_batch_size_per_gpu=1, policy_loss=policy, **config
        )
        settings.global_batch_info["loss_scale_factor"] = length
        weights = None
        if correction is not None or rejection:
            with torch.no_grad():
                proto, mask, _ = peers().corrections.compute_rollout_correction_and_rejection_mask(
                    wide["old_logprobs"],
                    wide["rollout_logprobs"],
                    mask,
                    **{**(correction or {"rollout_is": None}), **rejection},
                )
            weights = proto.batch["rollout_is_weights"] if proto else None
        function = peers().algos.get_policy_loss_fn(mode)
        return function(wide[anchor], wide["logprobs"], wide["advantages"], mask, how, settings, weights)[0]

    return loss


def verl_kl(name: str) -> Any:
    def loss(wide: dict[str, Tensor], mask: Tensor) -> Tensor:
        terms = -wide["logprobs"] * wide["advantages"]
        terms = terms + 0.1 * peers().algos.kl_penalty(wide["logprobs"], wide["ref_logprobs"], name)
        return peers().algos.agg_loss(terms, mask, "seq-mean-token-sum")

    return loss


def trl_loss(kind: str, **changes: Any) -> Any:
    args = {"delta": None, "use_bias_correction_kl": False, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    args |= {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    args["steps_per_generation"] = 1

    def loss(wide: dict[str, Tensor], mask: Tensor) -> Tensor:
        settings = {
            "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "beta": 0.0,
            "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2, "use_vllm": False,
            "vllm_importance_sampling_correction": False, "max_completion_length": 64, "_entropy_bonus_enabled": False,
            "current_gradient_accumulation_steps": 1, "loss_type": kind,
        }  # fmt: skip
        own = {name: value for name, value in changes.items() if name not in args}
        trainer = SimpleNamespace(
            **{**settings, **own},
            args=SimpleNamespace(**{**args, **{name: value for name, value in changes.items() if name in args}}),
            model=SimpleNamespace(training=True),
            accelerator=SimpleNamespace(
                gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1, sync_gradients=True
            ),
            _metrics={"train": collections.defaultdict(list)},
            get_off_policy_mask=peers().trainer.get_off_policy_mask,
            get_gamma_weights=peers().trainer.get_gamma_weights,
            _get_per_token_logps_and_entropies=lambda *given, **named: (wide["logprobs"], torch.zeros_like(mask), None),
        )
        ids = torch.zeros(mask.shape, dtype=torch.long)
        inputs = {
            "prompt_ids": ids, "prompt_mask": mask, "completion_ids": ids, "completion_mask": mask,
            "advantages": wide["advantages"],
            "old_per_token_logps": wide["old_logprobs"], "ref_per_token_logps": wide["ref_logprobs"],
            "sampling_per_token_logps": wide["rollout_logprobs"], "num_items_in_batch": mask.sum(),
        }  # fmt: skip
        if kind == "vespo":
            inputs["importance_sampling_ratio"] = ((wide["old_logprobs"] - wide["rollout_logprobs"]) * mask).exp()
        return peers().trainer._compute_loss(trainer, None, inputs)

    return loss


MEAN = "seq-mean-token-mean"
REINFORCE = {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_threshold": 2.0}
RUNS: dict[tuple[str, str], Any] = {
    ("grpo-dual", "verl vanilla"): verl_loss("vanilla"),
    ("grpo", "verl vanilla, clip_ratio_c 1e9"): verl_loss("vanilla", MEAN, clip_ratio_c=1e9),
    ("dapo", "verl vanilla"): verl_loss("vanilla", clip_ratio_high=0.28, clip_ratio_c=1e9),
    ("dr-grpo", "verl vanilla"): verl_loss("vanilla", "seq-mean-token-sum-norm", clip_ratio_c=1e9, length=64),
    ("gspo", "verl gspo"): verl_loss("gspo", MEAN, clip_ratio_low=3e-4, clip_ratio_high=4e-4),
    ("cispo-two-sided", "verl cispo"): verl_loss("cispo"),
    ("cispo-upper", "verl cispo"): verl_loss("cispo", clip_ratio_low=1.0, clip_ratio_high=4.0),
    ("sapo", "verl sapo"): verl_loss("sapo"),
    ("gmpo", "verl geo_mean"): verl_loss("geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4),
    ("gpg", "verl gpg"): verl_loss("gpg"),
    ("dppo-tv-old", "verl dppo_tv"): verl_loss("dppo_tv", clip_ratio=0.2),
    ("dppo-kl-old", "verl dppo_kl"): verl_loss("dppo_kl", clip_ratio=0.05, clip_ratio_low=0.05, clip_ratio_high=0.05),
    ("dppo-tv-mu", "verl dppo_tv, old = mu"): verl_loss("dppo_tv", anchor="rollout_logprobs"),
    ("bypass-ppo", "verl bypass_mode"): verl_loss(
        "bypass_mode", anchor="rollout_logprobs", bypass={"loss_type": "ppo_clip"}, clip_ratio_c=1e9
    ),
    ("bypass-reinforce", "verl bypass_mode"): verl_loss("bypass_mode", anchor="rollout_logprobs", bypass=REINFORCE),
    ("tis-sequence", "verl rollout_is sequence"): verl_loss(
        "vanilla", MEAN, clip_ratio_c=1e9, correction={"rollout_is": "sequence", "rollout_is_threshold": 2.0}
    ),
    ("icepop", "verl rollout_is token"): verl_loss(
        "vanilla", MEAN, clip_ratio_c=1e9, correction={"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
    ),
    ("geo-rs", "verl rollout_rs seq_mean_k1"): verl_loss(
        "vanilla", clip_ratio_c=1e9, rejection={"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
    ),
    ("token-rs", "verl rollout_rs token_k1"): verl_loss(
        "vanilla", clip_ratio_c=1e9, rejection={"rollout_rs": "token_k1", "rollout_rs_threshold": "0.8_2.0"}
    ),
    **{
        (key, f"verl kl_penalty {name}"): verl_kl(name)
        for key, name in (
            ("kl-k1", "k1"), ("kl-k2", "k2"), ("kl-k2", "k3+"), ("kl-k3-clamped", "low_var_kl")
        )
    },
    ("grpo", "TRL grpo"): trl_loss("grpo"),
    ("dapo", "TRL dapo"): trl_loss("dapo", epsilon_high=0.28),
    ("grpo-dual", "TRL dapo, delta 3"): trl_loss("dapo", delta=3.0),
    ("dr-grpo", "TRL dr_grpo"): trl_loss("dr_grpo"),
    ("gspo", "TRL grpo, sequence"): trl_loss(
        "grpo", importance_sampling_level="sequence", epsilon_low=3e-4, epsilon_high=4e-4
    ),
    ("cispo-upper", "TRL cispo"): trl_loss("cispo", epsilon_high=5.0),
    ("sapo", "TRL sapo"): trl_loss("sapo"),
    ("vespo", "TRL vespo"): trl_loss("vespo"),
    ("opsm-mu", "TRL grpo, off_policy_mask_threshold"): trl_loss("grpo", off_policy_mask_threshold=0.5),
}  # fmt: skip


def largest_difference(key: str, loss: Any) -> float:
    """The largest difference of a coefficient, as a share of the largest coefficient of its batch."""
    worst = 0.0
    for seed in SEEDS:
        columns, wide, mask = batch(seed)
        expected = gradient(loss(wide, mask), wide, mask)
        found = coefficients(of_page(key), columns).values
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    return worst


@pytest.mark.parametrize(("key", "function"), RUNS)
def test_the_function_as_it_runs(key: str, function: str) -> None:
    worst = largest_difference(key, RUNS[key, function])
    print(f"\n| `{key}` | {function} | {worst:.0e} |")
    # verl adds 1e-8 to lengths and to probabilities; its SAPO and TRL's have fp32 constants.
    assert worst < 1e-6


def test_the_page_lists_what_runs() -> None:
    assert set(AS_RUN) == set(RUNS)
