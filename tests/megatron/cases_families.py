"""Cases that run on several ranks: checkpoints of every family through several layouts of real Megatron."""

from __future__ import annotations

from pathlib import Path

import torch
from saves import save
from tiny_world import MODELS, config, policy_of, safetensors_of
from torch_dist_weights import read_weights

from megarl.convert.conversion import to_hf, to_megatron
from megarl.convert.job import Options
from megarl.megatron.distributed import from_main_rank
from megarl.megatron.policy import Policy


def chain(layout: dict[str, int], model: str, then: str) -> dict[str, list[str]]:
    """HF -> torch_dist -> Megatron in ``layout``, saved by Megatron -> Megatron in ``then``, saved -> HF."""
    source, folder = MODELS / model, Path(f"{model}-chain")
    first, second, third, back = (folder / name for name in ("first", "second", "third", "back"))
    policy_of(config(source, layout))  # the ranks join
    from_main_rank(lambda: to_megatron(source, first, Options(layers="local")) and None)
    other = {part[:-1]: int(part[-1]) for part in then.split()}
    _through_megatron(policy_of(config(source, layout)), first, second)
    _through_megatron(policy_of(config(source, other)), second / "step_0000000", third)
    from_main_rank(lambda: to_hf(third, back, source, Options()) and None)
    stored, found = safetensors_of(source), safetensors_of(back)
    different = [name for name in stored if name not in found or not torch.equal(stored[name], found[name])]
    return {"different": different, "extra": sorted(set(found) - set(stored))}


def _through_megatron(policy: Policy, source: Path, target: Path) -> None:
    """Load into a model without weights and save, both by Megatron itself."""
    for chunk in policy.chunks:
        for tensor in (*chunk.parameters(), *dict(chunk.named_buffers()).values()):
            tensor.data.fill_(7.0)
    read_weights(source, policy.chunks)
    save(target, 0, policy, {}, keep=1)
