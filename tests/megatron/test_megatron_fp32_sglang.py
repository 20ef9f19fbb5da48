"""Expert biases of published size on real SGLang servers: a run in bf16 sends every bit of them, in every form."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from biased_models import SERVABLE, compare_routes, requests, write_biased
from sglang_fixtures import START_DEADLINE_S, transport_fields
from tiny_world import config, policy_of, transformers_model

from megarl.engines.protocol import SamplingParams
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.member import find_changes
from megarl.engines.sglang.server import Server
from megarl.engines.sglang.spec import ServerSpec
from megarl.engines.sglang.transports.sender import Checksums
from megarl.engines.weights import WeightForm

pytestmark = [pytest.mark.sglang, pytest.mark.slow(minutes=2)]
PLUGIN = Path(__file__).parents[1] / "latent_attention_on_cpu"
WAYS = ("tensor", "distributed", "disk", "ipc")
PARAMS = SamplingParams(max_response_tokens=8)


@dataclass
class Served:
    """A server that has loaded a checkpoint itself."""

    server: Server
    folder: Path
    loaded: Checksums

    def engine(self, way: str, tmp_path: Path) -> tuple[Fleet, SGLangEngine]:
        """What sends the weights of a run with ``rollout.dtype = "bf16"``."""
        fleet = Fleet(
            urls=[self.server.url],
            source=self.folder,
            **transport_fields(way, tmp_path),
        )
        about = json.loads((self.folder / "config.json").read_text())
        return fleet, SGLangEngine(fleet.start(), about, fleet=fleet, form=WeightForm(torch.bfloat16))


def checksums_of(fleet: Fleet) -> Checksums:
    return fleet.members[0].sender.checksums()


@pytest.fixture(scope="module", params=[(family, dtype) for family in SERVABLE for dtype in ("float32", "bfloat16")])
def served(
    request: pytest.FixtureRequest, sglang_spec: ServerSpec, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    family, dtype = request.param
    home = tmp_path_factory.mktemp("biased")
    folder = write_biased(home / "model", family)
    for file in Path(sglang_spec.model_path).glob("*token*"):
        shutil.copy(file, folder)
    spec = replace(sglang_spec, model_path=folder, dtype=dtype, log_file=home / "log")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PLUGIN))
        with Server(spec) as server:
            server.wait_ready(START_DEADLINE_S)
            fleet = Fleet(urls=[server.url], source=folder)
            fleet.start()
            loaded = checksums_of(fleet)
            fleet.close()
            yield Served(server, folder, loaded)


def test_a_run_in_bf16_sends_what_the_server_would_load_itself(served: Served, tmp_path: Path, one_rank: None) -> None:
    """Bit for bit in every form; and the experts that the server chooses are the trainer's.

    All weights but the biases are as exact in bf16, so a server in float32 and a policy in fp32 route alike.
    """
    policy = policy_of(config(served.folder, model__dtype="bf16"))
    exact = config(served.folder)
    trainer, oracle = policy_of(exact), transformers_model(served.folder)
    weights = {name: tensor.clone() for name, tensor in policy.export()}
    others = {name: tensor.flip(0) if "e_score" in name else tensor for name, tensor in weights.items()}
    biases = {name for name in served.loaded[0] if "e_score" in name}
    for way in WAYS:
        fleet, engine = served.engine(way, tmp_path / way)
        engine.update_weights(others.items(), 1)
        assert set(find_changes(checksums_of(fleet), served.loaded)) == biases
        engine.update_weights(weights.items(), 2)
        assert find_changes(checksums_of(fleet), served.loaded) == []
        if served.server.spec.dtype == "float32":
            assert compare_routes(engine.generate(requests(), PARAMS), trainer, exact, oracle) == 1.0, way
        engine.close()
