"""A small head on the policy that estimates a prompt's pass rate (Ada-Est, arXiv 2510.04996v3).

    V(x) = sigmoid(b + mean_i w_i z_i),    z = (h(x) - mean) / deviation, coordinate by coordinate

h(x) is the policy's hidden state after the final norm at the prompt's last token, without gradient to the policy. The
paper does not specify the head. The smallest head is used: a logistic regression, convex and constant at the start.

Hidden states drift while the policy trains. The largest drifts are common to all prompts: the mean of the states, large
compared with the differences between prompts, and the scale of a coordinate, set by the final norm's weight. A head on
raw states would mistake the drift for a change of every prompt's rate. States are therefore standardised with decayed
statistics of the latest prompts. The mean over coordinates, instead of a sum, gives ``lr`` the same meaning at every
width: a step moves an estimate's logit by about ``lr``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.core.packing import pack
from megarl.core.sampling.pass_rates import Integers, pass_rate_loss
from megarl.errors import CheckpointError, NumericsError
from megarl.megatron import distributed
from megarl.megatron.passes import forward
from megarl.megatron.policy import Policy
from megarl.trainer.mini_batch import make_rollout, split

BETAS, EPS = (0.9, 0.99), 1e-8
"""Of Adam. The second moment decays quickly because features change."""
STEPS, WEIGHT_DECAY = 8, 0.1
"""Of Adam per update; per step, the weights (not the bias) shrink by ``lr * WEIGHT_DECAY``."""
LARGEST_STANDARDISED = 5.0
"""Coordinates are clipped here, to keep estimates of unusual prompts moderate."""
LARGEST_LOGIT = 15.0
"""Keeps estimates inside (0, 1): 3e-7 to 1 - 3e-7."""
VECTORS = ("weights", "first_moments", "second_moments", "sums", "squares")
"""Rows of the state: the head, Adam's moments, and the fading sums over prompts of the features and their squares."""
WEIGHTS, FIRST, SECOND, SUMS, SQUARES = range(len(VECTORS))


