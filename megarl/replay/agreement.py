"""Checks that routes belong to this batch: compares token ids exactly, and experts with the routers' own choice.

Routes of the batch agree with the training routers in most experts, because both engines run one model. Shifted or
transposed rows, and rows of another micro-batch, layer or model, agree by chance. Agreement is measured beyond chance,
as Cohen's kappa: ``kappa = (agreement - chance) / (1 - chance)``. Chance is the larger of ``K / E`` and the agreement
with rows of other tokens in the layer, at most MOST_CHANCE. Two standard errors are added to the agreement (Agresti and
Coull 1998), and fewer than LEAST_JUDGED rows are never judged. The device is read once for each, when the block closes;
the comparison of token ids may wait for other checks of an update (``DeviceChecks``).
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from megarl.core.devices import DeviceChecks, to_device
from megarl.errors import AgreementError, ReplayError, refusal
from megarl.replay.records import MicroRoutes

MOST_SAMPLED = 128  # rows of a micro-batch for which the routers' own choice is computed
LEAST_JUDGED = 8  # fewer rows are never refused, because a few rows disagree by chance
MOST_CHANCE = 0.5  # a larger one would make the normal disagreement of two engines count as much as a mistake
LEAST_FOR_CHANCE = 64  # sampled rows of a layer that are needed to measure its chance; with fewer, it is K / E


def sample_rows(routes: MicroRoutes) -> torch.Tensor:
    """Up to MOST_SAMPLED present rows, evenly spaced; int64, on the host. Result: [S]."""
    present = np.arange(len(routes.experts)) if routes.present is None else np.flatnonzero(routes.present.numpy())
    if len(present) > MOST_SAMPLED:
        present = present[np.arange(MOST_SAMPLED) * len(present) // MOST_SAMPLED]
    return torch.from_numpy(present)


def check_tokens(routes: Sequence[MicroRoutes], input_tokens: Mapping[int, torch.Tensor], checks: DeviceChecks) -> int:
    """Number of micro-batches whose token ids are compared. ReplayError, perhaps only when the checks are required, if
    an id is not that of the model's input. input_tokens: [tokens] by micro-batch.
    """
    num_compared = 0
    for micro, input_ids in sorted(input_tokens.items()):
        if micro >= len(routes) or routes[micro].token_ids is None:
            continue
        expected = len(routes[micro].experts)
        if len(input_ids) != expected:
            raise ReplayError(refusal("ids_of_other_rows", micro=micro, tokens=len(input_ids), expected=expected))
        differs = _find_other_tokens(routes[micro], input_ids)
        checks.add(differs.any(), partial(_refuse_tokens, micro, routes[micro], input_ids))
        num_compared += 1
    return num_compared


def _find_other_tokens(routes: MicroRoutes, input_ids: torch.Tensor) -> torch.Tensor:
    """bool [tokens], on the device of the model's input: True where a present row is of another token."""
    assert routes.token_ids is not None
    differs = to_device(routes.token_ids.to(torch.int64), input_ids.device) != input_ids
    return differs if routes.present is None else differs & to_device(routes.present, input_ids.device)


def _refuse_tokens(micro: int, routes: MicroRoutes, input_ids: torch.Tensor) -> None:
    assert routes.token_ids is not None
    wrong = _find_other_tokens(routes, input_ids).nonzero()[:, 0]
    row = int(wrong[0])
    facts = {"micro": micro, "wrong": len(wrong), "tokens": len(input_ids), "row": row}
    facts |= {"routed": int(routes.token_ids[row]), "token": int(input_ids[row])}
    raise ReplayError(refusal("routes_of_other_tokens", usual=refusal("usual_mistakes"), **facts))


def check_agreement(
    replayed: Sequence[torch.Tensor],
    preferred: Sequence[torch.Tensor],
    layers: Sequence[int],
    num_experts: int,
    min_agreement: float,
) -> np.ndarray:
    """float64 [micro-batches, L_local]: the share of replayed experts that the routers chose too.

    Both are of the sampled rows, [S, L_local, K] per micro-batch (at least one). AgreementError, with the likely
    mistake, if a micro-batch or a layer agrees too little.
    """
    preferred_rows, replayed_rows = _to_host(preferred), np.concatenate(_to_host(replayed))
    shift = len(replayed_rows) // 3 + 1
    # Then with rows of other tokens.
    compared = np.concatenate([replayed_rows, replayed_rows[-shift:], replayed_rows[:-shift]])
    all_rows, of_others = _agreement(np.concatenate(preferred_rows), compared.reshape(2, *replayed_rows.shape))
    bounds = itertools.accumulate(map(len, preferred_rows), initial=0)
    by_micro = [all_rows[first:last] for first, last in itertools.pairwise(bounds)]
    shares = np.array([item.mean(0) if len(item) else np.full(len(layers), np.nan) for item in by_micro])
    chance = _chance(of_others, replayed_rows.shape[2] / num_experts)
    if not len(all_rows) or chance.min() >= 1.0:  # chance is 1 if all experts are chosen
        return shares
    limit, overall = min_agreement, float(chance.mean())
    wrong = [micro for micro, item in enumerate(by_micro) if _is_too_low(item.mean(1), overall, limit)]
    columns = [item for item in range(len(layers)) if _is_too_low(all_rows[:, item], chance[item], limit)]
    if wrong or columns:
        place = f"micro-batch {wrong[0]}" if wrong else f"layer {layers[columns[0]]}"
        share = by_micro[wrong[0]].mean() if wrong else all_rows[:, columns[0]].mean()
        by_chance = overall if wrong else float(chance[columns[0]])
        facts = {"place": place, "share": share, "chance": by_chance, "least": by_chance + limit * (1 - by_chance)}
        facts |= {"limit": limit, "wrong": len(wrong), "micros": len(by_micro), "columns": len(columns)}
        facts |= {"layers": len(layers), "usual": refusal("usual_mistakes")}
        error = AgreementError(refusal("agreement_is_low", **facts))
        error.micro_batches = tuple(wrong)
        raise error
    return shares


def _chance(measured: np.ndarray, lowest: float) -> np.ndarray:
    """float64 [L]: chance by layer; ``measured`` [S, L] is the agreement of rows of different tokens."""
    is_known = len(measured) >= LEAST_FOR_CHANCE
    return measured.mean(0).clip(lowest, max(lowest, MOST_CHANCE)) if is_known else np.full(measured.shape[1], lowest)


def _to_host(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """All parts [S, ...] as int32, in one transfer."""
    host_values = torch.cat([tensor.to(tensors[0].device, torch.int32) for tensor in tensors]).cpu()
    return [tensor.numpy() for tensor in host_values.split([len(tensor) for tensor in tensors])]


def _agreement(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """float64 [..., S, L]: the share of experts that rows [S, L, K] and [..., S, L, K] have in common; none twice."""
    # Slot by slot: few large operations.
    a, b = (np.ascontiguousarray(slot.transpose(-1, *range(slot.ndim - 1))) for slot in (first, second))
    num_common = np.zeros(second.shape[:-1], np.int32)
    for slot, other in itertools.product(a, b):
        num_common += slot == other
    return num_common / first.shape[-1]


def _is_too_low(by_row: np.ndarray, chance: float, min_agreement: float) -> bool:
    """Whether the agreement of [S] rows is below the limit even with two standard errors added."""
    count = len(by_row) + 4
    share = (float(by_row.sum()) + 2) / count
    highest = share + 2 * (share * (1 - share) / count) ** 0.5
    return len(by_row) >= LEAST_JUDGED and (highest - chance) / (1 - chance) < min_agreement
