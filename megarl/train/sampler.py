"""The sampling half of a step: which responses this rank draws, their rewards, and who trains on them.

Sequence ``s = group * G + sample`` of a global step belongs to mini-batch ``s // (B * G / N)``; inside a mini-batch
the data-parallel ranks hold equal, contiguous shares. The ranks that hold one copy of the model divide the sampling
of their share and then exchange the rollouts, but not the routes, of which every rank needs other rows: those stay on
the rank that drew them until the step is cut into micro-batches. Only rewards, one number each, are known everywhere:
advantages need whole groups, which may span ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from megarl.config import Config
from megarl.core.diagnostics import effective_prompt_ratio
from megarl.core.metrics import Stat
from megarl.core.objectives import Objective, selected_responses, sequence_advantages
from megarl.core.packing import without_routes
from megarl.core.provenance import provenance_metrics, refuse_mixed_versions
from megarl.core.types import Rollout, SampleRequest
from megarl.data.prompts import Prompt, PromptOrder, load_prompts
from megarl.data.rewards import load_reward, score
from megarl.errors import ConfigError, MegarlError, RolloutError, TraceError, WeightSyncError
from megarl.megatron import distributed
from megarl.rollout.engine import Engine, SamplingParams
from megarl.train.drawing import Drawing
from megarl.train.progress import Advance
from megarl.train.token_advantages import Judged

TRAIN, EVALUATE = 0, 1
"""Purposes of a sampling seed, so that evaluation never repeats the noise of training."""


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """What one data-parallel rank trains on in a global step."""

    mini_batches: list[list[Rollout]]
    """One list of rollouts per mini-batch, in the order of the sequences."""
    advantages: list[np.ndarray]
    """float64, one per rollout of each mini-batch; 0 where the objective has one per token, which takes a pass."""
    judged: Judged
    """What such an objective needs besides."""
    metrics: dict[str, Stat]
    """Rewards are over the whole step and on every rank alike; the rest is of this rank's rollouts."""
    first_reward_error: str | None

    def drop_routes(self) -> None:
        """Let go of the traces, once every rank has its rows of them."""
        for part in self.mini_batches:
            part[:] = [without_routes(rollout) for rollout in part]


def sampling_seed(run_seed: int, purpose: int, step: int, group: int, sample: int) -> int:
    """One seed per response of a run, the same on whatever rank it is drawn."""
    words = np.random.SeedSequence([run_seed, purpose, step, group, sample]).generate_state(1, np.uint64)
    return int(words[0])


def owned_sequences(num_sequences: int, mini_batches: int, rank: int, ranks: int) -> list[list[int]]:
    """The sequences of data-parallel rank ``rank`` of ``ranks``, by mini-batch: a partition of 0..num_sequences-1."""
    per_mini, rest = divmod(num_sequences, mini_batches)
    share, uneven = divmod(per_mini, ranks)
    if rest or uneven:
        raise ConfigError(
            f"{num_sequences} responses of a step do not divide into {mini_batches} mini-batches of {ranks} equal parts"
        )
    return [list(range(n * per_mini + rank * share, n * per_mini + (rank + 1) * share)) for n in range(mini_batches)]


