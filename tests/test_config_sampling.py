"""The tables that say what is sampled: what they refuse, what their defaults become, and that they survive a file."""

from __future__ import annotations

import tomllib
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.config import Config
from megarl.config import file as config_file
from megarl.config.tables.sampling import SamplingConfig
from megarl.core.choices.credit import Credit
from megarl.core.choices.parts import AdvantageName
from megarl.core.choices.stopping import Sequential, Uniform
from megarl.core.choices.table import OBJECTIVES
from megarl.core.objectives import advantages_of, select_responses, token_advantages
from megarl.errors import ConfigError

SMALLEST: dict[str, Any] = {
    "run": {"steps": 3},
    "model": {"path": "models/tiny"},
    "data": {"train": "train.jsonl", "max_prompt_tokens": 16},
    "rollout": {"prompts_per_step": 32, "group_size": 8, "max_response_tokens": 10},
    "optim": {"lr": 1e-4},
}


def parsed(**overrides: Any) -> Config:
    return config_file.parse(SMALLEST, {key.replace("__", "."): value for key, value in overrides.items()})


OWN_REWARD = {"reward__function": "rewards:mine"}
SEVERAL = {**OWN_REWARD, "reward__weights": {"right": 1.0, "short": 0.5}}
ALONE = ("gdpo", "opo", "reinforce_pp", "reinforce_pp_baseline", "raw", "raw_mixed", "signed", "positive_part")

