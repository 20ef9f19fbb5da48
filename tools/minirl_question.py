"""Train a tiny MoE with many objectives, to see which trust regions survive a gap between engines.

    python tools/minirl_question.py run OUT.jsonl [--arms 'window@old none,...'] [--lr 0.003]
    python tools/minirl_question.py table OUT.jsonl

An autoregressive policy of two MoE layers learns to sort symbols. The rollout engine has the same weights, with experts
rounded to FP8 and with noise on the router's logits; the training engine computes in fp32, with its own routes or with
replayed ones. All runs of an arm (strengths of the noise x seeds) are trained at once: S is the leading dimension of
every tensor, and nothing mixes runs. Set-up, claims and results: docs/minirl_question.md.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import inf
from operator import gt, lt
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from megarl.core.fp8 import round_through_fp8
from megarl.core.objectives import OBJECTIVES, Factor, Objective, TokenColumns, coefficients

Weights = dict[str, Tensor]
Arm = tuple[Objective, str]  # and whose routes training uses: "none" its own, "r2" the old pass's, "r3" the rollout's
MEDIANS = ("gap", "k3", "flips", "bad")


@dataclass(frozen=True, slots=True)
class Setup:
    """Sizes of the run, the task and the model. noises: standard deviations, added to the rollout's router logits."""

    lr: float = 8e-3
    steps: int = 300
    seeds: int = 8
    noises: tuple[float, ...] = (0.1, 0.5)
    prompts: int = 8
    group: int = 8
    updates: int = 4
    pool: int = 256
    vocab: int = 8
    length: int = 5
    width: int = 32
    layers: int = 2
    experts: int = 8
    expert_width: int = 8
    top_k: int = 2
    cold_steps: int = 100


def make_arms() -> dict[str, Arm]:
    """Return all arms, named "mask@anchor [cap] replay". Advantage (reward minus mean) and aggregation are MiniRL's."""
    rows = {"window": "minirl", "tv": "dppo_tv", "kl": "dppo_kl", "minimal.5": "minimal_mask"}
    masks = {name: OBJECTIVES[row].records[0] for name, row in rows.items()}
    masks["minimal.8"] = replace(masks["minimal.5"], low=-0.8)
    arms: dict[str, Arm] = {}

    def add(mask: str | None, anchor: str, replay: str, cap: float | None = None) -> None:
        parts = () if mask is None else (replace(masks[mask], policies=f"theta_{anchor}"),)
        row = replace(OBJECTIVES["minirl"], masks=parts, factors=(Factor("theta_mu", high=cap),))
        name = "unmasked" if mask is None else f"{mask}@{anchor}"
        arms[f"{name} cap {cap:g} {replay}" if cap else f"{name} {replay}"] = row, replay

    add(None, "", "none")
    add(None, "", "none", cap=3.0)
    for replay, cap in product(("none", "r2", "r3"), (None, 3.0, 5.0)):
        add("window", "old", replay, cap)
    for replay, name in product(("none", "r3"), ("window@mu", "tv@mu", "tv@old", "kl@mu", "kl@old")):
        mask, anchor = name.split("@")
        add(mask, anchor, replay)
    for name in ("minimal.5@mu", "minimal.8@mu", "minimal.5@old"):
        mask, anchor = name.split("@")
        add(mask, anchor, "none")
    return arms


def make_weights(setup: Setup) -> Weights:
    """Return random weights of S policies; those of a seed are equal for every noise."""
    inputs = (2 * setup.length - 1) * setup.vocab + setup.length
    s, experts = setup, setup.experts * setup.expert_width
    shapes = {"embed": (inputs, s.width), "router": (s.layers, s.width, s.experts), "out": (s.width, s.vocab)}
    shapes |= {"up": (s.layers, s.width, experts), "down": (s.layers, experts, s.width)}
    weights = {}
    for name, shape in shapes.items():
        scale = 0.5 if name == "embed" else shape[-2] ** -0.5
        one = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale for seed in range(s.seeds)]
        weights[name] = torch.stack(one * len(s.noises))
    return weights


