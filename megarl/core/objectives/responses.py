"""From rewards to the advantages that an objective names, and the responses that train.

All take the responses of a whole step, over all data-parallel ranks, before it is split into mini-batches: groups may
span ranks, and some advantages have statistics over the whole batch.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from megarl.core import advantages
from megarl.core.advantages import Values, grpo, token_level_kl
from megarl.core.advantages.groups import as_tensor, extremes, fill, prepare, take
from megarl.core.choices.parts import Objective
from megarl.core.choices.stopping import POSITIVE
from megarl.core.objectives.columns import call_part
from megarl.core.ratios import segment_sum
from megarl.core.segments import segment_expand
from megarl.errors import ConfigError

_OF_REWARDS = {name: getattr(advantages, name) for name in ("group_mean", "rloo", "raw", "raw_mixed", "positive_part")}
_OF_THRESHOLD = {"raft": advantages.raft, "signed": advantages.signed}
_OF_LENGTHS = {name: getattr(advantages, name) for name in ("opo", "reinforce_pp", "reinforce_pp_baseline")}


def sequence_advantages(
    objective: Objective,
    rewards: Values,
    groups: Values,
    threshold: float = POSITIVE,
    *,
    lengths: Values | None = None,
    components: tuple[Values, Values] | None = None,
    valid: Values | None = None,
) -> Tensor:
    """Return the objective's advantage of each response: rewards [N], groups integer [N] -> [N].

    - threshold: a response is correct if its reward is above this; "raft" and "signed" ask.
    - lengths: integer [N], loss tokens; "opo", "reinforce_pp", "reinforce_pp_baseline" and "gdpo" need them. With
      selection "mixed_groups", responses of uniform groups count as if they had none.
    - components: rewards [N, M] and their weights [M]; "gdpo" needs them.
    - valid: bool [N], False for a response without an outcome, such as an aborted one. It is in no statistics and gets
      0, and its reward may be anything. None: all are valid.

    Raises ConfigError if the advantage needs what is not given, and for "token_level_kl" (see ``token_advantages``) and
    "process" (see ``step_advantages``).
    """
    if valid is not None:
        return _of_valid(sequence_advantages, valid, objective, rewards, groups, threshold, lengths, components)
    name = objective.advantage
    if callable(name):
        given = torch.as_tensor(rewards, dtype=torch.float64, device="cpu").clone()
        ids, everywhere = torch.as_tensor(groups, device="cpu").clone(), torch.ones_like(given, dtype=torch.bool)
        return call_part("advantage", name, given, ids, like=given, where=everywhere)
    if name == "grpo":
        return grpo(rewards, groups, ddof=objective.std_ddof, eps=objective.std_eps)
    if name in _OF_REWARDS:
        return _OF_REWARDS[name](rewards, groups)
    if name in _OF_THRESHOLD:
        return _OF_THRESHOLD[name](rewards, groups, threshold)
    if name != "gdpo" and name not in _OF_LENGTHS:
        raise ConfigError(
            f"objective: advantage {name!r} differs between the tokens of a response, and this caller has one "
            "reward for each; use step_advantages() with the rewards of steps for 'process', token_advantages() "
            "with ref_logprobs for 'token_level_kl', or another advantage"
        )
    if lengths is None:
        raise ConfigError(f"objective: advantage {name!r} needs the lengths of the responses; give their loss tokens")
    if objective.selection == "mixed_groups":
        mixed = _in_mixed_groups(rewards, groups)
        lengths = as_tensor(lengths) * mixed.to(as_tensor(lengths).device)
    if name in _OF_LENGTHS:
        return _OF_LENGTHS[name](rewards, groups, lengths)
    if components is None:
        raise ConfigError(
            "objective: advantage 'gdpo' needs several rewards of each response; give components = (rewards [N, M], "
            "weights [M]), in a run by reward.weights and a function that returns as many"
        )
    return advantages.gdpo(*components, groups, lengths, objective.std_ddof, objective.std_eps)


def token_advantages(
    objective: Objective,
    rewards: Values,
    groups: Values,
    *,
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    threshold: float = POSITIVE,
    components: tuple[Values, Values] | None = None,
) -> Tensor:
    """Return the objective's advantage of each token, whatever its kind: rewards, groups [N] -> [T].

    logprobs: [T], of the policy before the update; ref_logprobs: [T], None if the objective needs none (ConfigError
    if it does); loss_mask: bool [T]; cu_seqlens: int64 [N+1], of whole groups; threshold, components as in
    ``sequence_advantages``.
    """
    if objective.advantage != "token_level_kl":
        lengths = segment_sum(loss_mask, cu_seqlens)
        values = sequence_advantages(objective, rewards, groups, threshold, lengths=lengths, components=components)
        return segment_expand(values.to(cu_seqlens.device), cu_seqlens)
    if ref_logprobs is None:
        raise ConfigError(
            "objective: advantage 'token_level_kl' needs the column ref_logprobs, which the batch does not have; "
            "compute the reference policy's log-probabilities, or choose an objective without a KL"
        )
    return token_level_kl(
        rewards,
        groups,
        logprobs,
        ref_logprobs,
        loss_mask,
        cu_seqlens,
        beta=objective.kl_coef,
        ddof=objective.std_ddof,
        eps=objective.std_eps,
        horizon=objective.kl_horizon,
    )


def step_advantages(
    objective: Objective, steps: Sequence[Sequence[tuple[int, float]]], groups: Values, lengths: Sequence[int]
) -> list[np.ndarray]:
    """Return the advantage "process": the sum of ``z_s`` over the steps s of the response that end at or after a token.

    result: one float64 [T_n] per response.
    ``z_s = (r_s - mean) / (std + eps)`` with statistics over all steps of all responses of the group, so a response of
    many steps weighs more in them. A response without steps is in no statistics and gets 0; so do tokens after the last
    step. Source: DeepSeekMath (arXiv 2402.03300), 4.1.3, process supervision.

    steps: by response, (index of the last token, reward) of its steps, ascending; groups: integer [N], whole groups;
    lengths: T_n, or 0 for a response whose tokens are not wanted. Raises NumericsError if a reward is not finite.
    """
    counts = [len(each) for each in steps]
    rewards = np.array([reward for each in steps for _, reward in each], dtype=np.float64)
    of_group = np.repeat(np.asarray(groups), counts)
    values = grpo(rewards, of_group, objective.std_ddof, objective.std_eps).numpy()
    found: list[np.ndarray] = []
    for each, own, length in zip(steps, np.split(values, np.cumsum(counts)[:-1]), lengths, strict=True):
        ends = np.array([end for end, _ in each], dtype=np.int64)
        to_go = np.append(own[::-1].cumsum()[::-1], 0.0)
        found.append(to_go[np.searchsorted(ends, np.arange(length))])
    return found


def select_responses(
    objective: Objective,
    rewards: Values,
    groups: Values,
    threshold: float = POSITIVE,
    *,
    lengths: Values | None = None,
    components: tuple[Values, Values] | None = None,
    valid: Values | None = None,
) -> Tensor:
    """Return bool [N]: the responses that train and count in denominators, by ``objective.selection``.

    Arguments as in ``sequence_advantages``; a response that is not valid does not train. Clear the loss_mask of the
    others before packing: advantages alone do not take a response out of a denominator.
    """
    if valid is not None:
        return _of_valid(select_responses, valid, objective, rewards, groups, threshold, lengths, components)
    everything = torch.ones_like(prepare(rewards, groups)[1], dtype=torch.bool)
    if objective.selection == "positive":
        return sequence_advantages(objective, rewards, groups, threshold, lengths=lengths, components=components) > 0
    return _in_mixed_groups(rewards, groups) if objective.selection == "mixed_groups" else everything


def _of_valid(
    function: Callable[..., Tensor],
    valid: Values,
    objective: Objective,
    rewards: Values,
    groups: Values,
    threshold: float,
    lengths: Values | None,
    components: tuple[Values, Values] | None,
) -> Tensor:
    """Return what a function gives for the valid responses alone, and 0 (False) for the others."""
    keep = as_tensor(valid).bool()
    given = take(rewards, keep), take(groups, keep), threshold
    some = None if lengths is None else take(lengths, keep)
    several = None if components is None else (take(components[0], keep), components[1])
    return fill(function(objective, *given, lengths=some, components=several), keep)


def _in_mixed_groups(rewards: Values, groups: Values) -> Tensor:
    """Return bool [N]: whether the rewards of a response's group differ."""
    rewards, inverse = prepare(rewards, groups)
    lowest, highest = extremes(rewards, inverse)
    return (lowest < highest)[inverse]
