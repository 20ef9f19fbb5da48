"""The tables that say what is sampled: what they refuse, what their defaults become, and that they survive a file."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from run_configs import parsed

from megarl.config.tables.sampling import SamplingConfig
from megarl.core.choices.credit import Credit
from megarl.core.choices.parts import AdvantageName
from megarl.core.choices.stopping import Sequential, Uniform
from megarl.core.choices.table import OBJECTIVES
from megarl.core.objectives import advantages_of, select_responses, token_advantages
from megarl.errors import ConfigError


def is_refused(**changes: Any) -> bool:
    with suppress(ConfigError):
        parsed(**changes)
        return False
    with pytest.raises(ConfigError, match="compares several: every gradient would be 0"):
        parsed(**changes)
    return True


ONE: dict[str, Any] = {"rollout__group_size": 1}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_group_of_one_is_refused_where_its_advantage_is_zero(name: str) -> None:
    """The formulas themselves say which: groups of one, with rewards that differ."""
    objective = OBJECTIVES[name]
    if objective.needs_topk:
        return
    tokens = torch.full((4,), -1.0)
    values = token_advantages(
        objective, [1.0, 0.0, 0.0, 1.0], [0, 1, 2, 3], logprobs=tokens, ref_logprobs=tokens,
        loss_mask=torch.ones(4, dtype=torch.bool), cu_seqlens=torch.arange(5),
    )  # fmt: skip
    trains = select_responses(objective, [1.0, 0.0, 0.0, 1.0], [0, 1, 2, 3])
    assert is_refused(**ONE, train__objective=name) == (not (values * trains).any())
    assert not is_refused(rollout__group_size=2, train__objective=name)


@pytest.mark.parametrize("name", get_args(AdvantageName))
def test_every_advantage_in_a_group_of_one(name: str) -> None:
    if name in ("token_level_kl", "process"):  # the one has a row above, the other may have several steps
        return
    given = {"lengths": [1, 2, 3, 4], "components": ([[1.0, 0.0], [0.0, 1.0], [0.5, 0.0], [1.0, 1.0]], [1.0, 0.5])}
    objective = replace(OBJECTIVES["grpo"], advantage=name)
    values = advantages_of(objective, [1.0, 0.0, 0.0, 1.0], [0, 1, 2, 3], **given)
    several = {"reward__function": "rewards:mine", "reward__weights": {"right": 1.0}} if name == "gdpo" else {}
    assert is_refused(**ONE, **several, train__objective_overrides={"advantage": name}) == (not values.any())


def test_ranks_that_would_have_no_group_are_refused() -> None:
    adaptive = parsed(sampling__rule="ada_seq_balance", train__mini_batches=8)
    assert adaptive.check_world_size(4).dp == 4
    with pytest.raises(ConfigError, match=r"expected at least train.mini_batches \* dp = 8 \* 5 = 40"):
        adaptive.check_world_size(5)
    # Sequences may be dealt where groups cannot, and groups where sequences cannot.
    assert parsed(train__mini_batches=64).check_world_size(4).sequences_per_rank == 1
    assert parsed(sampling__refill=True, train__mini_batches=3).check_world_size(5).dp == 5
    with pytest.raises(ConfigError, match="expected a divisor"):
        parsed(train__mini_batches=3)


class TestDefaults:
    def test_the_rule(self) -> None:
        def rule_of(**overrides: Any) -> Any:
            config = parsed(**overrides)
            return config.sampling.rule_of(8, config.reward.threshold)

        assert rule_of() == Uniform(8)
        assert rule_of(sampling__train_size=4, reward__threshold=0.5) == Uniform(8, 4, "balance", threshold=0.5)
        assert rule_of(sampling__train_size=4, sampling__subsample="any") == Uniform(8, 4, "any")
        # group_size is what trains, and half of it what ends a prompt
        assert rule_of(sampling__rule="ada_seq_balance") == Sequential(4, 4, 8, 32, 8, "balance", 0.7)
        assert rule_of(sampling__rule="ada_seq_balance", sampling__train_size=5) == Sequential(
            2, 3, 8, 32, 5, "balance"
        )
        assert rule_of(sampling__rule="ada_seq_balance", sampling__positives=1) == Sequential(1, 4, 8, 32, 8, "balance")
        assert rule_of(sampling__rule="ada_seq_balance", sampling__negatives=0) == Sequential(4, 0, 8, 32, 8, "balance")
        assert rule_of(sampling__rule="ada_seq_pos") == Sequential(1, 0, 8, 32, 8, "pos", 0.7)
        assert rule_of(
            sampling__rule="ada_seq_pos", sampling__positives=3, sampling__round_size=16, sampling__max_samples=128
        ) == Sequential(3, 0, 16, 128, 8, "pos")

    @pytest.mark.parametrize(
        ("changes", "fixed", "allotted", "credit"),
        [
            ({}, True, False, False),
            ({"sampling__train_size": 4}, False, False, True),
            ({"sampling__refill": True}, False, False, False),
            ({"sampling__rule": "ada_seq_pos"}, False, False, True),
            ({"sampling__rule": "ada_seq_balance"}, False, False, True),
            ({"sampling__rule": "ada_est"}, False, True, True),
            ({"sampling__rule": "gvm"}, False, True, False),
            ({"sampling__advantages": "credit"}, True, False, True),
            ({"sampling__train_size": 4, "sampling__advantages": "objective"}, False, False, False),
        ],
    )
    def test_kinds(self, changes: dict[str, Any], fixed: bool, allotted: bool, credit: bool) -> None:
        sampling = parsed(**changes).sampling
        assert (sampling.fixed, sampling.allotted, sampling.uses_credit) == (fixed, allotted, credit)

    def test_a_rule_of_ones_own_has_the_objectives_advantages_whatever_its_name(self) -> None:
        assert not SamplingConfig.model_construct(rule="ada_mine:rule").uses_credit

    @pytest.mark.parametrize(
        ("changes", "record"),
        [
            ({}, Credit()),
            ({"sampling__rule": "ada_seq_balance"}, Credit()),
            ({"sampling__rule": "ada_est"}, Credit(scale="root_rate", rate_eps=1e-3)),
            ({"sampling__rule": "ada_est", "estimate__eps": 0.02}, Credit(scale="root_rate", rate_eps=0.02)),
            ({"sampling__rule": "ada_est", "credit__scale": "std"}, Credit(scale="std", rate_eps=1e-3)),
            ({"sampling__rule": "ada_est", "credit__rate_eps": 0.0}, Credit(scale="root_rate")),
            ({"sampling__rule": "ada_est", "sampling__advantages": "objective"}, Credit()),
            (
                {"credit__objective": "power:0.5", "credit__weigh": "prompt"},
                Credit(objective="power:0.5", weigh="prompt"),
            ),
        ],
    )
    def test_credit(self, changes: dict[str, Any], record: Credit) -> None:
        assert parsed(**changes).credit_record == record

    def test_sizes_of_a_step(self) -> None:
        assert parsed().responses_per_step == 256
        assert parsed(sampling__train_size=4).responses_per_step == 128
        assert parsed(sampling__rule="ada_est").responses_per_step == 256
        assert parsed().prompts_per_step_at_most == 32
        assert parsed(sampling__refill=True).prompts_per_step_at_most == 128
        assert parsed(sampling__refill=True, sampling__max_prompts=50).prompts_per_step_at_most == 50
