"""What replayed columns close of the gap between the engines: experts, gate weights, keys of a sparse indexer.

    megarl quickstart --out runs/quickstart
    python tools/bench_replay_columns.py --config runs/quickstart/quickstart.toml [--responses 512]
    python tools/bench_replay_columns.py --family deepseek_v32 [--tokens 48]

For each precision of the local engine and of the trainer: mean |log pi - log mu| of the response tokens, k3, and tokens
with a ratio beyond 2, on the same responses. The weights of both engines are equal. ``--family`` takes a random model
of the tests, with random prompts. Then, what the sum over a token's experts alone changes, in the engine's model: the
experts of each row in the order of their numbers; and added one by one in this order, rounded each time, as Megatron
does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from tiny_families import write_family

import megarl
from megarl.config import Config, ParallelConfig
from megarl.config.file import load, parse
from megarl.core.measures import mismatch_metrics
from megarl.core.metrics import finalize
from megarl.core.packing import pack, select
from megarl.core.types import Rollout, SampleRequest
from megarl.data.prompts import load_prompts
from megarl.data.tokenizer import load_model_tokenizer
from megarl.engines.local.decode import _num_experts
from megarl.engines.local.engine import LocalEngine
from megarl.engines.protocol import SamplingParams
from megarl.engines.weights import read_model_config
from megarl.megatron import distributed
from megarl.megatron.checkpoints.checkpoint import FrozenModel
from megarl.megatron.passes import forward
from megarl.megatron.passes.micro_batches import MicroBatch
from megarl.megatron.policy import DTYPES
from megarl.megatron.rollout_routes import check_rollouts, deliver_keys, deliver_routes
from megarl.ops.evaluate.gap import PRECISIONS
from megarl.ops.evaluate.request import with_keys
from megarl.stand_ins.sparse_attention import find_indexers
from megarl.trainer.engines import make_local_engine
from megarl.trainer.mini_batch import split

PAIRS = (("fp32", "fp32"), ("bf16", "fp32"), ("fp8", "fp32"), ("bf16", "bf16"), ("fp8", "bf16"))


def of_family(folder: Path, name: str, tokens: int) -> Config:
    """A model with sequences longer than the indexer's top-k."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "n_routed_experts": 16, "max_position_embeddings": 256}
    if name in ("deepseek_v32", "glm_moe_dsa"):
        sizes |= {"index_topk": 8, "index_n_heads": 64, "index_head_dim": 32, "pad_token_id": None}
        sizes |= {"num_experts": 16} if name == "deepseek_v32" else {}
    write_family(folder, name, **sizes, initializer_range=0.06)
    table = {
        "run": {"steps": 1},
        "model": {"path": str(folder)},
        "data": {"train": "unused.jsonl", "max_prompt_tokens": 12},
        "rollout": {"prompts_per_step": 1, "group_size": 2, "max_response_tokens": tokens},
        "optim": {"lr": 1e-6},
    }
    return parse(table, {})


def prompts_of(config: Config, family: bool) -> list[np.ndarray]:
    if family:
        rng = np.random.default_rng(0)
        return [rng.integers(2, 30, rng.integers(4, 12), dtype=np.int32) for _ in range(64)]
    return [prompt.tokens for prompt in load_prompts(config.data, load_model_tokenizer(config.model))[:256]]


def draw(config: Config, model: FrozenModel, prompts: Sequence[np.ndarray], responses: int) -> list[Rollout]:
    engine: LocalEngine = make_local_engine(config, print)
    engine.update_weights(model.export(), 0)
    places = [divmod(index, len(prompts))[::-1] for index in range(responses)]
    requests = [SampleRequest(prompts[group], group, sample, 1000 * group + sample) for group, sample in places]
    limit = config.rollout.max_response_tokens
    is_sparse = bool(model.shape.indexer_layers)
    asked = {"return_gate_weights": True, "return_indexer_topk": is_sparse}
    return engine.generate(requests, SamplingParams(max_response_tokens=limit, **asked))


