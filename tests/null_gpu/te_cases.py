"""Tiny models of every family with Transformer Engine's layers: optimizer steps, and weights in and out.

    tests/null_gpu/python [-m torch.distributed.run ...] tests/null_gpu/te_cases.py MODELS OUT CASE...

CASE is ``what/model/dtype/layout``: what is a function below, layout as in tests/megatron/ranks.py. Rank 0 writes the
results into OUT. With WITHOUT_TE set, Transformer Engine is hidden and the layers are Megatron's local ones.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "megatron")]


def main(models: Path, out: Path, cases: list[str]) -> None:
    import torch

    if "WITHOUT_TE" in os.environ:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment] # as if it were not installed
    elif os.environ.get("NULL_GPU"):
        from null_gpu import te

        te.install()
    from null_gpu.computing import computing
    from ranks import case

    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    with computing():
        for text in cases:
            what, model, dtype, layout = text.split("/")
            results[text] = globals()[what](models / model, dtype, dict(case(1, "", layout).layout))
    if os.environ.get("RANK", "0") == "0":
        torch.save(results, out)


def names(model: Path, dtype: str, layout: dict[str, int]) -> dict[str, Any]:
    """What differs from the checkpoint after loading and export, and the epsilon of each norm."""
    import tiny_world as tw

    return _names(model, tw.policy_of(tw.config(model, layout, model__dtype=dtype)))


def _names(model: Path, policy: Any) -> dict[str, Any]:
    import tiny_world as tw
    import torch

    stored, found = tw.safetensors_of(model), tw.exported(policy)
    chunk = [module for module in policy.chunks[0].modules() if hasattr(module, "decoder")][-1]
    return {
        "missing": sorted(set(stored) - set(found)),
        "unknown": sorted(set(found) - set(stored)),
        "different": [name for name in found if not torch.equal(found[name].cpu().float(), stored[name].float())],
        "epsilons": {name: module.eps for name, module in chunk.named_modules() if hasattr(module, "eps")},
        "layers": sorted({type(module).__name__ for chunk in policy.chunks for module in chunk.modules()}),
    }


def step(model: Path, dtype: str, layout: dict[str, int], **overrides: Any) -> dict[str, Any]:
    """One optimizer step, with R3 replay where there are experts; for ``base`` also the loss after it."""
    import tiny_world as tw
    from cases_training import forward_backward

    settings = tw.config(model, layout, model__dtype=dtype, train__replay="none", **overrides)
    policy = tw.policy_of(settings)
    shape, kept = policy.shape, _names(model, policy)
    if shape.moe_layers:
        settings = settings.model_copy(update={"train": settings.train.model_copy(update={"replay": "r3"})})
    experts = (shape.num_experts, shape.topk) if shape.moe_layers else (8, 2)
    batch = tw.pack_own(tw.rollouts(30, len(shape.moe_layers) or 1, *experts))
    loss, _ = forward_backward(policy, settings, batch)
    gradients = _gradients(policy)
    norm, _ = policy.optimizer_step()
    losses = [loss, *(forward_backward(policy, settings, batch)[0] for _ in range(model.name == "base"))]
    return {**kept, "losses": losses, "norm": norm, "gradients": gradients}


def _gradients(policy: Any) -> dict[str, Any]:
    """By Hugging Face name, in the dtype of the weights: a parameter of another dtype would lose Megatron's hooks."""
    import tiny_world as tw

    parameters = [parameter for chunk in policy.chunks for parameter in chunk.parameters()]
    weights = [parameter.data for parameter in parameters]
    for parameter in parameters:
        parameter.data = parameter.main_grad.to(parameter.dtype)
    found = {name: tensor.float().cpu() for name, tensor in tw.exported(policy).items()}
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data = weight
    return found


def recomputed(model: Path, dtype: str, layout: dict[str, int]) -> dict[str, Any]:
    every = {"recompute__granularity": "full", "recompute__method": "uniform", "recompute__num_layers": 1}
    return step(model, dtype, layout, **every)


def resumed(model: Path, dtype: str, layout: dict[str, int]) -> dict[str, Any]:
    """Whether two steps after a checkpoint are those of a run without one."""
    import torch
    from cases_checkpoint import interrupted

    os.chdir(model.parents[1])
    found = interrupted(layout, name=f"{model.name}-resumed", model__dtype=dtype)
    pairs = (("saved_weights", "loaded_weights"), ("straight_weights", "resumed_weights"))
    same = [all(torch.equal(found[a][name], found[b][name]) for name in found[a]) for a, b in pairs]
    return {"straight": found["straight"], "resumed": found["resumed"], "same": same}


def deterministic(model: Path, dtype: str, layout: dict[str, int]) -> dict[str, Any]:
    return step(model, dtype, layout, run__deterministic=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
