"""A real server gets a signal inside a step of an update; the other one is updated."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from rollout_oracle import make_requests
from sglang_fixtures import START_DEADLINE_S
from sglang_oracle import CLOSE, logprob_gap, noisy, oracle_of

from megarl.engines.protocol import SamplingParams
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.member import FleetSettings
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.sglang.transports.sender import WeightSender
from megarl.engines.weights import WeightForm

pytestmark = [pytest.mark.sglang, pytest.mark.slow(minutes=2)]

PARAMS = SamplingParams(max_response_tokens=8)
STEPS = {"pause": "begin", "bucket": "send", "flush": "finish", "version": "name", "continue": "resume"}
"""A step of an update -> the method of the sender that begins it."""


@dataclass
class Pair:
    engine: SGLangEngine
    fleet: Fleet
    told: list[str]
    version: int = 0

    def update(self, weights: dict[str, torch.Tensor]) -> float:
        """Seconds of an update."""
        self.version += 1
        started = time.monotonic()
        self.engine.update_weights(weights.items(), self.version)
        return time.monotonic() - started

    def strike(self, number: signal.Signals, step: str, weights: dict[str, torch.Tensor]) -> float:
        """Seconds of an update in which the second server gets a signal just before this step."""
        self.told.clear()
        member, struck = self.fleet.members[1], threading.Event()
        assert member.process is not None
        process, method = member.process, getattr(WeightSender, STEPS[step])

        def strike_first(sender: WeightSender, *given: object) -> object:
            if sender is member.connection and not struck.is_set():
                struck.set()
                send(process, number)
            return method(sender, *given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WeightSender, STEPS[step], strike_first)
            seconds = self.update(weights)
        assert struck.is_set()
        return seconds

    def until_back(self) -> None:
        end = time.monotonic() + START_DEADLINE_S
        while not all(m.holds is not None and m.holds.version == self.version for m in self.fleet.members):
            assert time.monotonic() < end, self.told
            time.sleep(0.1)


def send(process: Server, number: signal.Signals) -> None:
    """To all processes of a server but the reaper, as the end of a Slurm step does."""
    for each in process.members():
        if each.pid != process.pid:
            os.kill(each.pid, number)


@pytest.fixture(scope="module")
def pair(sglang_spec: ServerSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    logs = tmp_path_factory.mktemp("deadlines")
    specs = [replace(sglang_spec, log_file=logs / f"{index}.log") for index in range(2)]
    told: list[str] = []
    patience = FleetSettings(START_DEADLINE_S, max_restarts=1000, poll_s=0.1)
    fleet = Fleet(specs, settings=patience, tell=told.append)
    config = json.loads((Path(sglang_spec.model_path) / "config.json").read_text())
    engine = SGLangEngine(fleet.start(), config, fleet=fleet, form=WeightForm(torch.float32))
    yield Pair(engine, fleet, told)
    engine.close()


@pytest.mark.parametrize(("number", "step"), [(signal.SIGKILL, "flush"), (signal.SIGSTOP, "pause")])
def test_an_update_goes_on_without_a_server_that_gets_a_signal(
    pair: Pair, number: signal.Signals, step: str, sglang_model: Path
):
    weights = noisy(sglang_model, int(number))
    seconds = pair.strike(number, step, weights)
    print(f"{number.name} at {step}: {seconds:.1f} s", *pair.told, sep="\n")
    assert pair.fleet.members[0].holds is pair.fleet.last is not None
    (line,) = [line for line in pair.told if "in a weight update" in line]
    assert ("hangs" if number == signal.SIGSTOP else "has gone") in line
    pair.until_back()
    oracle = oracle_of(sglang_model, weights)
    assert logprob_gap(pair.engine.generate(make_requests(6), PARAMS), oracle) < CLOSE