class ValueHead:
    """The head's parameters, equal on every rank; rates and updates are collective calls.

    - ``lr``: of Adam; about the change of a logit per step.
    - ``decay``: of the features' statistics, per update.
    - ``prior``: every prompt's estimate before the first update.
    - ``micro_batch_tokens``: of a forward pass per rank.
    """

    def __init__(
        self, policy: Policy, *, micro_batch_tokens: int, lr: float = 0.1, decay: float = 0.9, prior: float = 0.5
    ) -> None:
        self.lr, self.decay = lr, decay
        self._policy, self._micro_batch_tokens = policy, micro_batch_tokens
        width = policy.megatron_config.hidden_size
        self._num_steps, self._num_prompts = 0, 0.0
        # Rows of VECTORS, the bias behind the weights; float64 [5, H + 1].
        self._state = torch.zeros(len(VECTORS), width + 1, dtype=torch.float64)
        self._state[WEIGHTS, -1] = float(np.log(prior / (1 - prior)))

    def rates(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
        """Return the estimates, float64 [B] in (0, 1), of prompts given as token ids; see ``prompt_features``."""
        if not len(prompts):
            return np.zeros(0)
        features = prompt_features(self._policy, prompts, self._micro_batch_tokens)
        logits = self._logits(self._state[WEIGHTS], self._standardise(features))
        return torch.sigmoid(_broadcast(logits).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)).numpy()

    def update(self, prompts: Sequence[np.ndarray], samples: Integers, positives: Integers) -> float:
        """Learn from a step, in ``STEPS`` full-batch steps of Adam, and return ``pass_rate_loss`` before them.

        samples, positives: numbers [B] by prompt. Arguments are equal on all ranks.
        """
        drawn, good = (torch.as_tensor(np.asarray(counts, np.float64)) for counts in (samples, positives))
        if not len(prompts) or not bool(drawn.any()):
            return 0.0
        features = prompt_features(self._policy, prompts, self._micro_batch_tokens)
        self._num_prompts = self.decay * self._num_prompts + len(features)
        for row, new in ((SUMS, features), (SQUARES, features.square())):
            self._state[row, :-1] = self.decay * self._state[row, :-1] + new.sum(0)
        standardised = self._standardise(features)
        losses = [self._adam_step(standardised, drawn, good) for _ in range(STEPS)]
        self._state = _broadcast(self._state)
        return float(_broadcast(torch.tensor(losses[0], dtype=torch.float64)))

    def state_dict(self) -> dict[str, Any]:
        """Return all state as plain numbers, and lists of hidden size + 1."""
        vectors = dict(zip(VECTORS, self._state.tolist(), strict=True))
        return {**vectors, "num_steps": self._num_steps, "num_prompts": self._num_prompts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; CheckpointError for a head of a different width."""
        missing = [name for name in (*VECTORS, "num_steps", "num_prompts") if name not in state]
        lengths = [] if missing else [len(state[name]) for name in VECTORS]
        if missing or set(lengths) != {self._state.size(1)}:
            raise CheckpointError(
                f"value head: {', '.join(missing) or 'nothing'} missing, vectors of {lengths}; expected "
                f"{self._state.size(1)} numbers each, the hidden size and one: is the checkpoint of another model?"
            )
        self._state = torch.tensor([state[name] for name in VECTORS], dtype=torch.float64)
        self._num_steps, self._num_prompts = int(state["num_steps"]), float(state["num_prompts"])

    def _adam_step(self, standardised: torch.Tensor, samples: torch.Tensor, positives: torch.Tensor) -> float:
        weights = self._state[WEIGHTS].clone().requires_grad_()
        loss = pass_rate_loss(self._logits(weights, standardised), samples, positives)
        (gradient,) = torch.autograd.grad(loss, weights)
        self._num_steps += 1
        for row, beta, new in ((FIRST, BETAS[0], gradient), (SECOND, BETAS[1], gradient.square())):
            self._state[row] = beta * self._state[row] + (1 - beta) * new
        first, second = (
            self._state[row] / (1 - beta**self._num_steps) for row, beta in ((FIRST, BETAS[0]), (SECOND, BETAS[1]))
        )
        self._state[WEIGHTS, :-1] *= 1 - self.lr * WEIGHT_DECAY
        self._state[WEIGHTS] -= self.lr * first / (second.sqrt() + EPS)
        return float(loss.detach())

    def _logits(self, weights: torch.Tensor, standardised: torch.Tensor) -> torch.Tensor:
        return standardised @ weights[:-1] / standardised.size(1) + weights[-1]

    def _standardise(self, features: torch.Tensor) -> torch.Tensor:
        if not self._num_prompts:
            return torch.zeros_like(features)
        mean, squares = (self._state[row, :-1] / self._num_prompts for row in (SUMS, SQUARES))
        variance = (squares - mean.square()).clamp(min=0)
        # Without a floor, the rounding noise of a constant coordinate would be scaled up to 1.
        floor = 1e-6 * squares.mean() + torch.finfo(torch.float64).tiny
        standardised = (features - mean) / (variance + floor).sqrt()
        return standardised.clamp(-LARGEST_STANDARDISED, LARGEST_STANDARDISED)


def prompt_features(policy: Policy, prompts: Sequence[np.ndarray], micro_batch_tokens: int) -> torch.Tensor:
    """Return the final hidden state at each prompt's last token, float64 [B, H], bit for bit equal on all ranks.

    A collective call with equal prompts on all ranks; data-parallel ranks share the work. Routing is native. Raises
    NumericsError naming a prompt whose hidden state is not finite.
    """
    parallel = policy.config.parallel
    assigned = _share(prompts, parallel.micro_batch_multiple)
    batch = pack([make_rollout(prompts[index]) for index, _ in assigned], np.zeros(len(assigned)))
    micro_batches = split(policy.config, batch, micro_batch_tokens)
    states = forward.last_hidden_states(policy.chunks, micro_batches)
    features = torch.zeros(len(prompts), policy.megatron_config.hidden_size, device=torch.cuda.current_device())
    for micro, rows in zip(micro_batches, states, strict=bool(states)):
        for sequence, row in zip(micro.sequences, rows, strict=True):
            index, counts = assigned[sequence]
            if counts:
                features[index] = row
    dist.all_reduce(features)  # a single rank has a non-zero row: the sum is exact
    features = features.cpu()
    bad = (~torch.isfinite(features)).any(1).nonzero()
    if len(bad):
        raise NumericsError(
            f"the policy's hidden state at the last token of prompt {int(bad[0])} is not finite ({len(bad)} of "
            f"{len(prompts)} prompts); look at the weights of the latest step"
        )
    return features.double()


def _share(prompts: Sequence[np.ndarray], multiple: int) -> list[tuple[int, bool]]:
    """Return (prompt, True if counted) for the model copy. Repeats of the shortest prompt make all copies equal."""
    order = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), index))
    copies = distributed.dp_size()
    entries = [(index, True) for index in order]
    entries += [(order[-1], False)] * (-len(entries) % (copies * multiple))
    return entries[distributed.dp_rank() :: copies]


def _broadcast(tensor: torch.Tensor) -> torch.Tensor:
    """Return the main rank's numbers: different kinds of processors round differently."""
    sent = tensor.detach().to(torch.cuda.current_device())
    dist.broadcast(sent, src=0)
    return sent.cpu()
