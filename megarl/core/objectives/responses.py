"""From rewards to the advantages of an objective, and the responses that train.

All functions take the responses of a whole step, over all data-parallel ranks, before the split into mini-batches:
groups may span ranks, and some advantages have statistics over the whole batch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megarl.core.advantages import groups as of_groups
from megarl.core.advantages import weighted
from megarl.core.advantages.groups import Values, as_tensor, grpo, prepare, uniform_groups
from megarl.core.advantages.tokens import token_level_kl
from megarl.core.choices.parts import TOKEN_ADVANTAGES, Objective
from megarl.core.choices.stopping import POSITIVE
from megarl.core.choices.table import find_objective
from megarl.core.objectives.columns import call_part
from megarl.core.ratios import segment_expand, segment_sum
from megarl.errors import ConfigError, refusal

Components = tuple[Values, Values]
"""Several rewards of each response [N, M], and their weights [M]."""
_NEED_LENGTHS = ("opo", "reinforce_pp", "reinforce_pp_baseline", "gdpo", "batch_mean")


def advantages_of(
    objective: Objective | str,
    rewards: Values,
    groups: Values,
    threshold: float = POSITIVE,
    *,
    lengths: Values | None = None,
    components: Components | None = None,
) -> Tensor:
    """Return the advantages of an objective, or of the row with this name: rewards [N], groups integer [N] -> [N].

    The result is on the device of the rewards. A response that does not train (``select_responses``) has advantage 0,
    but its tokens count in denominators until their loss_mask is cleared. Per token: ``advantages.repeat_interleave(
    cu_seqlens.diff())`` in packed columns, ``advantages[:, None].expand(b, s)`` in padded columns.

    - groups: any integers, equal for responses to the same prompt.
    - threshold: a response with a reward above is correct; for "raft" and "signed".
    - lengths: integer [N], loss tokens; for "opo", "reinforce_pp", "reinforce_pp_baseline", "gdpo" and "batch_mean".
      With selection "mixed_groups", responses of uniform groups count with length 0.
    - components: rewards [N, M] and weights [M]; for "gdpo".

    Leave responses without an outcome, such as aborted responses, out of the call.

    ConfigError if a needed argument is missing, and for advantages that differ between tokens: "token_level_kl"
    (``token_advantages``) and "process" (``step_advantages``). UnknownNameError for an unknown name, NumericsError if a
    reward is not finite.
    """
    objective = find_objective(objective)
    mixed = _in_mixed_groups(rewards, groups) if objective.selection == "mixed_groups" else None
    if mixed is not None and lengths is not None:
        lengths = as_tensor(lengths) * mixed.to(as_tensor(lengths).device)
    name = objective.advantage
    if callable(name):
        values = torch.as_tensor(rewards, dtype=torch.float64, device="cpu").clone()
        ids, every = torch.as_tensor(groups, device="cpu").clone(), torch.ones_like(values, dtype=torch.bool)
        values = call_part("advantage", name, values, ids, expected=values, trains=every)
    elif name in TOKEN_ADVANTAGES:
        raise ConfigError(refusal("advantage_by_token", name=name))
    elif name in _NEED_LENGTHS and lengths is None:
        raise ConfigError(f"objective: advantage {name!r} needs the lengths of the responses; give their loss tokens")
    elif name == "gdpo":
        if components is None:
            raise ConfigError(refusal("gdpo_without_components"))
        scale = objective.std_ddof, objective.std_eps
        values = weighted.gdpo(*components, groups, lengths, *scale)  # type: ignore[arg-type]
    elif name in _NEED_LENGTHS:
        values = getattr(weighted, name)(rewards, groups, lengths)
    else:
        options = {"raft": [threshold], "signed": [threshold], "grpo": [objective.std_ddof, objective.std_eps]}
        values = getattr(of_groups, name)(rewards, groups, *options.get(name, []))
    if mixed is not None:
        values = torch.where(mixed.to(values.device), values, 0.0)
    elif objective.selection == "positive":
        values = values.clamp(min=0)
    return values


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
    components: Components | None = None,
) -> Tensor:
    """Return the objective's advantage of each token, for any kind but "process": rewards, groups [N] -> [T].

    logprobs: [T], of the policy before the update; ref_logprobs: [T], None if the objective needs no reference;
    loss_mask: bool [T]; cu_seqlens: int64 [N+1], of whole groups; threshold, components: as in ``advantages_of``.
    ConfigError if ref_logprobs are missing; other errors as in ``advantages_of``.
    """
    if objective.advantage != "token_level_kl":
        lengths = segment_sum(loss_mask, cu_seqlens)
        values = advantages_of(objective, rewards, groups, threshold, lengths=lengths, components=components)
        return segment_expand(values.to(cu_seqlens.device), cu_seqlens)
    if ref_logprobs is None:
        raise ConfigError(refusal("no_reference", part="advantage 'token_level_kl'"))
    columns = rewards, groups, logprobs, ref_logprobs, loss_mask, cu_seqlens
    return token_level_kl(
        *columns, objective.kl_coef, objective.std_ddof, objective.std_eps, horizon=objective.kl_horizon
    )


def step_advantages(
    objective: Objective, steps: Sequence[Sequence[tuple[int, float]]], groups: Values, lengths: Sequence[int]
) -> list[np.ndarray]:
    """Return the advantage "process": at each token the sum of ``z_s`` over the steps s that end there or later.

    ``z_s = (r_s - mean) / (std + eps)`` with statistics over all steps of all responses of the group, so a response of
    many steps has more influence. A response without steps is in no statistics and gets 0, as do tokens after the last
    step. Source: DeepSeekMath (arXiv 2402.03300), 4.1.3, process supervision.

    steps: by response, (index of the last token, reward) of each step, ascending; groups: integer [N], whole groups;
    lengths: T_n, or 0 to skip the tokens of a response; result: one float64 [T_n] per response. NumericsError if a
    reward is not finite.
    """
    counts = [len(steps_of) for steps_of in steps]
    rewards = np.array([reward for steps_of in steps for _, reward in steps_of], dtype=np.float64)
    values = grpo(rewards, np.repeat(np.asarray(groups), counts), objective.std_ddof, objective.std_eps).numpy()
    results: list[np.ndarray] = []
    for steps_of, z, length in zip(steps, np.split(values, np.cumsum(counts)[:-1]), lengths, strict=True):
        ends = np.array([end for end, _ in steps_of], dtype=np.int64)
        to_go = np.append(z[::-1].cumsum()[::-1], 0.0)
        results.append(to_go[np.searchsorted(ends, np.arange(length))])
    return results


def select_responses(
    objective: Objective | str,
    rewards: Values,
    groups: Values,
    threshold: float = POSITIVE,
    *,
    lengths: Values | None = None,
    components: Components | None = None,
) -> Tensor:
    """Return bool [N]: the responses that train and count in denominators, by ``objective.selection``.

    Arguments and errors as in ``advantages_of``. Clear the loss_mask of the other responses before packing: an
    advantage of 0 leaves their tokens in the denominators.
    """
    objective = find_objective(objective)
    if objective.selection == "positive":
        return advantages_of(objective, rewards, groups, threshold, lengths=lengths, components=components) > 0
    mixed = _in_mixed_groups(rewards, groups)
    return mixed if objective.selection == "mixed_groups" else torch.ones_like(mixed)


def _in_mixed_groups(rewards: Values, groups: Values) -> Tensor:
    """Return bool [N]: whether the rewards of a response's group differ."""
    rewards, inverse = prepare(rewards, groups)
    return ~uniform_groups(rewards, inverse)[inverse]