class Sampler:
    """Prompts, engine and reward of a run, on one rank."""

    def __init__(self, config: Config, engine: Engine, objective: Objective) -> None:
        self.config = config
        self.engine = engine
        self.objective = objective
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(config.model.path)
        data = config.data
        self.prompts = self._load(data.train, data.split, None)
        self.heldout: list[Prompt] = []
        if data.heldout is not None:
            self.heldout = self._load(data.heldout, data.resolved_heldout_split, config.eval.max_prompts)
        self.order = PromptOrder(len(self.prompts), config.run.seed)
        self.reward = load_reward(config.reward.function)
        self._ahead: tuple[int, Drawing] | None = None
        self.stop_tokens = stop_tokens(config.model.path, self.tokenizer)

    def _load(self, source: str, split: str | None, limit: int | None) -> list[Prompt]:
        data = self.config.data
        return load_prompts(
            source,
            tokenizer=self.tokenizer,
            prompt_field=data.prompt_field,
            answer_field=data.answer_field,
            chat_template=data.chat_template,
            max_prompt_tokens=data.max_prompt_tokens,
            split=split,
            limit=limit,
        )

    def _params(self, temperature: float, routes: bool) -> SamplingParams:
        rollout = self.config.rollout
        return SamplingParams(
            temperature=temperature,
            top_p=rollout.top_p,
            max_response_tokens=rollout.max_response_tokens,
            stop_token_ids=self.stop_tokens,
            return_routed_experts=routes,
        )

    def begin_step(self, step: int) -> None:
        """Have the engine sample this rank's responses of a step in the background, with the weights that it has now.

        Not a collective call. ``sample_step`` of the same step takes them; until then the engine's weights must stay.
        """
        assert self._ahead is None, "one step ahead is all there is"
        params, requests = self._step_requests(step)
        self._ahead = step, Drawing(lambda on_finish: self.engine.generate(requests, params, on_finish))

    def settle(self) -> None:
        """Wait until the engine is at rest; an error is kept for ``sample_step``."""
        if self._ahead is not None:
            with suppress(RolloutError, TraceError, WeightSyncError):
                self._ahead[1].result()

    def sample_step(self, step: int, on_finish: Advance | None = None) -> StepRollouts:
        """Draw the B x G responses of a global step, judge them, and deal them out; a collective call."""
        rollout = self.config.rollout
        size, num_groups = rollout.group_size, rollout.prompts_per_step
        prompts, owned = self._step_prompts(step), self._owned()
        drawn = self._drawn(lambda: self._step_responses(step, on_finish))
        rewards, valid, error = self._judge(prompts, drawn, num_groups * size, size)
        if not valid.any():
            raise RolloutError(f"step {step}: the reward function failed on every response; first: {error}")
        groups = np.repeat(np.arange(num_groups), size)
        advantages, counted = self._advantages(rewards, valid, groups)
        # Routes stay where they were drawn until it is known which rank needs which rows.
        exchanged = distributed.gather_in_model([without_routes(r) for r in drawn])
        by_sequence = {r.group * size + r.sample: r for r in [*exchanged, *drawn]}
        mini_batches = [[_counted(by_sequence[s], bool(counted[s])) for s in part] for part in owned]
        return StepRollouts(
            mini_batches,
            [advantages[part] for part in owned],
            Judged(rewards, groups, owned),
            {**_reward_metrics(rewards, valid, groups), "rollout/trains_fraction": _fraction(counted)}
            | _rollout_metrics([by_sequence[s] for part in owned for s in part], trainer_version=step),
            error,
        )

    def _step_prompts(self, step: int) -> list[Prompt]:
        number = self.config.rollout.prompts_per_step
        return [self.prompts[i] for i in self.order.take(step * number, number)]

    def _owned(self) -> list[list[int]]:
        return owned_sequences(
            self.config.responses_per_step, self.config.train.mini_batches, distributed.dp_rank(), distributed.dp_size()
        )

    def _step_requests(self, step: int) -> tuple[SamplingParams, list[SampleRequest]]:
        """What this rank asks the engine for: its part of what the ranks with its copy of the model train on."""
        params = self._params(self.config.rollout.temperature, routes=True)
        params.require_stochastic()
        copy = distributed.model_group()
        mine = np.array_split([s for part in self._owned() for s in part], copy.size())[copy.rank()].tolist()
        return params, self._requests(self._step_prompts(step), mine, self.config.rollout.group_size, (TRAIN, step))

    def _step_responses(self, step: int, on_finish: Advance | None) -> list[Rollout]:
        if self._ahead is not None:
            (begun, drawing), self._ahead = self._ahead, None
            assert begun == step, f"step {begun} was begun, step {step} is asked for"
            return drawing.result(on_finish)
        params, requests = self._step_requests(step)
        return self.engine.generate(requests, params, on_finish)

    def _advantages(self, rewards: np.ndarray, valid: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """float64 [S], 0 where there is none; bool [S], which responses train and count in denominators."""
        advantages, counted = np.zeros(len(rewards)), valid.copy()
        counted[valid] = selected_responses(self.objective, rewards[valid], groups[valid]).numpy()
        if self.objective.advantage != "token_level_kl":
            advantages[valid] = sequence_advantages(self.objective, rewards[valid], groups[valid]).double().numpy()
        return advantages, counted

    def evaluate(self, step: int, on_finish: Advance | None = None) -> dict[str, float]:
        """Mean reward, pass rate and length on held-out prompts, ``eval.samples`` responses each; a collective call.

        The seeds do not depend on the step, so that a change of the figures is a change of the weights.
        """
        samples = self.config.eval.samples
        total = len(self.heldout) * samples
        mine = list(range(dist.get_rank(), total, dist.get_world_size()))
        params = self._params(self.config.eval.temperature, routes=False)
        requests = self._requests(self.heldout, mine, samples, (EVALUATE, 0))
        drawn = self._drawn(lambda: self.engine.generate(requests, params, on_finish))
        rewards, valid, _ = self._judge(self.heldout, drawn, total, samples)
        if not valid.any():
            raise RolloutError(f"evaluation at step {step}: the reward function failed on every response")
        lengths = torch.tensor([float(r.loss_mask.sum()) for r in drawn] or [0.0], dtype=torch.float64).sum()
        lengths = lengths.to(torch.cuda.current_device())
        dist.all_reduce(lengths)
        judged = rewards[valid]
        return {
            "eval/reward": float(judged.mean()),
            "eval/pass_rate": float((judged > 0.5).mean()),
            "eval/length_mean": float(lengths) / total,
            "eval/responses": float(len(judged)),
            "eval/reward_errors": float(total - len(judged)),
        }

    def _requests(
        self, prompts: Sequence[Prompt], sequences: Sequence[int], group_size: int, purpose_and_step: tuple[int, int]
    ) -> list[SampleRequest]:
        return [
            SampleRequest(
                prompts[s // group_size].tokens,
                group=s // group_size,
                sample=s % group_size,
                seed=sampling_seed(self.config.run.seed, *purpose_and_step, s // group_size, s % group_size),
            )
            for s in sequences
        ]

    def _drawn(self, draw: Callable[[], list[Rollout]]) -> list[Rollout]:
        """This rank's responses; an error on one rank is one on all, so that none waits."""
        failure: MegarlError | None = None
        drawn: list[Rollout] = []
        try:
            drawn = draw()
            if self.config.train.mixed_versions == "refuse":
                refuse_mixed_versions(drawn)
        except (RolloutError, TraceError, WeightSyncError) as error:
            failure = error
        distributed.fail_together(failure, "sampling")
        return drawn

    def _judge(
        self, prompts: Sequence[Prompt], drawn: Sequence[Rollout], num_sequences: int, group_size: int
    ) -> tuple[np.ndarray, np.ndarray, str | None]:
        """Rewards [S] and validity [S] of all sequences, each judged on the rank that drew it."""
        result = score(
            self.reward,
            prompts=[prompts[r.group].text for r in drawn],
            responses=[self.tokenizer.decode(r.response_tokens, skip_special_tokens=True) for r in drawn],
            answers=[prompts[r.group].answer for r in drawn],
        )
        table = torch.zeros(2, num_sequences, dtype=torch.float64)
        rows = [r.group * group_size + r.sample for r in drawn]
        table[0, rows] = torch.from_numpy(result.rewards)
        table[1, rows] = torch.from_numpy(result.valid).double()
        table = table.to(torch.cuda.current_device())
        dist.all_reduce(table)
        rewards, valid = table.cpu().numpy()
        return rewards, valid > 0.5, result.first_error


def stop_tokens(model_path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """End tokens of the checkpoint's generation config and tokenizer; ConfigError if there are none."""
    found: set[int] = set()
    try:
        eos = GenerationConfig.from_pretrained(model_path).eos_token_id
        found.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    except OSError:  # the file is optional
        pass
    if isinstance(tokenizer.eos_token_id, int):
        found.add(tokenizer.eos_token_id)
    if not found:
        raise ConfigError(f"{model_path} names no end token, neither in generation_config.json nor in the tokenizer")
    return tuple(sorted(found))


def _counted(rollout: Rollout, counts: bool) -> Rollout:
    """A response without a reward, or not selected, stays in its place but trains nothing, in no denominator."""
    return rollout if counts else replace(rollout, loss_mask=np.zeros_like(rollout.loss_mask))


def _fraction(mask: np.ndarray) -> Stat:
    return Stat.mean(torch.from_numpy(mask).double())


def _reward_metrics(rewards: np.ndarray, valid: np.ndarray, groups: np.ndarray) -> dict[str, Stat]:
    """Equal on every rank; merging several copies leaves means as they are."""
    judged = torch.from_numpy(rewards[valid])
    return {
        "reward/mean": Stat.mean(judged),
        "reward/pass_rate": Stat.mean((judged > 0.5).double()),
        "reward/error_fraction": _fraction(~valid),
        "prompts/effective_ratio": effective_prompt_ratio(judged, torch.from_numpy(groups[valid])),
    }


def _rollout_metrics(rollouts: Sequence[Rollout], trainer_version: int) -> dict[str, Stat]:
    lengths = torch.tensor([float(len(r.tokens) - r.prompt_length) for r in rollouts], dtype=torch.float64)
    truncated = torch.tensor([float(r.finish_reason == "length") for r in rollouts], dtype=torch.float64)
    return {
        **provenance_metrics(rollouts, trainer_version),
        "response/length_mean": Stat.mean(lengths),
        "response/length_max": Stat.max(lengths),
        "response/truncated_fraction": Stat.mean(truncated),
        "rollout/tokens": Stat.total(float(sum(len(r.tokens) for r in rollouts))),
    }