REFUSED: list[tuple[dict[str, Any], str]] = [
    # sampling
    ({"sampling__rule": "dapo"}, "sampling.rule"),
    ({"sampling__positives": 2}, 'positives: found 2 with rule = "uniform", which has no use for it here'),
    (
        {"sampling__rule": "ada_est", "sampling__positives": 2},
        'positives: found 2 with rule = "ada_est", which has no use for it here',
    ),
    (
        {"sampling__rule": "ada_seq_pos", "sampling__negatives": 2},
        'negatives: found 2 with rule = "ada_seq_pos", which has no use for it here',
    ),
    ({"sampling__negatives": 0}, 'negatives: found 0 with rule = "uniform"'),
    ({"sampling__round_size": 3}, 'round_size: found 3 with rule = "uniform"'),
    ({"sampling__rule": "gvm", "sampling__max_samples": 9}, 'max_samples: found 9 with rule = "gvm"'),
    ({"sampling__tiers": [4, 8]}, 'tiers: found [4, 8] with rule = "uniform", which has no use for it here'),
    ({"sampling__rule": "tiers", "sampling__max_samples": 9}, 'max_samples: found 9 with rule = "tiers"'),
    ({"sampling__rule": "tiers", "sampling__tiers": [8, 4]}, "tiers are (8, 4), expected to rise"),
    ({"estimate__objective": "inverse:0"}, 'or "inverse:A", or "ada_est"'),
    (
        {"sampling__rule": "ada_est", "estimate__probe": 9},
        "expected estimate.probe = 9 to sampling.max_samples = 32",
    ),
    ({"log__variance_every": 2, "train__objective": "kl_grpo"}, "log.variance_every: expected 0"),
    ({"sampling__keep": "random"}, 'keep: found random with rule = "uniform"'),
    ({"sampling__subsample": "pos"}, 'subsample: found pos with rule = "uniform"'),
    ({"estimate__decay": 0.1}, 'estimate: found with sampling.rule = "uniform", but only "ada_est" reads'),
    ({"gvm__pre_samples": 4}, 'gvm: found with sampling.rule = "uniform", but only "gvm" reads'),
    ({"credit__scale": "std"}, "credit.scale: found 'std', but advantages are the objective's"),
    ({"sampling__rule": "gvm", "credit__combination": "unbiased"}, "credit.combination: found 'unbiased', but"),
    (
        {"sampling__rule": "gvm", "sampling__train_size": 4},
        'train_size: found 4 with rule = "gvm", which has no use for it here',
    ),
    (
        {"sampling__rule": "ada_est", "sampling__refill": True},
        'refill: found true with rule = "ada_est", which chooses its prompts before the step',
    ),
    ({"sampling__rule": "gvm", "sampling__refill": True}, 'refill: found true with rule = "gvm"'),
    ({"sampling__max_prompts": 64}, "max_prompts: found 64 without refill = true; set that or remove this"),
    ({"sampling__spare": 2}, "spare: found 2 without refill = true; set that or remove this"),
    ({"sampling__round_size": 0}, "sampling.round_size"),
    ({"sampling__max_samples": 0}, "sampling.max_samples"),
    ({"sampling__keep": "last"}, "sampling.keep"),
    ({"sampling__spare": -1, "sampling__refill": True}, "sampling.spare"),
    ({"sampling__advantages": "mine"}, "sampling.advantages"),
    # sampling, by the rule's own check
    ({"sampling__train_size": 9}, "sampling: Uniform: train_size is 9, expected 1 to 8, the samples of a prompt"),
    (
        {"sampling__rule": "ada_seq_pos", "sampling__train_size": 40},
        "sampling: Sequential: train_size is 40, expected 1 to 32",
    ),
    (
        {"sampling__rule": "ada_seq_balance", "sampling__train_size": 40},
        "20 positives and 20 negatives to exit, expected at least one and at most max_samples = 32 of them together",
    ),
    (
        {"sampling__rule": "ada_seq_pos", "sampling__max_samples": 4},
        "sampling: Sequential: train_size is 8, expected 1 to 4",
    ),
    (
        {"sampling__rule": "ada_seq_pos", "sampling__positives": 0},
        "sampling: Sequential: 0 positives and 0 negatives to exit",
    ),
    (
        {"sampling__rule": "ada_seq_balance", "sampling__positives": 30, "sampling__negatives": 3},
        "30 positives and 3 negatives to exit, expected at least one and at most max_samples = 32",
    ),
    # estimate
    ({"estimate__objective": "entropy"}, 'or "ada_est"'),
    ({"estimate__by": "guess"}, "estimate.by"),
    ({"estimate__eps": 0.0}, "estimate.eps"),
    ({"estimate__decay": 1.5}, "estimate.decay"),
    ({"estimate__prior_positives": 0.0}, "estimate.prior_positives"),
    ({"estimate__prior_negatives": -1.0}, "estimate.prior_negatives"),
    ({"estimate__head_lr": 0.0}, "estimate.head_lr"),
    (
        {"sampling__rule": "ada_est", "sampling__max_samples": 7},
        "rollout.group_size: found 8, the mean number of responses, expected estimate.min_samples = 1 to "
        "sampling.max_samples = 7",
    ),
    (
        {"sampling__rule": "ada_est", "estimate__min_samples": 9},
        "expected estimate.min_samples = 9 to sampling.max_samples = 32",
    ),
    # gvm
    ({"gvm__beta": 1.5}, "gvm.beta"),
    ({"gvm__alpha": -1e-3}, "gvm.alpha"),
    ({"gvm__pre_samples": 0}, "gvm.pre_samples"),
    ({"gvm__refresh_every": 0}, "gvm.refresh_every"),
    ({"gvm__solved_above": 1.1}, "gvm.solved_above"),
    ({"gvm__average": "median"}, "gvm.average"),
    # credit
    (
        {"credit__combination": "unbiased", "credit__scale": "std"},
        'credit: combination "unbiased" uses neither scale nor other statistics',
    ),
    (
        {"credit__combination": "unbiased", "credit__statistics": "trained"},
        'credit: combination "unbiased" uses neither scale nor other statistics',
    ),
    ({"credit__objective": "entropy"}, "sampling: "),
    ({"credit__scale": "variance"}, "credit.scale"),
    ({"credit__ddof": 2}, "credit.ddof"),
    ({"credit__floor": 0.0}, "credit.floor"),
    ({"credit__rate_eps": -1.0}, "credit.rate_eps"),
    ({"credit__weigh": "token"}, "credit.weigh"),
    # environment
    ({"environment__function": "tools"}, "tools: found [] with function = 'tools'; name tools, with function"),
    ({"environment__tools": ["calculator"]}, "tools: found ['calculator'] with function = None"),
    (
        {"environment__function": "tools", "environment__tools": ["calculator", "python"]},
        'tools: found several with format = "block", which names none; use format = "hermes"',
    ),
    (
        {"environment__function": "tools", "environment__tools": ["calculator"], "environment__observation": "none"},
        "observation: found 'none', expected {output} in it",
    ),
    ({"environment__max_turns": 3}, "function: missing beside other keys; it says what the environment is"),
    ({"environment__step_s": 0.0}, "environment.step_s"),
    ({"environment__concurrency": 0}, "environment.concurrency"),
    # what goes together with other tables
    (
        {"sampling__refill": True, "sampling__max_prompts": 31},
        "sampling.max_prompts: found 31, expected at least rollout.prompts_per_step = 32",
    ),
    (
        {"sampling__rule": "ada_seq_pos", "train__mini_batches": 33},
        "train.mini_batches: found 33, expected at most rollout.prompts_per_step = 32: this sampling makes",
    ),
    (
        {"sampling__train_size": 4, "train__mini_batches": 64},
        "train.mini_batches: found 64, expected at most rollout.prompts_per_step = 32",
    ),
    (
        {"sampling__rule": "ada_seq_balance", "train__objective": "kl_grpo"},
        'sampling.advantages: found "credit" (the default with rule = "ada_seq_balance") with an objective whose '
        'advantages differ between tokens, or are your own; set sampling.advantages = "objective"',
    ),
    (
        {"sampling__advantages": "credit", "train__objective": "kl_grpo"},
        'sampling.advantages: found "credit"',
    ),
    (
        {"credit__weigh": "prompt", "train__objective": "kl_grpo"},
        "credit: its weights do not go with an objective whose advantages differ between tokens",
    ),
    (
        {"credit__objective": "log", "train__objective": "kl_grpo"},
        "credit: its weights do not go with an objective",
    ),
    *(
        (
            {"train__objective_overrides": {"advantage": name}, "sampling__rule": "ada_seq_pos"} | SEVERAL,
            f"with advantage '{name}', but [credit] subtracts the mean of the prompt's pool instead",
        )
        for name in ALONE
    ),
    (
        {"train__objective_overrides": {"advantage": "gdpo"}},
        "reward.weights: found none with advantage 'gdpo', which standardises several rewards one by one",
    ),
    ({"reward__weights": {"right": 1.0}}, 'function = "exact_match", which returns one number; name a function'),
    ({"reward__weights": {"right": float("inf")}} | OWN_REWARD, "reward.weights"),
    ({"reward__weights": {"a/b": 1.0}} | OWN_REWARD, "reward.weights"),
]