def measure(config: Config, model: FrozenModel, rollouts: Sequence[Rollout]) -> Iterator[tuple[str, list[float]]]:
    packed, shape = pack(rollouts, np.zeros(len(rollouts))), model.shape
    micros = split(config, packed)
    batch = select(packed, [sequence for micro in micros for sequence in micro.sequences])

    def compare(micros: Sequence[MicroBatch]) -> list[float]:
        outputs = forward.run(model.chunks, micros, temperature=1.0, vocab_size=shape.vocab_size)
        logprobs = torch.cat([output.logprobs for output in outputs]).float()
        difference = (logprobs - batch.rollout_logprobs)[batch.loss_mask].abs().mean().item()
        metrics = finalize(mismatch_metrics(logprobs, batch.rollout_logprobs, batch.loss_mask, batch.cu_seqlens))
        return [difference, metrics["rollout/k3"], metrics["rollout/extreme_2"]]

    assert model.replay is not None
    yield "nothing", compare(micros)
    check_rollouts(rollouts, shape, gates=True, keys=bool(shape.indexer_layers))
    routes = deliver_routes(rollouts, micros, model.replay.layers, shape, gates=True)
    variants = [("ids", [replace(micro, gates=None) for micro in routes], micros), ("ids, gates", routes, micros)]
    if shape.indexer_layers:
        keyed = deliver_keys(rollouts, micros, find_indexers(model.chunks), shape)
        variants += [("ids, keys", variants[0][1], keyed), ("ids, gates, keys", routes, keyed)]
    for name, used, of_variant in variants:
        with model.replay.replay(used, min_agreement=0.0):
            result = compare(of_variant)
        yield name, result


def of_sums(config: Config, model: FrozenModel, rollouts: Sequence[Rollout], dtype: str) -> Iterator[list[float]]:
    """Mean and largest change of a log-probability by the sum over the experts alone."""
    kinds = (None, None, "eager")
    engines = [
        LocalEngine(read_model_config(config.model.path), dtype=DTYPES[dtype], experts_implementation=k) for k in kinds
    ]
    for engine in engines:
        engine.update_weights(model.export(), 0)
    columns: list[list[torch.Tensor]] = [[], [], []]
    for rollout in rollouts[:64]:
        ids = torch.from_numpy(rollout.tokens).long()[None]
        mask = torch.from_numpy(rollout.loss_mask[1:])
        for index, engine in enumerate(engines):
            with sorted_slots(engine._model) if index == 1 else torch.no_grad(), torch.no_grad():
                logits = engine._model(ids, use_cache=False).logits[0, :-1].float()
            columns[index].append(torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0][mask])
    native, *others = (torch.cat(column) for column in columns)
    for other in others:
        yield [(native - other).abs().mean().item(), (native - other).abs().max().item()]


@contextmanager
def sorted_slots(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the experts of each row come in the order of their numbers."""

    def sort(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        order = args[1].argsort(-1)
        return args[0], args[1].gather(1, order), args[2].gather(1, order)

    handles = [module.register_forward_pre_hook(sort) for module in model.modules() if _num_experts(module)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--family")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--responses", type=int, default=512)
    arguments = parser.parse_args()
    megarl.enable_cpu()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.family:
            whole = of_family(Path(folder), arguments.family, arguments.tokens)
        else:
            whole = load(arguments.config, {})
        whole = whole.model_copy(update={"parallel": ParallelConfig()})
        distributed.initialize(whole)
        show(whole, bool(arguments.family), arguments.responses)
        distributed.shutdown()


def show(whole: Config, is_family: bool, responses: int) -> None:
    prompts = prompts_of(whole, is_family)
    print("| rollouts | training | replayed | mean difference | k3 | ratio beyond 2 |\n|---|---|---|---|---|---|")
    for training in dict.fromkeys(dtype for _, dtype in PAIRS):
        config = with_keys(whole, model={"dtype": training})
        model = FrozenModel(config, None, replays=True)
        drawn: list[Rollout] = []
        for rollout in (name for name, dtype in PAIRS if dtype == training):
            drawn = draw(with_keys(config, rollout=PRECISIONS[rollout]), model, prompts, responses)
            for name, (difference, k3, beyond) in measure(config, model, drawn):
                print(f"| {rollout} | {training} | {name} | {difference:.2e} | {k3:.1e} | {beyond:.2%} |", flush=True)
        for name, (mean, largest) in zip(("order", "one by one"), of_sums(config, model, drawn, training), strict=True):
            print(f"sum over experts, {name}, {training}: mean {mean:.1e}, largest {largest:.1e}", flush=True)


if __name__ == "__main__":
    main()
