"""What the tests of this layer share: tiny models, a fixed batch of rollouts, and transformers as the oracle."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import on_cpu  # noqa: F401 (before Megatron)
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from tiny_families import FAMILIES, write_family

from megarl.config import Config
from megarl.config.file import parse
from megarl.core.packing import pack, select
from megarl.core.types import Rollout, TrainBatch
from megarl.data.tiny import write_tiny_model
from megarl.files.hf_config import is_beside_text, is_turned
from megarl.megatron import distributed
from megarl.megatron.passes.micro_batches import MicroBatch, router_tokens, split_micro_batches
from megarl.megatron.policy import Policy, schedule_of
from megarl.megatron.rollout_routes import select_routes
from megarl.models.shapes import ModelShape
from megarl.replay import MicroRoutes
from megarl.replay.megatron_state import cp_position, tp_position
from megarl.routes.trace import narrow_dtype

MODELS = Path("models")
"""Where ranks find the checkpoints: the launch runs in a folder with this link."""
TEMPERATURE = 0.8
MICRO_TOKENS = 32
NUM_SEQUENCES = 8
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "uniform": {"granularity": "full", "method": "uniform", "num_layers": 1},
    "block": {"granularity": "full", "method": "block", "num_layers": 1},
    "moe": {"granularity": "selective", "modules": ["moe"]},
    "moe+": {"granularity": "selective", "modules": ["moe", "core_attn", "layernorm"]},
    "others": {"granularity": "selective", "modules": ["core_attn", "layernorm", "mlp"]},
}
"""Activation recomputation; "others" are the selective modules that leave the router alone."""


def write_models(folder: Path) -> dict[str, Path]:
    """The checkpoints of the suite: 4 layers of which the second is dense, 8 experts, top-2.

    ``base``; ``tied`` (output layer = embedding), ``tied_experts`` (and no dense layer); ``bf16``; ``vocab30`` and
    ``vocab31`` (vocabularies that tensor parallelism has to pad, with as many key-value heads as four ranks need).
    """
    base = write_tiny_model(folder / "base", **_SIZES)
    four_heads = write_tiny_model(folder / "four_heads", **{**_SIZES, "num_kv_heads": 4})
    all_experts = write_tiny_model(folder / "all_experts", **{**_SIZES, "dense_layers": ()})
    return {
        "base": base,
        "tied": _variant(base, folder / "tied", tie_word_embeddings=True),
        "tied_experts": _variant(all_experts, folder / "tied_experts", tie_word_embeddings=True),
        "bf16": _variant(base, folder / "bf16", dtype="bfloat16"),
        "vocab30": _variant(four_heads, folder / "vocab30", vocab_size=30),
        "vocab31": _variant(base, folder / "vocab31", vocab_size=31),
        **{name: write_family(folder / name, name) for name in FAMILIES},
    }


_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_experts": 8,
    "top_k": 2,
    "expert_width": 16,
    "dense_layers": (1,),
    "max_positions": 64,
    "initializer_range": 0.15,
}


def _variant(source: Path, target: Path, **changes: Any) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
    model.to(getattr(torch, changes.get("dtype", "float32"))).save_pretrained(target)
    return target


def config(model: Path, parallel: Mapping[str, int] | None = None, **overrides: Any) -> Config:
    """A configuration for a tiny model; ``overrides`` are dotted keys with ``__`` for the dot."""
    table = {
        "run": {"steps": 4, "seed": 3},
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"train": "unused.jsonl", "max_prompt_tokens": 8},
        "rollout": {"prompts_per_step": 4, "group_size": 2, "max_response_tokens": 8, "temperature": TEMPERATURE},
        # Routes and log-probabilities here are random.
        "train": {
            "micro_batch_tokens": MICRO_TOKENS,
            "min_route_agreement": 0.0,
            "max_k3": "off",
            "max_native_flip": "off",
        },
        "optim": {"lr": 1e-3},
        "parallel": dict(parallel or {}),
    }
    return parse(table, {key.replace("__", "."): value for key, value in overrides.items()})


def join(settings: Config) -> None:
    """Process groups of this layout in place of those of an earlier one; a lone rank keeps the ones it has.

    The default group stays: to leave and join again over one store would meet the addresses of the old group. Models
    that have been trained hold their groups, and gloo's threads, until the process ends.
    """
    if parallel_state.model_parallel_is_initialized() and dist.get_world_size() == 1:
        settings.check_world_size(1)
        torch.manual_seed(settings.run.seed)
        tensor_parallel.model_parallel_cuda_manual_seed(settings.run.seed + 1)
        return
    if dist.is_initialized():
        dist.barrier()
        distributed.leave_layout()
    distributed.initialize(settings, timeout_s=600.0)


def policy_of(settings: Config) -> Policy:
    join(settings)
    return Policy(settings, schedule_of(settings))


def rollouts(
    vocab_size: int = 30, num_layers: int = 3, num_experts: int = 8, topk: int = 2, seed: int = 0, holes: bool = True
) -> list[Rollout]:
    """Ragged sequences with random routes; with ``holes`` the last row of each is missing, and one in the middle."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(NUM_SEQUENCES):
        length = int(rng.integers(4, 13))
        order = rng.random((length, num_layers, num_experts)).argsort(-1)
        present = np.ones(length, bool)
        if holes:
            present[-1] = False
            present[2 if index == 3 else -1] = False
        loss_mask = np.arange(length) >= 2
        made.append(
            Rollout(
                group=index // 2,
                sample=index % 2,
                tokens=rng.integers(2, vocab_size, length).astype(np.int32),
                loss_mask=loss_mask,
                rollout_logprobs=np.where(loss_mask, -2.0, 0.0).astype(np.float32),
                routed_experts=order[..., :topk].astype(narrow_dtype(num_experts)),
                routed_mask=present,
                weight_versions=np.zeros(length, np.int32),
                finish_reason="stop",
            )
        )
    return made


