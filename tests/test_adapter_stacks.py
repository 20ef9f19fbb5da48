"""NeMo-RL, prime-rl, SkyRL and Megatron-SWIFT call megarl's rows as their source does, with their own division.

The stand-ins for their packages are written from the signatures in docs/stacks.md, which also says what of the real
packages was run.
"""

from __future__ import annotations

import enum
import importlib
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.adapters.columns import columns_read, find_row, token_columns
from megarl.core.objectives import OBJECTIVES, TokenColumns, policy_loss
from megarl.errors import ConfigError

B, S = 6, 9
SOURCE = torch.Generator().manual_seed(0)
THETA, OLD, MU, REF = (-0.1 - torch.rand(B, S, generator=SOURCE, dtype=torch.float64) for _ in range(4))
ADVANTAGES = torch.randn(B, 1, generator=SOURCE, dtype=torch.float64).expand(B, S)
MASK = torch.arange(S) < torch.randint(2, S + 1, (B, 1), generator=SOURCE)
ROWS = ("minirl", "grpo", "dapo", "gspo", "dr_grpo", "icepop", "ctpo", "sapo", "gmpo", "topr")
Loss = Callable[[Tensor, slice], Tensor]


def wanted(row: Any, old: Tensor | None = OLD) -> Tensor:
    """The gradient of the whole batch by ``policy_loss``."""
    theta = THETA.clone().requires_grad_()
    columns = {"rollout_logprobs": MU, "advantages": ADVANTAGES, "loss_mask": MASK, "ref_logprobs": REF}
    columns["old_logprobs"] = theta.detach() if old is None else old
    policy_loss(row, TokenColumns.of_padded(theta, columns))[0].backward()
    assert theta.grad is not None
    return theta.grad


def found(loss: Loss, size: int = 2) -> Tensor:
    """The gradient of a stack: the sum over its micro-batches."""
    theta = THETA.clone().requires_grad_()
    for start in range(0, B, size):
        rows = slice(start, start + size)
        loss(theta[rows], rows).backward()
    assert theta.grad is not None
    return theta.grad


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    def make(name: str, **contents: Any) -> ModuleType:
        parts, module = name.split("."), ModuleType(name)
        for end in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:end]))
            monkeypatch.setitem(sys.modules, module.__name__, module)
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
        vars(module).update(contents)
        return module

    return make


def adapter(name: str) -> Any:
    return importlib.import_module(f"megarl.adapters.{name}")


