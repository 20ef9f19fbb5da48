"""The sampler itself, engine and all, against the exact law of its rules, for pass rates that are known exactly.

A response is one token, right if it is one of the prompt's answers, so that its chance is a sum of the model's own
probabilities.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_jobs import recorded
from train_rewards import starts_in_answer
from train_world import World, layout
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.core.choices.stopping import Sequential, ada_seq_balance, ada_seq_pos
from megarl.core.metrics import finalize
from megarl.core.sampling.collector import Selection
from megarl.core.sampling.stopping_law import StoppingLaw, stopping_law
from megarl.core.sampling.subsampling import positives_to_keep
from megarl.data.tiny import write_tiny_model
from megarl.engines.local.engine import LocalEngine
from megarl.trainer.sampling.sampler import Sampler
from megarl.trainer.sampling.step_rollouts import StepRollouts

WANTED = (0.05, 0.1, 0.3, 0.5, 0.8, 0.95)
"""Pass rates to come near to."""
COPIES = 20
"""Rows of the data with the same problem."""
STEPS = 20


@dataclass(frozen=True)
class Known:
    """A data file whose problems have known pass rates."""

    world: World
    model: Path
    data: Path
    rates: dict[str, float]
    """By answer."""

    @contextmanager
    def sampler(self, **overrides: Any) -> Iterator[Sampler]:
        settings = self.world.settings(
            **{
                "model__path": str(self.model),
                "data__train": str(self.data),
                "reward__function": "train_rewards:starts_in_answer",
                "rollout__prompts_per_step": len(self.rates) * COPIES,
                "rollout__max_response_tokens": 1,
                "rollout__fp8_rounding": False,
                "train__mini_batches": 1,
                **overrides,
            }
        )
        with layout(settings):
            engine = LocalEngine.from_pretrained(self.model, max_batch_size=512)
            made = Sampler(settings, engine, settings.train.resolved_objective)
            yield made
            made.close()
            engine.close()


@pytest.fixture(scope="module")
def known(world: World, tmp_path_factory: pytest.TempPathFactory) -> Known:
    """One problem for each wanted pass rate; each comes COPIES times."""
    folder = tmp_path_factory.mktemp("known")
    model = write_tiny_model(
        folder / "model", hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, num_experts=4, expert_width=8,
        max_positions=16, initializer_range=0.2,
    )  # fmt: skip
    rates, rows = {}, []
    for number, wanted in enumerate(WANTED):
        prompt = f"{number}{number + 1}{number + 2}="
        answer, rate = _answer_with(model, prompt, wanted)
        assert abs(rate - wanted) < 0.02
        rates[answer] = rate
        rows += [{"prompt": prompt, "answer": answer}] * COPIES
    assert len(rates) == len(WANTED)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Known(world, model, folder / "train.jsonl", rates)


@torch.no_grad()
def _answer_with(model: Path, prompt: str, wanted: float) -> tuple[str, float]:
    """Characters whose chance to begin the response is near the wanted one, and that chance, by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    logits = AutoModelForCausalLM.from_pretrained(model)(**tokenizer(prompt, return_tensors="pt")).logits[0, -1]
    chances = logits.double().softmax(-1).tolist()
    texts = [tokenizer.decode([token], skip_special_tokens=True) for token in range(len(chances))]
    answer, rate = "", 0.0
    for token in sorted(range(len(chances)), key=lambda token: -chances[token]):
        if texts[token].strip() and rate + chances[token] <= wanted + 0.01:
            answer, rate = answer + texts[token], rate + chances[token]
    judged = [starts_in_answer(prompt=prompt, response=text, answer=answer) for text in texts]
    return answer, float(np.dot(judged, chances))


@dataclass
class Played:
    """What several steps left behind."""

    rates: np.ndarray
    """[S, B], of each prompt."""
    selections: list[Selection]
    drawn: list[StepRollouts]


def play(made: Sampler, known: Known, steps: int = STEPS) -> Played:
    rates, drawn = [], []
    selections = recorded(made)
    for step in range(steps):
        rates.append([known.rates[prompt.answer] for prompt in made._step_prompts(step)])
        drawn.append(made.sample_step(step))
    return Played(np.array(rates), selections, drawn)


def deviations(law: StoppingLaw, values: np.ndarray, of_end: np.ndarray, expected: float) -> float:
    """How many standard errors the mean of ``values`` is off, ``of_end`` [S] being the value at each possible end."""
    spread = math.sqrt(law.probabilities @ (of_end - law.probabilities @ of_end) ** 2 / len(values))
    return abs(float(values.mean()) - expected) / max(spread, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "overrides"),
    [
        (ada_seq_balance(4), {"sampling__rule": "ada_seq_balance"}),
        (ada_seq_pos(4), {"sampling__rule": "ada_seq_pos"}),
    ],
)
def test_costs_of_every_prompt_are_those_of_the_exact_law(
    known: Known, rule: Sequential, overrides: dict[str, Any]
) -> None:
    with known.sampler(**overrides) as made:
        played = play(made, known)
    asked = np.array([selection.drawn[1] for selection in played.selections])
    good = np.array([selection.drawn[3] for selection in played.selections])
    for rate in known.rates.values():
        law, mine = stopping_law(rule, rate), played.rates == rate
        assert mine.sum() == COPIES * STEPS
        assert deviations(law, asked[mine], law.samples, law.expected_samples) < 4
        # Wald: whatever the rule looks at, E[positives] = p E[samples]
        assert deviations(law, good[mine], law.positives, rate * law.expected_samples) < 4
        shares = law.positives / law.samples
        assert deviations(law, good[mine] / asked[mine], shares, float(law.probabilities @ shares)) < 4
    told = [finalize(step.metrics) for step in played.drawn]
    assert np.mean([each["sampling/samples_per_prompt"] for each in told]) == pytest.approx(asked.mean())
    assert {each["sampling/trained"] for each in told} == {4.0 * len(known.rates) * COPIES}


