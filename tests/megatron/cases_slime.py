"""megarl.adapters.slime below slime's hooks, on a real MoE model: gradients, and what the watch sees."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import slime_driver as driver
import torch
from matrix_world import VOCAB, MatrixModel, Variant, build, gradients, settings_of
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from tiny_world import join

from megarl.adapters.columns import find_row
from megarl.core.objectives import OBJECTIVES, TokenColumns, policy_loss
from megarl.errors import MegarlError
from megarl.replay.checks import find_routers
from megarl.replay.megatron_state import unwrap

N, PER_MICRO = 8, 2


def samples(longest: int = 8) -> list[dict[str, torch.Tensor]]:
    """Prompts and responses of 2 to ``longest`` tokens with every column whole, and holes in the loss masks."""
    source = torch.Generator().manual_seed(0)
    found = []
    for _ in range(N):
        prompt, response = (int(torch.randint(2, longest + 1, (), generator=source)) for _ in range(2))
        column = {
            name: -0.2 - 3 * torch.rand(response, generator=source)
            for name in ("log_probs", "rollout_log_probs", "ref_log_probs")
        }
        advantage = torch.randn((), generator=source).expand(response)
        mask = (torch.rand(response, generator=source) > 0.2).int()
        mask[0] = 1
        tokens = torch.randint(1, VOCAB, (prompt + response,), generator=source)
        found.append({"tokens": tokens, "loss_masks": mask, "advantages": advantage, **column})
    return found


def batch_of(part: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    """A micro-batch as slime's loss is given one: response columns are this rank's slices, masks are whole."""
    totals, responses = [len(one["tokens"]) for one in part], [len(one["loss_masks"]) for one in part]
    sliced = {
        name: [
            driver.slice_log_prob_with_cp(one[name], total, response)
            for one, total, response in zip(part, totals, responses, strict=True)
        ]
        for name in ("log_probs", "rollout_log_probs", "ref_log_probs", "advantages")
    }
    masks = [one["loss_masks"] for one in part]
    whole = {"unconcat_tokens": [one["tokens"] for one in part], "total_lengths": totals, "response_lengths": responses}
    return {**whole, **sliced, "loss_masks": masks, "rollout_mask_sums": [mask.sum().float() for mask in masks]}


def micros_of_rank(made: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, Any]]:
    own = made[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]
    return [batch_of(own[start : start + PER_MICRO]) for start in range(0, len(own), PER_MICRO)]


def args_of(objective: str, per_token: bool = False, **more: Any) -> Namespace:
    return Namespace(
        megarl_objective=objective,
        calculate_per_token_loss=per_token,
        custom_loss_function_path="megarl.adapters.slime.loss",
        loss_type="custom_loss",
        rollout_temperature=0.8,
        rollout_top_p=1.0,
        log_probs_chunk_size=-1,
        allgather_cp=False,
        recompute_loss_function=False,
        **more,
    )


def model_of(layout: Mapping[str, Any], per_token: bool, recompute: str = "none") -> MatrixModel:
    variant = Variant(recompute=recompute)
    settings = settings_of(layout, variant)
    join(settings)
    model = build(settings, variant, calculate_per_token_loss=per_token)
    model.chunks[0].config.finalize_model_grads_func = finalize_model_grads
    driver.install()
    return model


def step_gradients(layout: dict[str, Any], rows: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Gradients of a whole step by row, of slime's loop with the adapter's loss."""
    found = {}
    for per_token in (False, True):
        chosen = [row for row in rows if (OBJECTIVES[row].aggregation == "token-mean") == per_token]
        model = model_of(layout, per_token) if chosen else None
        for row in chosen:
            assert model is not None
            args, micros = args_of(row, per_token), micros_of_rank(samples())
            driver.train_one_step(args, model.chunks, micros, N)
            found[row] = gradients(model.chunks)
    return found