@pytest.mark.parametrize(("changes", "told"), REFUSED, ids=[str(changes) for changes, _ in REFUSED])
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(**changes)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling__rule": "ada_seq_balance", "train__objective": "kl_grpo", "sampling__advantages": "objective"},
        {"sampling__rule": "gvm", "train__objective": "kl_grpo"},
        {"sampling__refill": True, "train__mini_batches": 32},
        {"sampling__rule": "ada_est", "sampling__max_samples": 8, "estimate__min_samples": 8},
        {"sampling__rule": "ada_seq_pos", "sampling__max_samples": 8},
        {"sampling__positives": None},
        {"sampling__rule": "ada_est", "estimate__objective": "inverse:1", "estimate__probe": 8},
        {"sampling__rule": "ada_est", "sampling__train_size": 4, "sampling__subsample": "any"},
        {"sampling__refill": True, "sampling__max_prompts": 32},
        *(
            {"train__objective_overrides": {"advantage": name}, "sampling__rule": "ada_seq_pos"}
            | {**SEVERAL, "sampling__advantages": "objective"}
            for name in ALONE
        ),
        *({"train__objective_overrides": {"advantage": name}, "reward__threshold": 0.5} for name in ALONE[1:]),
        {"train__objective_overrides": {"advantage": "raft"}, "sampling__rule": "ada_seq_pos"},
        {"reward__weights": {"right": 1, "long": -0.1}} | OWN_REWARD,
    ],
)
def test_what_is_just_allowed(changes: dict[str, Any]) -> None:
    parsed(**changes)


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
    several = SEVERAL if name == "gdpo" else {}
    assert is_refused(**ONE, **several, train__objective_overrides={"advantage": name}) == (not values.any())