def coefficients_of(batch: TrainBatch) -> torch.Tensor:
    """Some coefficients [T] that depend on the token alone: the sequence's advantage, varied by the token id."""
    varied = batch.advantages * (1.0 + 0.1 * (batch.tokens % 5))
    return torch.where(batch.loss_mask, varied, 0.0)


def fixed_coefficients(_: int, batch: TrainBatch, *__: torch.Tensor) -> tuple[torch.Tensor, None, dict[str, Any]]:
    """``coefficients_of`` as a training pass asks for them: no part of the entropies, and no metrics."""
    return coefficients_of(batch).cuda(), None, {}


def entropy_coefficients_of(batch: TrainBatch) -> torch.Tensor:
    """Some dJ/dH [T] that depend on the token alone, of both signs."""
    return torch.where(batch.loss_mask, 0.3 - 0.2 * (batch.tokens % 3), 0.0)


def with_kept_sets(batch: TrainBatch) -> TrainBatch:
    """Sets of 1 to 6 ids that depend on the token alone; none for prompts, and for one generated token in four."""
    tokens = zip(batch.tokens.tolist(), batch.loss_mask.tolist(), strict=True)
    sets = [
        sorted({token, *((7 * token + 5 * k) % 30 for k in range(token % 6))}) * (mask and token % 4 > 0)
        for token, mask in tokens
    ]
    offsets = torch.tensor([0, *map(len, sets)]).cumsum(0)
    return replace(batch, kept_ids=torch.tensor([*itertools.chain(*sets)], dtype=torch.int32), kept_offsets=offsets)


def batch_of(made: Sequence[Rollout], seed: int = 0) -> TrainBatch:
    advantages = np.random.default_rng(seed + 100).normal(size=len(made))
    return _pack(made, advantages)


def local_batch(seed: int = 0, vocab_size: int = 30, holes: bool = True) -> TrainBatch:
    """This data-parallel rank's share of the fixed batch."""
    return pack_own(rollouts(seed=seed, vocab_size=vocab_size, holes=holes), seed)


def pack_own(made: Sequence[Rollout], seed: int = 0) -> TrainBatch:
    """This data-parallel rank's share of given rollouts, with the advantages that they have on one rank."""
    advantages = np.random.default_rng(seed + 100).normal(size=len(made))
    own = own_share(len(made))
    return _pack(made[own], advantages[own])


_EXPERTS: dict[tuple[int, ...], np.ndarray] = {}


def _pack(made: Sequence[Rollout], advantages: np.ndarray) -> TrainBatch:
    """A packed batch, whose routes ``experts_of`` finds by the tokens of each sequence."""
    _EXPERTS.update({tuple(r.tokens.tolist()): r.routed_experts for r in made if r.routed_experts is not None})
    return pack(made, advantages)


def experts_of(batch: TrainBatch) -> torch.Tensor:
    """uint8 or int16 [T, L, K], the routes of a batch, or of a micro-batch of one."""
    sequences = batch.tokens.split(batch.cu_seqlens.diff().tolist())
    experts = np.concatenate([_EXPERTS[tuple(tokens.tolist())] for tokens in sequences])
    return torch.from_numpy(experts.astype(np.uint8 if experts.dtype == np.uint8 else np.int16))


def own_share(num_sequences: int) -> slice:
    """Which of the sequences are this data-parallel rank's."""
    share = num_sequences // distributed.dp_size()
    return slice(share * distributed.dp_rank(), share * (distributed.dp_rank() + 1))


def micro_batches(settings: Config, batch: TrainBatch) -> list[MicroBatch]:
    parallel = settings.parallel
    return split_micro_batches(
        batch,
        settings.train.micro_batch_tokens,
        padded_to_max=parallel.dispatcher == "allgather",
        multiple_of=parallel.micro_batch_multiple,
    )