def test_the_figures_of_the_law_that_the_sampler_is_held_against() -> None:
    """Rounds of 8 up to 32 at pass rate 0.1."""
    assert stopping_law(ada_seq_balance(4), 0.1).expected_samples == pytest.approx(20.96248198548135, rel=1e-12)
    assert stopping_law(ada_seq_pos(4), 0.1).expected_samples == pytest.approx(13.564285375696443, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("combination", ["plain", "unbiased"])
def test_how_far_a_balanced_batch_pushes_each_prompt(known: Known, combination: str) -> None:
    """The mean of advantage * d ln P(outcome) / dp over what trains: 1 in the unbiased combination, for every p.

    The plain one has about c(p) instead, exactly what its law says.
    """
    rule = ada_seq_balance(4)
    with known.sampler(sampling__rule="ada_seq_balance", credit__combination=combination) as made:
        played = play(made, known)
    pushes = np.array([_pushes(step, rates) for step, rates in zip(played.drawn, played.rates, strict=True)])
    for rate in known.rates.values():
        law, mine = stopping_law(rule, rate), played.rates == rate
        measured = pushes[mine]
        error = measured.std(ddof=1) / math.sqrt(len(measured))
        expected = 1.0 if combination == "unbiased" else float(law.probabilities @ _plain_pushes(law, rule, rate))
        assert abs(measured.mean() - expected) < 4 * error
        if combination == "plain" and rate < 0.15:
            assert measured.mean() > 1 + 4 * error
            balanced = ((1 - rate) ** 2 + rate**2) / (2 * rate * (1 - rate))  # c(p) of docs/sampling.md
            both = law.probabilities[(law.positives >= 2) & (law.samples - law.positives >= 2)].sum()
            assert expected / (both * balanced) == pytest.approx(1, abs=0.25)


def _pushes(step: StepRollouts, rates: np.ndarray) -> np.ndarray:
    """[B], by prompt."""
    (advantages,), (rows,) = step.advantages, step.judged.owned
    prompts, rewards = step.judged.groups[rows], step.judged.rewards[rows]
    own = rates[prompts]
    slopes = np.where(rewards > 0.7, 1 / own, -1 / (1 - own))
    counts = np.bincount(prompts, minlength=len(rates))
    return np.bincount(prompts, weights=np.asarray(advantages) * slopes, minlength=len(rates)) / counts


def _plain_pushes(law: StoppingLaw, rule: Sequential, rate: float) -> np.ndarray:
    """[S], by possible end: the advantage is the reward less the pool's share of positives."""
    found = []
    for samples, positives in zip(law.samples.tolist(), law.positives.tolist(), strict=True):
        keep = rule.keeps(positives, samples - positives)
        kept = positives_to_keep(positives, samples - positives, 4, keep)
        share = positives / samples
        found.append((kept * (1 - share) / rate + (4 - kept) * share / (1 - rate)) / 4)
    return np.array(found)


@pytest.mark.parametrize("spare", [0, 3])
def test_refill_begins_as_many_prompts_as_a_negative_binomial(known: Known, tmp_path: Path, spare: int) -> None:
    answer, rate = next((answer, rate) for answer, rate in known.rates.items() if abs(rate - 0.1) < 0.02)
    rows = [json.loads(line) for line in known.data.read_text().splitlines()]
    row = next(row for row in rows if row["answer"] == answer)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(400)))
    places, steps, chance = 12, 40, 1 - rate**4 - (1 - rate) ** 4
    with known.sampler(
        data__train=str(tmp_path / "train.jsonl"),
        rollout__prompts_per_step=places,
        rollout__group_size=4,
        sampling__refill=True,
        sampling__max_prompts=400,
        sampling__spare=spare,
    ) as made:
        selections, positions = recorded(made), []
        for step in range(steps):
            positions.append(made._position)
            made.sample_step(step)
        positions.append(made._position)
    for selection in selections:
        assert len(np.unique(selection.prompts)) == places
        rewards = selection.rewards.reshape(places, 4)
        assert (rewards.min(1) < rewards.max(1)).all()
    # The last prompt that trains is the place-th success; spare ones are drawn besides, and come again.
    begun = np.array([selection.prompts.max() + 1 for selection in selections])
    expected, spread = places / chance, math.sqrt(places * (1 - chance) / steps) / chance
    assert abs(begun.mean() - expected) < 4 * spread
    assert np.diff(positions).tolist() == begun.tolist()