RAW: dict[str, Any] = {"train__objective_overrides": {"advantage": "raw"}}
POOL: dict[str, Any] = {"sampling__advantages": "credit"}
TRAINED: dict[str, Any] = {**POOL, "credit__statistics": "trained"}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (ONE, "rollout.group_size"),
        ({"sampling__train_size": 1, "sampling__advantages": "objective"}, "sampling.train_size"),
        ({"sampling__train_size": 1}, None),  # compared with all eight that were drawn
        ({"sampling__train_size": 1, **TRAINED}, "sampling.train_size"),
        ({"sampling__train_size": 1, **RAW, "train__objective_overrides": {"selection": "mixed_groups"}}, "train_size"),
        ({**ONE, **RAW}, None),
        ({**ONE, **RAW, "sampling__refill": True}, "rollout.group_size"),
        ({**ONE, **POOL}, "rollout.group_size"),
        ({**ONE, "sampling__rule": "gvm"}, "rollout.group_size"),
        ({**ONE, "sampling__rule": "gvm", **RAW}, None),
        ({**ONE, "sampling__rule": "ada_est"}, "rollout.group_size"),
        ({"rollout__group_size": 2, "sampling__rule": "ada_est"}, None),
        ({**ONE, "sampling__rule": "ada_seq_pos"}, None),  # one trains, compared with up to 32
        ({**ONE, "sampling__rule": "ada_seq_pos", "sampling__max_samples": 1}, "sampling.max_samples"),
        ({**ONE, "sampling__rule": "ada_seq_pos", "sampling__round_size": 1}, None),
        ({**ONE, "sampling__rule": "ada_seq_pos", **TRAINED}, "rollout.group_size"),
        ({"sampling__rule": "tiers", "sampling__tiers": [1], "sampling__train_size": 1}, "sampling.tiers"),
        ({"sampling__rule": "tiers", "sampling__tiers": [1, 2], "sampling__train_size": 1}, None),
        (ONE | {"train__objective": "raft"}, None),
        (ONE | {"train__objective_overrides": {"advantage": "reinforce_pp"}}, None),
        (
            ONE | {"train__objective_overrides": {"advantage": "reinforce_pp"}, "rollout__prompts_per_step": 1},
            "rollout.group_size",
        ),
        (ONE | {"train__objective_overrides": {"entropy_coef": 0.1}}, "rollout.group_size"),
    ],
)
def test_groups_of_one_by_any_way(changes: dict[str, Any], key: str | None) -> None:
    if key is None:
        parsed(**changes)
        return
    with pytest.raises(ConfigError, match=rf"{key}: found 1 response to a prompt .* every gradient would be 0"):
        parsed(**changes)


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ({"sampling__train_size": 4}, True),
        ({"sampling__train_size": 4, "sampling__subsample": "any"}, False),
        ({"sampling__train_size": 1}, False),
        ({"sampling__train_size": 8}, True),
        ({"sampling__train_size": 4, "sampling__refill": True, "sampling__subsample": "any"}, False),
        ({"sampling__refill": True}, True),
        ({}, True),
        ({"sampling__rule": "ada_seq_balance"}, True),
        ({"sampling__rule": "ada_seq_pos", "sampling__train_size": 2}, True),
        ({"sampling__rule": "ada_seq_balance", "sampling__train_size": 1}, False),
        ({"sampling__rule": "ada_seq_pos", "sampling__train_size": 1}, False),
        ({"sampling__rule": "ada_est"}, True),
        ({"sampling__rule": "ada_est", "sampling__train_size": 4}, True),
        ({"sampling__rule": "ada_est", "sampling__train_size": 1}, False),
        ({"sampling__rule": "ada_est", "sampling__train_size": 8, "sampling__subsample": "any"}, False),
        ({"sampling__rule": "tiers"}, True),
        ({"sampling__rule": "gvm"}, True),
    ],
)
def test_the_unbiased_combination_needs_both_classes(changes: dict[str, Any], fits: bool) -> None:
    with nullcontext() if fits else pytest.raises(ConfigError, match=r"credit\.combination: found .unbiased."):
        parsed(**{"credit__combination": "unbiased", "sampling__advantages": "credit", **changes})


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
            ({"sampling__rule": "ada_est", "credit__combination": "unbiased"}, Credit(combination="unbiased")),
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


