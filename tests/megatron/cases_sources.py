"""Cases of several ranks that send weights to stand-in servers."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from tiny_world import MODELS, config, policy_of, safetensors_of

from megarl.engines.sglang import fleet, member
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.spec import free_port
from megarl.errors import MegarlError
from megarl.megatron import distributed, hf_weights
from megarl.megatron.policy import Policy
from megarl.trainer import engines

STAND_IN = Path(__file__).parents[1] / "engines/sglang_stand_in.py"
MODEL = MODELS / "deepseek_v3"
"""With halves of projections that must come together, and a dense layer."""
Layout = dict[str, int]


@contextmanager
def stand_ins(number: int) -> Iterator[list[tuple[str, Path]]]:
    """URL and folder of servers that rank 0 starts, on all ranks."""
    with ExitStack() as stack:
        found: list[tuple[str, Path]] = []
        for _ in range(number if distributed.is_main_rank() else 0):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            port = free_port("127.0.0.1")
            process = subprocess.Popen([sys.executable, str(STAND_IN), str(port), str(folder)])
            stack.callback(process.wait)
            stack.callback(process.kill)
            found.append((f"http://127.0.0.1:{port}", folder))
        for url, _ in found:
            while True:
                try:
                    httpx.get(f"{url}/health", trust_env=False)
                    break
                except httpx.HTTPError:
                    time.sleep(0.02)
        yield distributed.gather_objects(found)[0]


def events(folder: Path, *names: str) -> list[dict[str, Any]]:
    told = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event for event in told if event["event"] in names]


def digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


@contextmanager
def world(
    layout: Layout, spare: str, most_sources: int = 8, model: Path = MODEL
) -> Iterator[tuple[Policy, SGLangEngine, list[Path]]]:
    fleet.BUCKET_BYTES = engines.BUCKET_BYTES = 1 << 14
    engines.MOST_SOURCES = most_sources
    policy = policy_of(config(model, layout))
    with stand_ins(2) as servers:
        settings = config(
            model,
            layout,
            rollout__engine="sglang",
            rollout__dtype="fp32",
            sglang__urls=[url for url, _ in servers],
            sglang__sync="distributed",
            sglang__spare_weights=spare,
        )
        engine = engines.make_sglang_engine(settings, print)
        yield policy, engine, [folder for _, folder in servers]
        engine.close()
        distributed.barrier()


@contextmanager
def counting() -> Iterator[list[int]]:
    """Counts the bytes that this rank receives from others on the way to whole tensors."""
    gather, hand_over, received = hf_weights._Hop.gather, hf_weights._Hop.hand_over, [0]

    def count(move: Callable[..., Any]) -> Callable[..., Any]:
        def counted(hop: Any, given: torch.Tensor | None, *more: Any) -> Any:
            found = move(hop, given, *more)
            received[0] += found.nbytes - (0 if given is None else given.nbytes) if found is not None else 0
            return found

        return counted

    hf_weights._Hop.gather, hf_weights._Hop.hand_over = count(gather), count(hand_over)  # type: ignore[method-assign]
    try:
        yield received
    finally:
        hf_weights._Hop.gather, hf_weights._Hop.hand_over = gather, hand_over  # type: ignore[method-assign]


def sent(layout: Layout, spare: str = "none", most_sources: int = 8, model: str = MODEL.name) -> dict[str, Any]:
    """Two updates of two servers: what each has received, from which group, and what each rank has gathered.

    Then one of which the first source has all, as an evaluation reads them from files.
    """
    file = safetensors_of(MODELS / model)
    stored = digests(file)
    with world(layout, spare, most_sources, MODELS / model) as (policy, engine, folders), counting() as gathered:
        for version in (1, 2):
            engine.update_weights(policy.export(engine.receives_weights), version)
        received = [events(folder, "received") for folder in folders] if dist.get_rank() == 0 else []
        steps = ("received", "flush_cache", "update_weight_version", "continue_generation")
        engine.update_weights(file.items() if dist.get_rank() == 0 else (), 3)
        alone = [events(folder, "received")[len(of) :] for folder, of in zip(folders, received, strict=False)]
        order = [[event["event"] for event in events(folder, *steps)] for folder in folders if received]
    return {
        "gathered": distributed.gather_objects(gathered[0] // 2),
        "size": sum(tensor.nbytes for tensor in file.values()),
        "whole": [_whole(of, stored) for of in received],
        "groups": [[event["group"] for event in of] for of in received],
        "bytes": [[event["bytes"] for event in of] for of in received],
        "order": order,
        "alone": [{item for event in of for item in event["found"].items()} == set(stored.items()) for of in alone],
    }


def _whole(received: list[dict[str, Any]], stored: dict[str, str]) -> list[bool]:
    """Of each of two updates, whether it has each tensor of the file once, bit for bit."""
    half = len(received) // 2
    found = [[item for event in part for item in event["found"].items()] for part in (received[:half], received[half:])]
    return [sorted(items) == sorted(stored.items()) for items in found]


def failed(layout: Layout, faults: Sequence[str]) -> list[dict[str, Any]]:
    """Updates with a fault, at a rank or at a server, and one after each: what ranks say, and what servers get."""
    stored = digests(safetensors_of(MODEL))
    with world(layout, "none") as (policy, engine, folders):
        version, outcomes = 0, []
        for fault in faults:
            told = [_told(folder) for folder in folders]
            distributed.barrier()
            with _made(fault, policy, folders[1]):
                version, said = version + 1, ""
                try:
                    engine.update_weights(policy.export(engine.receives_weights), version)
                except MegarlError as error:
                    said = str(error)
                distributed.barrier()
            first = [_told(folder)[len(before) :] for folder, before in zip(folders, told, strict=True)]
            before = [len(events(folder, "received")) for folder in folders]
            distributed.barrier()
            version += 1
            engine.update_weights(policy.export(engine.receives_weights), version)
            after = [
                {item for event in events(folder, "received")[number:] for item in event["found"].items()}
                for folder, number in zip(folders, before, strict=True)
            ]
            said = distributed.gather_objects(said)
            outcomes.append({"said": said, "first": first, "whole": [found == set(stored.items()) for found in after]})
    return outcomes


def _told(folder: Path) -> list[str]:
    return [event["event"] for event in events(folder, "update_weight_version", "continue_generation")]


@contextmanager
def _made(fault: str, policy: Policy, folder: Path) -> Iterator[None]:
    """Inside, a rank has a weight that is NaN, or the server with this folder refuses or dies in a broadcast."""
    if fault.startswith("nan"):
        weight = next(value for name, value in policy.chunks[0].named_parameters() if ".experts." in name)
        kept = weight.detach().clone()
        if dist.get_rank() == int(fault[-1]):
            weight.data.view(-1)[0] = float("nan")
        yield
        weight.data.copy_(kept)
    else:
        what, step = fault.split()
        control, patience = folder / "control.json", member.DEATH_WAIT_S
        if what == "refuse":
            member.DEATH_WAIT_S = 0.5  # it lives, so no longer wait shows more
        if distributed.is_main_rank():
            control.write_text(json.dumps({what: step}))
        yield
        member.DEATH_WAIT_S = patience
        if distributed.is_main_rank():
            control.unlink(missing_ok=True)
