"""A whole RL step on megarl's parts, in plain loops: fork this file to write your own.

    python examples/rl_step.py --steps 20                    # MiniRL with routing replay (R3)
    python examples/rl_step.py --steps 20 --replay none      # the same without replay

It trains the quickstart's tiny MoE (2.5 M parameters, random weights) to answer with digits, on one CPU core. The
engine rounds its weights through FP8 and the trainer computes in fp32, so the two disagree as they do on real clusters.
Each line shows how much, and what replay changes:

    step  3/20  reward 0.544  flip 0.00% (native 12.93%)  k3 6.2e-04 (native 1.8e-03)  loss ...  grad norm ...

- flip: the share of the rollout's (token, layer, expert) choices that training does not use; native is without replay.
- k3: an estimate of KL[rollout policy || training policy] over the sampled tokens, which importance weights correct.

``megarl train`` does the same in ``megarl/trainer/loop.py``, on many ranks, with checkpoints and everything else.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from megarl.config import Config
from megarl.config.file import parse
from megarl.core.measures import mismatch_metrics
from megarl.core.metrics import Stat, finalize, merge
from megarl.core.objectives import OBJECTIVES, Denominators, TokenColumns, advantages_of, coefficients
from megarl.core.packing import drop_routes, pack
from megarl.core.types import Rollout, SampleRequest, TrainBatch
from megarl.data.tiny import EOS_ID, write_tiny_model
from megarl.engines.local.engine import LocalEngine
from megarl.engines.protocol import Engine, SamplingParams
from megarl.megatron import distributed
from megarl.megatron.passes import forward
from megarl.megatron.passes.micro_batches import MicroBatch, split_micro_batches
from megarl.megatron.policy import Policy, schedule_of
from megarl.megatron.rollout_routes import check_rollouts, deliver_routes, gather_shared
from megarl.replay import MicroRoutes
from megarl.routes import Disagreement

PROMPTS, GROUP_SIZE, RESPONSE_TOKENS = 8, 8, 10
MINI_BATCHES = 2  # optimizer steps per RL step: the second one is off-policy, and MiniRL corrects for that
OBJECTIVE = OBJECTIVES["minirl"]  # rows that select responses, or have a KL or one exponent per step, need more code


@dataclass
class MiniBatch:
    """The sequences of one optimizer step."""

    micro_batches: list[MicroBatch]
    """Sequences packed back to back, without padding; at most ``micro_batch_tokens`` tokens each."""
    denominators: Denominators
    """What the loss is divided by. Counted before the split, so that the split does not change the gradient."""
    rollout_routes: list[MicroRoutes]
    """The experts that the engine used, for each micro-batch: [tokens, MoE layers, top-k]."""
    old_logprobs: list[torch.Tensor] = field(default_factory=list)
    """[T] for each micro-batch, of the policy before the first update."""


def configure(model: Path, steps: int) -> Config:
    """The trainer's settings. They are the keys of a megarl configuration; see docs/config.md."""
    return parse(
        {
            "run": {"steps": steps},
            "model": {"path": str(model), "dtype": "fp32"},
            "data": {"train": "none", "max_prompt_tokens": 16},  # this file makes its own prompts
            "rollout": {
                "prompts_per_step": PROMPTS,
                "group_size": GROUP_SIZE,
                "max_response_tokens": RESPONSE_TOKENS,
            },
            "train": {"mini_batches": MINI_BATCHES, "micro_batch_tokens": 512},
            "optim": {"lr": 1e-3},
        },
        {},
    )


def sample(engine: Engine, tokenizer: PreTrainedTokenizerBase, step: int) -> list[Rollout]:
    """Sample a group of responses to each prompt. A rollout has tokens, log-probabilities and the experts used."""
    random = np.random.default_rng(step)
    requests = []
    for group in range(PROMPTS):
        prompt = "".join(str(digit) for digit in random.integers(0, 10, 6)) + "="
        tokens = np.array(tokenizer(prompt, add_special_tokens=False)["input_ids"], np.int32)
        for index in range(GROUP_SIZE):
            seed = (step * PROMPTS + group) * GROUP_SIZE + index  # one seed per response makes runs repeatable
            requests.append(SampleRequest(tokens, group=group, sample=index, seed=seed))
    params = SamplingParams(max_response_tokens=RESPONSE_TOKENS, stop_token_ids=(EOS_ID,))
    return engine.generate(requests, params)


def judge(response: str) -> float:
    """The share of the response's characters that are digits."""
    return sum(character.isdigit() for character in response) / max(len(response), 1)


def make_batch(config: Config, policy: Policy, rollouts: Sequence[Rollout], advantages: np.ndarray) -> MiniBatch:
    """Pack the rollouts of one optimizer step, and bring their routes to the routers that will replay them."""
    assert policy.replay is not None
    check_rollouts(rollouts, policy.shape)  # wrong routes must fail here, not train
    # Routes do not travel with the tokens: under parallelism, each rank needs only the rows of its own routers.
    batch = pack([drop_routes(rollout) for rollout in rollouts], advantages)
    micro_batches = split_micro_batches(batch, config.train.micro_batch_tokens)
    denominators = Denominators.of(batch.loss_mask, batch.cu_seqlens, batch.rollout_logprobs)
    routes = deliver_routes(rollouts, micro_batches, policy.replay.layers, policy.shape)
    return MiniBatch(micro_batches, denominators, routes)