def local_routes(micro: MicroBatch, layers: Sequence[int], shape: ModelShape) -> MicroRoutes:
    """The rows of a micro-batch's routes that the routers of this rank use.

    ``layers`` are the 0-based global layers of the rank (``RoutingReplay.layers``). The batch holds the routes whole.
    """
    token = router_tokens(micro.batch.cu_seqlens, micro.num_slots, tp_position(), cp_position())
    columns = [shape.moe_layers.index(layer) for layer in layers]
    return select_routes(token, experts_of(micro.batch)[token.clamp(min=0)][:, columns], micro.batch)


def gather_sequences(columns: Sequence[tuple[TrainBatch, torch.Tensor]]) -> dict[tuple[int, ...], torch.Tensor] | None:
    """Per-token columns of all model copies by the sequence's tokens, on rank 0; the order of micro-batches is lost."""
    mine = {}
    for batch, column in columns if distributed.holds_outputs() else ():
        bounds = batch.cu_seqlens.tolist()
        for first, last in itertools.pairwise(bounds):
            mine[tuple(batch.tokens[first:last].tolist())] = column[first:last].clone()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return {key: value for part in found for key, value in part.items()}


def logits_of_transformers(model: Path, sequences: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """fp32 [T, V] for each sequence alone."""
    oracle = transformers_model(model)
    with torch.no_grad():
        return [oracle(torch.as_tensor(tokens, dtype=torch.int64)[None]).logits[0] for tokens in sequences]


def transformers_model(model: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoConfig

    from megarl.engines.weights import auto_class

    return (
        auto_class(AutoConfig.from_pretrained(model))
        .from_pretrained(model, dtype=dtype, attn_implementation="eager")
        .eval()
    )


def teacher_forced(
    logits: torch.Tensor, tokens: np.ndarray, batch: TrainBatch | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs [T], entropies [T]) of a sequence in float64 at TEMPERATURE; 0 for the first token.

    batch: of this sequence alone, with the kept sets of the log-probabilities.
    """
    full = torch.log_softmax(logits.double() / TEMPERATURE, -1)
    labels = torch.as_tensor(tokens[1:], dtype=torch.int64)
    zero = full.new_zeros(1)
    masked = full[:-1]
    if batch is not None and batch.kept_ids is not None and batch.kept_offsets is not None:
        outside = torch.zeros(masked.shape, dtype=torch.bool)
        for row, (start, end) in enumerate(itertools.pairwise(batch.kept_offsets[1:].tolist())):
            outside[row] = start < end
            outside[row, batch.kept_ids[start:end]] = False
        masked = masked.masked_fill(outside, -torch.inf).log_softmax(-1)
    picked = masked.gather(1, labels[:, None])[:, 0]
    return torch.cat([zero, picked]), torch.cat([zero, -(full.exp() * full).sum(-1)[:-1]])


def oracle_loss_gradients(
    model: Path, batch: TrainBatch, entropy: bool = False
) -> tuple[float, dict[str, torch.Tensor]]:
    """transformers' loss ``-(coefficients * logprobs).sum()`` and its gradients, by Hugging Face checkpoint name.

    entropy: less ``(entropy_coefficients * entropies).sum()``.
    """
    from transformers.core_model_loading import revert_weight_conversion

    oracle = transformers_model(model)
    weights = coefficients_of(batch)
    entropy_weights = entropy_coefficients_of(batch) * entropy
    bounds = batch.cu_seqlens.tolist()
    total = torch.zeros((), dtype=torch.float64)
    for sequence, (first, last) in enumerate(itertools.pairwise(bounds)):
        tokens = batch.tokens[first:last]
        logits = oracle(tokens[None]).logits[0]
        logprobs, entropies = teacher_forced(logits, tokens.numpy(), select(batch, [sequence]))
        total = total - (weights[first:last].double() * logprobs).sum()
        total = total - (entropy_weights[first:last].double() * entropies).sum()
    total.backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in oracle.named_parameters()
    }
    kind, hidden = oracle.config.model_type, oracle.config.get_text_config().hidden_size
    return float(total.detach()), {
        name: gradient.transpose(1, 2) if is_turned(kind, name, gradient.shape, hidden) else gradient
        for name, gradient in revert_weight_conversion(oracle, gradients).items()
        if not is_beside_text(kind, name)
    }


@contextlib.contextmanager
def gradients_in_place_of_weights(policy: Policy) -> Iterator[None]:
    """Inside, ``policy.export()`` yields the summed gradients. Needs ``distributed_optimizer = false``.

    Those of frozen parameters are zero, as in ``oracle_loss_gradients``.
    """
    parameters = [parameter for chunk in policy.chunks for parameter in chunk.parameters()]
    weights = [parameter.data for parameter in parameters]
    for parameter in parameters:
        is_trained = parameter.requires_grad
        parameter.data = parameter.main_grad if is_trained else torch.zeros_like(parameter)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data = weight


def exported(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in policy.export()}


def safetensors_of(folder: Path, beside_text: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a folder; of a larger model, those of its text model, or all of them."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    hf = json.loads((folder / "config.json").read_text()) if (folder / "config.json").exists() else {}
    kind = str(hf.get("model_type"))
    return {name: value for name, value in found.items() if beside_text or not is_beside_text(kind, name)}