def encode(setup: Setup, prompts: Tensor, responses: Tensor, steps: slice = slice(None)) -> Tensor:
    """Return the policy's input before each response token, 0 or 1: [S, B * steps, symbols by position, and step].

    prompts, responses: int64 [S, B, length]. A token sees the prompt and the response before it.
    """
    runs, batch, length = responses.shape
    place, before = torch.eye(length)[steps], torch.ones(length, length - 1).tril(-1)[steps]
    prompt = F.one_hot(prompts, setup.vocab).float().flatten(2)[:, :, None].expand(-1, -1, len(place), -1)
    response = F.one_hot(responses[:, :, :-1], setup.vocab).float()[:, :, None] * before[:, :, None]
    return torch.cat([prompt, response.flatten(3), place.expand(runs, batch, -1, -1)], -1).flatten(1, 2)


def forward(
    setup: Setup, weights: Weights, inputs: Tensor, routes: Tensor | None = None, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [S, T, V], and the experts that were used [S, T, layers, K]. inputs: [S, T, F].

    routes: experts to replay, with gates of the router's own logits; noise: added to these, [S, T, layers, experts].
    """
    hidden, used = inputs @ weights["embed"], []
    for layer in range(setup.layers):
        normed = F.rms_norm(hidden, (setup.width,))
        logits = normed @ weights["router"][:, layer]
        if noise is not None:
            logits = logits + noise[:, :, layer]
        experts = logits.topk(setup.top_k).indices if routes is None else routes[:, :, layer]
        gates = torch.zeros_like(logits).scatter(-1, experts, logits.gather(-1, experts).softmax(-1))
        inner = (normed @ weights["up"][:, layer]).relu().unflatten(-1, (setup.experts, -1)) * gates[..., None]
        hidden = hidden + inner.flatten(-2) @ weights["down"][:, layer]
        used.append(experts)
    return (F.rms_norm(hidden, (setup.width,)) @ weights["out"]).log_softmax(-1), torch.stack(used, 2)


def round_experts(setup: Setup, weights: Weights) -> Weights:
    """Return what the rollout engine serves: each expert's matrices rounded to FP8 with a scale of their own."""
    shapes = {"up": (setup.width, setup.expert_width), "down": (setup.expert_width, setup.width)}
    rounded = {name: round_through_fp8(weights[name].flatten(0, 2), block) for name, block in shapes.items()}
    return weights | {name: value.view_as(weights[name]) for name, value in rounded.items()}


def sample(setup: Setup, weights: Weights, prompts: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return responses [S, B, length], log mu [S, B * length] and routes [S, B * length, layers, K] of the rollout."""
    (batch, length), responses = prompts.shape[1:], torch.zeros_like(prompts)
    logprobs, routes = [], []
    spread = torch.tensor(setup.noises).repeat_interleave(setup.seeds)[:, None, None, None]
    # A seed has the same random numbers for every noise.
    size = (setup.seeds, batch, length, setup.layers * setup.experts + setup.vocab)
    uniform = torch.rand(size, generator=generator).clamp_(1e-7, 1 - 1e-7).repeat(len(setup.noises), 1, 1, 1)
    normal = (2 * uniform[..., setup.vocab :] - 1).erfinv().mul_(2**0.5).unflatten(-1, (setup.layers, -1))
    gumbel = -(-uniform[..., : setup.vocab].log()).log()
    for step in range(length):
        inputs = encode(setup, prompts, responses, slice(step, step + 1))
        found, used = forward(setup, weights, inputs, noise=normal[:, :, step] * spread)
        responses[:, :, step] = (found + gumbel[:, :, step]).argmax(-1)
        logprobs.append(found.gather(-1, responses[:, :, step, None]).squeeze(-1))
        routes.append(used)
    return responses, torch.stack(logprobs, 2).flatten(1), torch.stack(routes, 2).flatten(1, 2)


def cold_start(setup: Setup) -> Weights:
    """Return weights after a short supervised training on random prompts, which all arms share."""
    weights = {name: value.requires_grad_() for name, value in make_weights(setup).items()}
    optimizer = torch.optim.Adam(weights.values(), 0.01)
    generator = torch.Generator().manual_seed(1)
    for step in range(setup.cold_steps):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / setup.cold_steps)
        prompts = torch.randint(setup.vocab, (setup.seeds, 64, setup.length), generator=generator)
        prompts = prompts.repeat(len(setup.noises), 1, 1)
        answers = prompts.sort(-1).values
        logprobs, _ = forward(setup, weights, encode(setup, prompts, answers))
        loss = -logprobs.gather(-1, answers.flatten(1)[..., None]).sum() / answers[0].numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: value.detach() for name, value in weights.items()}


def weigh(setup: Setup, objective: Objective, columns: dict[str, Tensor]) -> Tensor:
    """Return the coefficients [S, T] of S runs, each with its own denominator. columns: [S, T] each, by name."""
    runs, tokens = columns["logprobs"].shape
    bounds = torch.arange(0, runs * tokens + 1, setup.length)
    packed = {name: column.flatten() for name, column in columns.items()}
    mask = torch.ones(runs * tokens, dtype=torch.bool)
    found = coefficients(objective, TokenColumns(**packed, loss_mask=mask, cu_seqlens=bounds))
    # One mean over the sequences of all runs: times S it is the mean over each run's.
    return found.values.view(runs, tokens) * runs


def train(setup: Setup, objective: Objective, replay: str, start: Weights) -> dict[str, Tensor]:
    """Train S runs of one arm; return each step's measures, [steps, S] each, by name."""
    weights = {name: value.clone().requires_grad_() for name, value in start.items()}
    optimizer = torch.optim.Adam(weights.values(), setup.lr, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(2)
    pool = torch.randint(setup.vocab, (setup.seeds, setup.pool, setup.length), generator=generator)
    log: list[dict[str, Tensor]] = []
    for _ in range(setup.steps):
        chosen = torch.rand(setup.seeds, setup.pool, generator=generator).topk(setup.prompts).indices
        prompts = pool.gather(1, chosen[..., None].expand(-1, -1, setup.length))
        prompts = prompts.repeat_interleave(setup.group, 1).repeat(len(setup.noises), 1, 1)
        served = round_experts(setup, {name: value.detach() for name, value in weights.items()})
        with torch.no_grad():
            responses, mu, rollout_routes = sample(setup, served, prompts, generator)
            inputs, tokens = encode(setup, prompts, responses), responses.flatten(1)[..., None]
            rewards = (responses == prompts.sort(-1).values).all(-1).float()
            groups = rewards.unflatten(1, (setup.prompts, setup.group))
            advantages = (groups - groups.mean(-1, keepdim=True)).flatten(1).repeat_interleave(setup.length, 1)
            replayed = rollout_routes if replay == "r3" else None
            found, used = forward(setup, weights, inputs, replayed)
            old, routes = found.gather(-1, tokens).squeeze(-1), used if replay == "r2" else replayed
        moved = []
        for part in torch.arange(tokens.shape[1]).chunk(setup.updates):
            found, _ = forward(setup, weights, inputs[:, part], None if routes is None else routes[:, part])
            logprobs = found.gather(-1, tokens[:, part]).squeeze(-1)
            columns = {"old_logprobs": old, "rollout_logprobs": mu, "advantages": advantages}
            columns = {name: column[:, part] for name, column in columns.items()} | {"logprobs": logprobs.detach()}
            optimizer.zero_grad()
            (-(weigh(setup, objective, columns) * logprobs).sum()).backward()
            clip_gradients(weights)
            optimizer.step()
            moved.append(logprobs.detach().exp() - mu[:, part].exp())
        change, ratio = torch.cat(moved, 1), old - mu
        log.append(
            {
                "reward": rewards.mean(1),
                "gap": (old.exp() - mu.exp()).abs().mean(1),
                "k3": (ratio.exp() - 1 - ratio).mean(1),
                "flips": (used.sort(-1).values != rollout_routes.sort(-1).values).any(-1).float().mean((1, 2)),
                "lowest": change.amin(1),
                "highest": change.amax(1),
                "bad": ((advantages < 0) & (change <= -0.5)).float().mean(1),
            }
        )
    return {name: torch.stack([step[name] for step in log]) for name in log[0]}


def clip_gradients(weights: Weights) -> None:
    """Scale each run's gradient [S, ...] to a norm of at most 1."""
    gradients = [value.grad for value in weights.values() if value.grad is not None]
    norms = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0).sqrt()
    for gradient in gradients:
        gradient.mul_(norms.clamp(min=1).reciprocal().view(-1, *[1] * (gradient.dim() - 1)))


def find_collapse(rewards: list[float]) -> int | None:
    """Return the last step at which a run that ends collapsed was well; None if it does not end so.

    Collapsed: the mean of the last tenth is below half of the best such mean, or below the first reward. Well: the mean
    of a thirtieth of the steps is at least half of the best such mean, or of the first reward if that is higher.
    """
    tenth, few = max(len(rewards) // 10, 1), max(len(rewards) // 30, 1)
    long, short = ([sum(rewards[i - n : i]) / n for i in range(n, len(rewards) + 1)] for n in (tenth, few))
    if long[-1] >= max(max(long) / 2, rewards[0]):
        return None
    return max((i + few for i, mean in enumerate(short) if mean >= max(*short, rewards[0]) / 2), default=0)


def summarize(setup: Setup, name: str, log: dict[str, Tensor]) -> dict:
    """Return one line of the results: per noise and seed, what the table shows; and all rewards."""
    values = {key: log[key].mean(0) for key in MEDIANS}
    values |= {"start": log["reward"][0], "final": log["reward"][-max(setup.steps // 10, 1) :].mean(0)}
    values |= {"lowest": log["lowest"].amin(0), "highest": log["highest"].amax(0)}
    rewards = [[round(reward, 3) for reward in run] for run in log["reward"].T.tolist()]
    line = {key: value.view(-1, setup.seeds).tolist() for key, value in values.items()}
    deaths = [find_collapse(run) for run in rewards]
    line["collapse"] = [deaths[i : i + setup.seeds] for i in range(0, len(deaths), setup.seeds)]
    return {"arm": name, "setup": asdict(setup), **line, "rewards": rewards}


def print_table(lines: list[dict]) -> None:
    """Print medians over seeds. sooner:later: seeds in which @old collapsed before, and after, the same arm @mu."""
    print("| noise | lr | arm | collapsed | at step | sooner:later | final reward | gap | k3 | flips | bad |")
    print("|---" * 11 + "|")
    for i, line in product(range(len(lines[0]["setup"]["noises"])), lines):
        dead, final = [step for step in line["collapse"][i] if step is not None], line["final"][i]
        rival = next((x for x in lines if x["arm"] == line["arm"].replace("@old", "@mu") != line["arm"]), line)
        old, mu = ([inf if step is None else step for step in x["collapse"][i]] for x in (line, rival))
        order = f"{sum(map(lt, old, mu))}:{sum(map(gt, old, mu))}" if rival is not line else "–"
        gap, k3, flips, bad = (median(line[key][i]) for key in MEDIANS)
        print(
            f"| {line['setup']['noises'][i]:g} | {line['setup']['lr']:g} | {line['arm']} | {len(dead)}/{len(final)} | "
            f"{f'{median(dead):g}' if dead else '–'} | {order} | {median(final):.2f} "
            f"[{min(final):.2f}, {max(final):.2f}] | {gap:.3f} | {k3:.1e} | {flips:.2f} | {bad:.1e} |"
        )


def main() -> None:
    """Run arms, or print the table of a file of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--arms", default=",".join(make_arms()), help="names, with commas between them")
    for name, kind in (("lr", float), ("steps", int), ("seeds", int)):
        parser.add_argument(f"--{name}", type=kind, default=getattr(Setup(), name))
    args = parser.parse_args()
    if args.what == "table":
        return print_table([json.loads(line) for line in args.file.read_text().splitlines()])
    start = cold_start(setup := Setup(lr=args.lr, steps=args.steps, seeds=args.seeds))
    for name in args.arms.split(","):
        line = json.dumps(summarize(setup, name, train(setup, *make_arms()[name], start)))
        with args.file.open("a") as out:
            out.write(line + "\n")


if __name__ == "__main__":
    main()