def run_forward(
    policy: Policy, mini: MiniBatch, weigh: forward.CoefficientFn | None = None
) -> list[forward.MicroOutput]:
    """Run all micro-batches through the model; with ``weigh`` also backward."""
    return forward.run(
        policy.chunks,
        mini.micro_batches,
        temperature=1.0,  # that of the rollout: log-probabilities are of the distribution that was sampled from
        vocab_size=policy.shape.vocab_size,
        coefficients=weigh,
    )


def run_old_pass(policy: Policy, mini: MiniBatch, replay: bool) -> dict[str, Stat]:
    """Compute log pi_old before any update. Return how far it is from the rollout: k3, and flipped experts."""
    assert policy.replay is not None
    if replay:
        # min_agreement=None: also check that the routers would choose similar experts, else these routes are of other
        # tokens. Later passes skip this, because the weights have changed by then.
        block = policy.replay.replay(mini.rollout_routes, compared=mini.rollout_routes, min_agreement=None)
    else:
        block = policy.replay.record(keep=False, compared=mini.rollout_routes)
    with block as seen:
        outputs = run_forward(policy, mini)
    mini.old_logprobs = [output.logprobs for output in outputs]
    shared = np.concatenate(gather_shared([seen.shared], mini.micro_batches, policy.replay.layers))[..., 0]
    batches = [micro.batch for micro in mini.micro_batches]
    mismatches = [
        mismatch_metrics(old, batch.rollout_logprobs, batch.loss_mask, batch.cu_seqlens)
        for old, batch in zip(mini.old_logprobs, batches, strict=True)
    ]
    return merge([*mismatches, Disagreement.of(shared, policy.shape.topk).stats("router")])


def update(policy: Policy, mini: MiniBatch, replay: bool) -> dict[str, float]:
    """Take one optimizer step: replay, forward, coefficients, backward, Adam."""
    assert policy.replay is not None

    def weigh(
        index: int, batch: TrainBatch, logprobs: torch.Tensor, entropies: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, Stat]]:
        """Return dJ/dlogprobs of each token, mask x importance weight x advantage / denominator, and dJ/dentropies.

        The gradient of every objective has this form. To try one of your own, compute its coefficients here.
        """
        columns = TokenColumns(
            logprobs,  # of the present policy
            mini.old_logprobs[index],  # of the policy before the first update: decides which tokens are clipped
            batch.rollout_logprobs,  # of the engine: the denominator of the importance weight
            batch.advantages,
            batch.loss_mask,
            batch.cu_seqlens,
        )
        found = coefficients(OBJECTIVE, columns, mini.denominators)
        return found.values, found.entropy, found.metrics

    policy.zero_grad()
    if replay:
        # Inside the block every router uses the rollout's experts, also when activations are recomputed. Gate weights
        # and gradients are the trainer's own.
        with policy.replay.replay(mini.rollout_routes, min_agreement=0.0):
            outputs = run_forward(policy, mini, weigh)
    else:
        outputs = run_forward(policy, mini, weigh)
    grad_norm, _ = policy.optimizer_step()
    return finalize(merge(output.metrics for output in outputs)) | {"grad_norm": grad_norm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--replay", choices=("r3", "none"), default="r3")
    arguments = parser.parse_args()
    replay = arguments.replay == "r3"
    with tempfile.TemporaryDirectory() as folder:
        # With larger random weights than usual, experts differ more, as trained ones do.
        model = write_tiny_model(Path(folder) / "model", initializer_range=0.06)
        config = configure(model, arguments.steps)
        distributed.initialize(config)  # process groups; one rank without torchrun
        tokenizer = AutoTokenizer.from_pretrained(model)
        policy = Policy(config, schedule_of(config))
        engine = LocalEngine(AutoConfig.from_pretrained(model), fp8_rounding=True)
    engine.update_weights(policy.export(), version=0)

    for step in range(arguments.steps):
        rollouts = sample(engine, tokenizer, step)
        responses = [tokenizer.decode(rollout.response_tokens, skip_special_tokens=True) for rollout in rollouts]
        rewards = np.array([judge(response) for response in responses])
        groups = np.array([rollout.group for rollout in rollouts])
        advantages = advantages_of(OBJECTIVE, rewards, groups).numpy()  # MiniRL: reward minus the group's mean

        parts = np.array_split(np.arange(len(rollouts)), MINI_BATCHES)
        minis = [make_batch(config, policy, [rollouts[i] for i in part], advantages[part]) for part in parts]
        # The first line only measures what happens without replay; the second one is the real pass.
        native = finalize(merge(run_old_pass(policy, mini, replay=False) for mini in minis))
        used = finalize(merge(run_old_pass(policy, mini, replay) for mini in minis))
        for mini in minis:
            metrics = update(policy, mini, replay)

        # The engine gets the new weights by their Hugging Face names. The version is recorded with every later token.
        engine.update_weights(policy.export(), version=step + 1)
        print(
            f"step {step + 1:2}/{arguments.steps}  reward {rewards.mean():.3f}  "
            f"flip {used['router/flip']:.2%} (native {native['router/flip']:.2%})  "
            f"k3 {used['rollout/k3']:.1e} (native {native['rollout/k3']:.1e})  "
            f"loss {metrics['loss']:+.4f}  grad norm {metrics['grad_norm']:.3f}",
            flush=True,
        )
    engine.close()
    distributed.shutdown()


if __name__ == "__main__":
    main()