@pytest.mark.parametrize("row", ROWS)
def test_nemo_rl(stand_in: Any, row: str) -> None:
    kinds = enum.Enum("LossType", "TOKEN_LEVEL SEQUENCE_LEVEL")
    stand_in("nemo_rl.algorithms.loss.interfaces", LossType=kinds, LossInputType=enum.Enum("LossInputType", "LOGPROB"))
    loss = adapter("nemo_rl").PolicyLoss(row)
    assert loss.loss_type.name == ("TOKEN_LEVEL" if OBJECTIVES[row].aggregation == "token-mean" else "SEQUENCE_LEVEL")
    names = {"prev_logprobs": OLD, "generation_logprobs": MU, "reference_policy_logprobs": REF}
    names |= {"advantages": ADVANTAGES, "token_mask": MASK.double()}
    data = {name: torch.cat([torch.zeros(B, 1), column], 1) for name, column in names.items()}
    counts = {"global_valid_seqs": torch.tensor(float(B)), "global_valid_toks": MASK.sum()}

    def call(theta: Tensor, rows: slice) -> Tensor:
        micro = {name: column[rows] for name, column in data.items()} | {"sample_mask": torch.ones(B)[rows]}
        return loss(next_token_logprobs=theta, data=micro, **counts)[0]

    torch.testing.assert_close(found(call), wanted(row), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("row", ROWS)
def test_prime_rl(stand_in: Any, row: str) -> None:
    @dataclass
    class LossOutputs:
        loss: Tensor
        metrics: dict[str, Tensor]

    stand_in("prime_rl.trainer.rl.loss", LossOutputs=LossOutputs)
    parts = {} if OBJECTIVES[row].aggregation == "token-mean" else {"aggregation": "token-mean", "norm_length": "off"}
    given = {"inference_logprobs": MU, "ref_logprobs": REF, "advantages": ADVANTAGES, "loss_mask": MASK}

    def call(theta: Tensor, rows: slice) -> Tensor:
        inputs = Namespace(trainer_logprobs=theta[0], loss_weights=None, **{k: v[rows][0] for k, v in given.items()})
        return adapter("prime_rl").loss(inputs, row, **parts).loss / MASK.sum()

    variant = replace(OBJECTIVES[row], aggregation="token-mean", norm_length=None)
    torch.testing.assert_close(found(call, size=1), wanted(variant, old=None), rtol=1e-12, atol=1e-15)
    if parts:
        with pytest.raises(ConfigError, match=f"prime-rl: the row {row!r} divides as"):
            adapter("prime_rl").loss(None, row)


@pytest.mark.parametrize("row", ROWS)
def test_skyrl(stand_in: Any, row: str) -> None:
    losses: dict[str, Any] = {}
    register = lambda name: lambda function: losses.setdefault(name, function)  # noqa: E731
    stand_in("skyrl.backends.skyrl_train.utils.ppo_utils", register_policy_loss=register)
    adapter("skyrl").register(row)
    lengths, longest = MASK.sum(1, keepdim=True), 40
    reductions = {"token_mean": MASK.sum(), "sequence_mean": B * lengths, "seq_mean_token_sum_norm": B * longest}
    by_aggregation = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean"}
    reduction = by_aggregation.get(OBJECTIVES[row].aggregation, "seq_mean_token_sum_norm")
    advantages, config = ADVANTAGES / reductions[reduction], Namespace(loss_reduction=reduction, max_seq_len=longest)

    def call(theta: Tensor, rows: slice, mu: Tensor | None = MU) -> Tensor:
        more = {"loss_mask": MASK.double()[rows], "rollout_logprobs": None if mu is None else mu[rows]}
        return losses[f"megarl_{row}"](theta, OLD[rows], advantages[rows], config=config, **more)[0]

    torch.testing.assert_close(found(call), wanted(row), rtol=1e-12, atol=1e-15)
    if "rollout_logprobs" in columns_read(OBJECTIVES[row]):
        with pytest.raises(ConfigError, match=f"SkyRL: the row {row!r} reads rollout_logprobs, which the batch does"):
            call(THETA, slice(None), mu=None)
    config.loss_reduction = "prompt_mean"
    with pytest.raises(ConfigError, match="loss_reduction is 'prompt_mean', the row divides as"):
        call(THETA, slice(None))


@pytest.mark.parametrize("row", ROWS)
def test_ms_swift(stand_in: Any, row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = type("MegatronGRPOTrainer", (), {"loss_func": lambda self, output, data: (None, {"kl": 0.5})})
    trainers = stand_in("swift.megatron.trainers", MegatronGRPOTrainer=parent)
    monkeypatch.setattr("megatron.core.parallel_state.get_data_parallel_world_size", lambda: 1)
    adapter("ms_swift").use_row(row)
    trainer = trainers.MegatronGRPOTrainer()
    trainer.args = Namespace(overlong_filter=True, num_microbatches=3)
    names = {"old": OLD, "rollout": MU, "ref": REF}

    def call(theta: Tensor, rows: slice) -> Tensor:
        batch = Namespace(**{f"{name}_per_token_logps": column[rows] for name, column in names.items()})
        batch.advantages, batch.completion_mask, batch.num_items_in_batch = ADVANTAGES[rows], MASK[rows], MASK.sum()
        batch.truncated_mask = torch.zeros(len(theta), dtype=torch.bool)
        loss, metrics = trainer.loss_func(theta, {"grpo_batch": batch})
        assert metrics == {"kl": 0.5, "loss": loss.detach()}
        return loss / 3  # Megatron's schedule

    torch.testing.assert_close(found(call), wanted(row), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("row", "message"),
    {
        "geo_rs": "must know all tokens",
        "adaptive_power": "must know all tokens",
        "m2po": "must know all tokens",
        "dppo_topk": "reads the sampler's top K tokens",
        "rspo": "reads the drift of routers",
        "reinforce_rej_signed": "trains mixed_groups alone",
        replace(OBJECTIVES["grpo"], entropy_coef=0.1): "has an entropy term",
    }.items(),
)
def test_rows_that_a_micro_batch_cannot_serve_are_refused_by_name(row: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"verl: the row {row!r} {message}" if isinstance(row, str) else message):
        find_row(row, "verl")


@pytest.mark.parametrize("column", ["advantages", "loss_mask"])
def test_a_batch_without_advantages_or_mask_is_refused_by_name(column: str) -> None:
    columns = {"old_logprobs": OLD, "advantages": ADVANTAGES, "loss_mask": MASK, column: None}
    with pytest.raises(ConfigError, match=f"SkyRL: the row 'grpo' reads {column}, which the batch does not have"):
        token_columns(OBJECTIVES["grpo"], "SkyRL", THETA, **columns)


def test_every_other_row_names_the_columns_that_it_reads() -> None:
    """With only these columns a row has the gradient that it has with all."""
    given = {"old_logprobs": OLD, "rollout_logprobs": MU, "ref_logprobs": REF}
    refused = {"geo_rs", "adaptive_power", "m2po", "dppo_topk", "rspo", "reinforce_rej_signed"}
    for name in OBJECTIVES.keys() - refused:
        row, theta, other = OBJECTIVES[name], THETA.clone().requires_grad_(), THETA.clone().requires_grad_()
        some = {column: given[column] for column in columns_read(row)}
        always = {"loss_mask": MASK, "advantages": ADVANTAGES.abs()}  # some rows take no other advantages
        policy_loss(row, token_columns(row, "test", theta, **always, **some))[0].backward()
        policy_loss(row, token_columns(row, "test", other, **always, **given))[0].backward()
        torch.testing.assert_close(theta.grad, other.grad, msg=name)
        for column in columns_read(row):
            with pytest.raises(ConfigError, match=f"the row {name!r} reads {column}"):
                token_columns(row, "test", THETA, **always, **{**given, column: None})