def direct_gradients(rows: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The same by ``policy_loss`` over the whole batch, one rank, without micro-batches and without slime."""
    model = model_of({}, False)
    found, made = {}, samples()
    for row in rows:
        for chunk in model.chunks:
            chunk.zero_grad_buffer()
        logprobs = []
        for one in made:
            tokens, length = one["tokens"], len(one["tokens"])
            packing = driver.PackedSequences.of(torch.tensor([0, length]))
            logits = model.chunks[0](tokens[None], torch.zeros(1, length).long(), None, packed_seq_params=packing)[0]
            by_token = (logits[:-1] / 0.8).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            logprobs.append(by_token[-len(one["loss_masks"]) :])
        column = {name: torch.cat([one[name] for one in made]) for name in made[0] if name != "tokens"}
        columns = TokenColumns(
            torch.cat(logprobs),
            column["log_probs"],
            column["rollout_log_probs"],
            column["advantages"],
            column["loss_masks"].bool(),
            torch.tensor([0, *map(len, logprobs)]).cumsum(0),
            column["ref_log_probs"],
        )
        policy_loss(find_row(row, "test"), columns)[0].backward()
        found[row] = gradients(model.chunks)
    return found


def tis_weights(layout: dict[str, Any], row: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What the TIS function multiplies the stack's loss by, and the ratios old/mu; by response, put together."""
    join(settings_of(layout, Variant()))
    driver.install()
    batch = batch_of(samples())
    old, mu = batch["log_probs"], batch["rollout_log_probs"]
    kept = ("loss_masks", "total_lengths", "response_lengths")
    given = {"train_log_probs": old, "rollout_log_probs": mu, **{name: batch[name] for name in kept}}
    adapter = importlib.import_module("megarl.adapters.slime")
    loss, masks, metrics = adapter.tis(args_of(row), pg_loss=torch.ones(sum(map(len, old))), **given)
    assert masks is batch["loss_masks"]
    assert torch.equal(metrics["megarl/tis"], loss)
    keep = torch.cat(batch["loss_masks"]) > 0
    return loss[keep], (torch.cat(old) - torch.cat(mu)).exp()[keep]


def refusals(layout: dict[str, Any], asked: Sequence[tuple[str, str, dict[str, Any]]]) -> list[str]:
    """The errors of functions of the adapter, with the row and other arguments of slime."""
    join(settings_of(layout, Variant()))
    driver.install()
    adapter, said = importlib.import_module("megarl.adapters.slime"), []
    batch = {name: column for name, column in batch_of(samples()).items() if name != "log_probs"}
    logits = torch.zeros(1, sum(batch["total_lengths"]), VOCAB)
    for function, row, more in asked:
        given = {"loss": (batch, logits, sum), "before_train_step": (0, 0, [])}.get(function, ())
        named = {"pg_loss": logits, "train_log_probs": []} if function == "tis" else {}
        try:
            getattr(adapter, function)(args_of(row, **more), *given, **named)
        except MegarlError as error:
            said.append(str(error))
    return said


def watched(layout: dict[str, Any], fault: str) -> list[str]:
    """What the hooks say of the two steps of a rollout; ``fault`` happens in the second. "right" or the error."""
    model = model_of(layout, False, recompute="uniform")
    driver.RoutingReplay.all_routing_replays = []
    for chunk in model.chunks:
        for router in find_routers(unwrap(chunk)):
            router.router_replay = driver.RoutingReplay()
    replays, args, micros = driver.RoutingReplay.all_routing_replays, args_of("minirl"), micros_of_rank(samples(2))
    source, said = torch.Generator().manual_seed(1), []
    for replay in replays:
        for batch in micros * 2:
            rows = sum(len(driver._slots(total)) for total in batch["total_lengths"])
            replay.top_indices_list.append(torch.rand(rows, 8, generator=source).argsort(-1)[:, :2].int())
    for step in range(3):  # the hook of the third one reports on the second
        now = fault if step == 1 else "none"
        driver.RoutingReplay.is_on = now != "native"
        try:
            hook = "before_log_prob" if step == 2 else "before_train_step"
            driver.call_hook(hook, args, model.chunks, rollout_id=0, step_id=step)
            said.append("right")
        except MegarlError as error:
            said.append(str(error))
        if now == "skipped":
            replays[1].forward_index -= 1
        if now == "recomputed":
            replays[0].backward_index -= 1
        if step < 2:
            driver.train_one_step(args, model.chunks, micros, N)
        if step == 1:
            driver.RoutingReplay.clear_all()
    return said