@given(
    sampling=st.fixed_dictionaries(
        {"rule": st.just("ada_seq_balance")},
        optional={
            "train_size": st.integers(2, 32),  # one is refused
            "round_size": st.integers(1, 64),
            "max_samples": st.integers(32, 256),
            "positives": st.integers(1, 16),
            "negatives": st.integers(1, 16),
            "keep": st.sampled_from(["first", "random"]),
            "advantages": st.sampled_from(["objective", "credit"]),
        },
    ),
    refill=st.none() | st.fixed_dictionaries({"max_prompts": st.integers(32, 999), "spare": st.integers(0, 99)}),
    estimate=st.fixed_dictionaries(
        {},
        optional={
            "by": st.sampled_from(["counts", "value_head"]),
            "objective": st.sampled_from(["ada_est", "log", "raft", "linear", "arcsin", "power:0.25"]),
            "eps": st.floats(1e-9, 1.0),
            "min_samples": st.integers(0, 8),
            "decay": st.floats(0, 1),
            "prior_positives": st.floats(1e-3, 1e3),
            "head_lr": st.floats(1e-6, 1.0),
        },
    ),
    gvm=st.fixed_dictionaries(
        {},
        optional={
            "pre_samples": st.integers(1, 64),
            "refresh_every": st.integers(1, 99),
            "alpha": st.floats(0, 1),
            "beta": st.floats(2, 8),
            "block": st.sampled_from(["embedding", "output_layer", r"layers\.0\..*"]),
            "average": st.sampled_from(["mean", "rms"]),
            "solved_above": st.floats(0, 1),
            "min_accepted": st.floats(0, 9),
        },
    ),
    environment=st.just({})
    | st.fixed_dictionaries(
        {"function": st.just("tools"), "format": st.just("hermes"), "tools": st.just(["calculator", "python"])},
        optional={
            "observation": st.text(st.characters(codec="utf-8", exclude_categories=("Cs",))).map("{output}".__add__),
            "stop": st.lists(st.sampled_from(["a", "\n", '"'])),
            "max_turns": st.integers(1, 99),
            "max_turn_tokens": st.integers(1, 99),
            "step_s": st.floats(0.1, 1e3),
            "options": st.dictionaries(st.sampled_from(["a", "b c"]), st.integers(-9, 9) | st.booleans()),
            "python_limits_alone": st.booleans(),
        },
    ),
    credit=st.fixed_dictionaries(
        {},
        optional={
            "statistics": st.sampled_from(["pool", "trained"]),
            "scale": st.sampled_from(["none", "std", "rate", "root_rate"]),
            "ddof": st.integers(0, 1),
            "floor": st.floats(1e-9, 1.0),
            "rate_eps": st.floats(0, 1),
            "objective": st.sampled_from(["log", "raft", "arcsin", "power:0.5"]),
            "weigh": st.sampled_from(["sample", "prompt"]),
        },
    ),
)
def test_written_toml_reads_back_equal(
    sampling: dict[str, Any],
    refill: dict[str, Any] | None,
    estimate: dict[str, Any],
    gvm: dict[str, Any],
    environment: dict[str, Any],
    credit: dict[str, Any],
) -> None:
    more = {} if refill is None else {"refill": True, **refill}
    used = sampling.get("advantages") != "objective"
    sequential = {"sampling": {**sampling, **more}, "credit": credit if used else {}}
    sequential |= {"environment": environment} if environment else {}
    for tables in (
        sequential,
        {"sampling": {"rule": "ada_est", "max_samples": 32}, "estimate": estimate},
        {"sampling": {"rule": "gvm"}, "gvm": gvm},
    ):
        config = config_file.parse({**SMALLEST, **tables})
        again = config_file.parse(tomllib.loads(config.to_toml()))
        assert again == config
        for table, values in tables.items():
            for key, value in values.items():
                assert getattr(getattr(again, table), key) == value
