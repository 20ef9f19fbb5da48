"""Runs every tiny family of tests/tiny_families.py through megarl, and writes docs/families.md from what was measured.

    python tools/families.py                              # all families and parts: half an hour on two cores
    python tools/families.py --only gpt_oss --parts model # one family; the rows of the others stay
    python tools/families.py --only                       # the page alone, from the rows

A family has a row, a JSON file in ``--rows``, written after every part of it. Parts, each a process of its own:
``model`` (config, plan, conversion, log-probabilities, gradients, replay, on the installed Megatron-Core), ``releases``
(log-probabilities and gradients on another release), ``server`` (a real SGLang server on the CPU, for which ``make
sglang-cpu``). The exit code is 1 where a cell is beyond its bound, or where anything but a server fails.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "megatron"))
from environments import megatron_release
from family_proofs import changed, make_prompts, prove_replay
from tiny_families import FAMILIES, YARN, write_family

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
PARTS = ("model", "releases", "server")
PINNED, OTHER = "0.16.1", "0.19.2"
SGLANG_PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
LOGPROB_BOUND, GRADIENT_BOUND, GRADIENT_FLOOR = 1e-5, 1e-4, 0.02
"""A gradient's error is divided by its largest entry plus the floor, below which fp32 rounding of the sums decides."""
LEAST_SETS = 0.999
"""Least share of equal sets of experts."""
SERVER_START_S = 600.0
TABLE = tomllib.loads((ROOT / "megarl" / "files" / "families.toml").read_text())


@dataclass(frozen=True)
class Served:
    """How a tiny model differs for a server, so that SGLang can serve it on a CPU."""

    sizes: dict[str, Any] = field(default_factory=dict)
    """Keys of the tiny config with other values."""
    keys: dict[str, Any] = field(default_factory=dict)
    """Keys that published files have and SGLang reads, and that transformers 5 does not write."""
    arguments: tuple[str, ...] = ()
    prompts: int = 4
    tokens: int = 8
    bound: float = 1e-4
    """Largest mean difference of a log-probability; tools/compare_server.py's for fp32."""


_SIGMOID = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_FULL = {"full_attention_interval": 2}
_LATENT = Served(
    {"kv_lora_rank": 256, "qk_rope_head_dim": 32, "rope_parameters": YARN},
    _SIGMOID,
    ("--attention-backend", "triton"),
    2,
    3,
)
_DELTA_NET = ("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule")
SERVED = {
    "qwen3_moe": Served({"mlp_only_layers": []}),
    "olmoe": Served({"num_key_value_heads": 4}),
    "deepseek_v3": _LATENT,
    "moonlight": _LATENT,
    "kimi_k2": _LATENT,
    "deepseek_v32": _LATENT,
    "glm_moe_dsa": _LATENT,
    "glm4_moe_lite": _LATENT,
    "gpt_oss": Served({"sliding_window": 64}, {}, ("--attention-backend", "triton"), 2, 3, 1e-3),
    "qwen3_next": Served({"mlp_only_layers": []}, _FULL, _DELTA_NET),
    "qwen3_5_moe": Served({}, _FULL, _DELTA_NET),
    "qwen3_5_moe_text": Served({}, _FULL, _DELTA_NET),
    "minimax_m2": Served(
        {}, {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "rotary_dim": 8}
    ),
    "hy_v3": Served(
        {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
        {"route_norm": True, "qk_norm": True, "first_k_dense_replace": 1},
    ),
}
"""Families that are served in another form than the tiny one. The attention of SGLang's ``torch_native`` knows neither
latents nor sinks; its Triton kernels run in Triton's interpreter, slowly: few tokens."""


# Parts. Each runs in a process of its own, in an empty folder, and returns cells.


def measure_model(name: str) -> Row:
    row: Row = {name: version(name) for name in ("megatron-core", "transformers", "torch")}
    row["python"] = platform.python_version()
    model = write_family(Path("models") / name, name)
    for cell, measure in (("config", _config), ("plan", _plan), ("convert", _convert)):
        row[cell] = _cell(measure, model)
    return row | {"computes": _cell(_computes, model), "replay": _cell(prove_replay, model)}


def measure_releases(name: str) -> Row:
    model = write_family(Path("models") / name, name)
    import megatron.core

    return {"megatron-core": megatron.core.__version__, "computes": _cell(_computes, model)}


def _cell(measure: Callable[[Path], Any], model: Path) -> Any:
    try:
        return measure(model)
    except Exception as error:  # the reason is what the page says
        return {"error": _first_line(f"{type(error).__name__}: {error}")}


def _first_line(text: str) -> str:
    return re.sub(r"\S*/(?=[\w.-]+)", "", " ".join(text.split("\n\n")[0].split()))[:300]


def _expected_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """What transformers has saved, of the text model."""
    from tiny_world import safetensors_of

    return {name: tuple(tensor.shape) for name, tensor in safetensors_of(model).items()}


def _config(model: Path) -> Row:
    from megarl.models.names import hf_shapes
    from megarl.models.shapes import read_shape

    ours, theirs = hf_shapes(read_shape(model)), _expected_shapes(model)
    different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return {"tensors": len(theirs), "different": different[:3], "is_right": not different}


def _plan(model: Path) -> Row:
    from math import prod

    from megarl.models.shapes import read_shape
    from megarl.ops.plan.layout import count_model

    ours, theirs = count_model(read_shape(model)).total, sum(map(prod, _expected_shapes(model).values()))
    return {"parameters": ours, "expected": theirs, "is_right": ours == theirs}


def _convert(model: Path) -> Row:
    from tiny_world import safetensors_of

    from megarl.convert.conversion import to_hf, to_megatron
    from megarl.convert.job import Options, same_bits

    to_megatron(model, Path("megatron"), Options(layers="local"))
    to_hf(Path("megatron"), Path("back"), None, Options())
    stored, back = (safetensors_of(folder, True) for folder in (model, Path("back")))
    is_right = stored.keys() == back.keys() and all(same_bits(back[name], stored[name]) for name in stored)
    return {"bytes": sum(tensor.nbytes for tensor in stored.values()), "is_right": is_right}


def _computes(model: Path) -> Row:
    """A training pass of Megatron on the fixed batch, against transformers."""
    import cases_training
    from tiny_world import batch_of, logits_of_transformers, oracle_loss_gradients, rollouts, teacher_forced

    measured, batches = cases_training.gradients({}, model.name), rollouts()
    logits = logits_of_transformers(model, [rollout.tokens for rollout in batches])
    logprob = max(
        float(
            (measured["logprobs"][tuple(rollout.tokens.tolist())] - teacher_forced(one, rollout.tokens)[0]).abs().max()
        )
        for rollout, one in zip(batches, logits, strict=True)
    )
    _, expected = oracle_loss_gradients(model, batch_of(batches))
    errors = {
        key: float((measured["gradients"][key] - value).abs().max() / (value.abs().max() + GRADIENT_FLOOR))
        for key, value in expected.items()
    }
    worst = max(errors, key=lambda key: errors[key])
    is_right = logprob <= LOGPROB_BOUND and errors[worst] <= GRADIENT_BOUND
    row = {"logprob": logprob, "gradient": errors[worst], "tensors": len(errors), "is_right": is_right}
    return row if is_right else row | {"worst": worst}


def measure_server(name: str) -> Row:
    served = SERVED.get(name, Served())
    model = write_family(Path("hf") / name, name, **served.sizes)
    row: Row = {"sglang": "", "sizes": served.sizes, "keys": served.keys, "arguments": served.arguments}
    return row | {"server": _cell(lambda folder: _serve(folder, served, row), model)}


@functools.cache
def _python() -> Path:
    """SGLang's, whose servers are forks of one process."""
    import sglang_fixtures

    os.environ |= {
        "TRITON_INTERPRET": "1",
        "SGLANG_MAMBA_CONV_DTYPE": "float32",
        "PYTHONPATH": str(ROOT / "tests" / "sglang_on_cpu"),
    }
    sglang_fixtures.SGLANG_MODULES = ("sglang_kernels", *sglang_fixtures.SGLANG_MODULES, "sglang_patches")
    return sglang_fixtures.forking(SGLANG_PYTHON, Path(tempfile.mkdtemp()))


def _serve(model: Path, served: Served, row: Row) -> Row:
    """The folder that megarl exported, by a real server, before and after an update of the weights."""
    import torch
    from local_engines import local_engine
    from tiny_world import config, policy_of, safetensors_of

    from megarl.config.tables.rollout import SGLangConfig
    from megarl.data.tiny import _save_tokenizer
    from megarl.engines.protocol import SamplingParams
    from megarl.engines.sglang.engine import SGLangEngine
    from megarl.engines.sglang.fleet import Fleet
    from megarl.engines.sglang.server import Server
    from megarl.engines.sglang.spec import ServerSpec
    from megarl.engines.sglang.versions import installed_release
    from megarl.engines.weights import WeightForm
    from megarl.errors import RolloutError
    from megarl.files.hf_config import MoeShape
    from megarl.megatron.hf_weights import save_hf

    hf = json.loads((model / "config.json").read_text())
    _save_tokenizer(str(model), 64)
    _describe_images(model, hf)
    policy = policy_of(config(model))
    save_hf(policy.chunks, policy.shape, model, folder := Path("exported").absolute())
    hf.get("text_config", hf).update(served.keys)
    (folder / "config.json").write_text(json.dumps(hf))
    row["sglang"] = installed_release(SGLANG_PYTHON)
    python, log = _python(), Path("server.log")
    has_experts = bool(MoeShape.of(hf).moe_layers)
    spec = ServerSpec(
        folder, python, "float32", log, max_total_tokens=8192, routes=has_experts, api_key="key",
        extra_args=served.arguments,
    )  # fmt: skip
    settings = SGLangConfig(checksums=False, deadline_s=1200.0, attempts=1)
    requests = make_prompts(served.prompts)
    params = SamplingParams(max_response_tokens=served.tokens, return_routed_experts=has_experts)
    try:
        with Server(spec) as server:
            server.wait_ready(SERVER_START_S)
            _require_answer(server.url)
            fleet = Fleet(urls=[server.url], source=folder, settings=settings, api_key="key", routes=has_experts)
            form = WeightForm(torch.float32)
            engine = SGLangEngine(fleet.start(), hf, fleet=fleet, settings=settings, api_key="key", form=form)
            weights = safetensors_of(folder)
            cells = {}
            for step, tensors in (("loaded", weights), ("updated", dict(changed(weights)))):
                if step == "updated":
                    engine.update_weights(tensors.items(), 1)
                else:  # the weights that the server has read itself have no version yet
                    fleet.members[0].sender.finish(0)
                    engine.weight_version, engine._complete = 0, True
                local = local_engine(folder)
                local.update_weights(tensors.items(), 1)
                cells[step] = _differences(local, engine.generate(requests, params))
            engine.close()
    except RolloutError as error:
        said = str(error).partition("the last: ")[2] or str(error)
        raise RolloutError(_reason(log.read_text(errors="replace")) or said.partition(". ")[0]) from error
    is_right = all(mean <= served.bound and (sets is None or sets >= LEAST_SETS) for mean, sets in cells.values())
    return cells | {"is_right": is_right}


def _require_answer(url: str) -> None:
    """RolloutError if a prompt and three tokens end the server; the engine would wait for its return."""
    import httpx

    from megarl.errors import RolloutError

    body = {"input_ids": [2, 3, 4, 5, 6], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    try:
        httpx.post(
            f"{url}/generate", json=body, headers={"Authorization": "Bearer key"}, timeout=1200.0, trust_env=False
        )
    except httpx.HTTPError as error:
        raise RolloutError(f"the server ended while it answered: {error}") from error


def _describe_images(folder: Path, hf: Row) -> None:
    """The files about images that a published folder of a larger model has; no image is sent."""
    if "vision_config" in hf:
        patches = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
        image = {"image_processor_type": "Qwen2VLImageProcessor", **patches}
        video = {"video_processor_type": "Qwen3VLVideoProcessor", **patches}
        (folder / "preprocessor_config.json").write_text(json.dumps(image))
        (folder / "video_preprocessor_config.json").write_text(json.dumps(video))


def _differences(local: Any, rollouts: Sequence[Any]) -> tuple[float, float | None]:
    """Mean |difference| of a response token's log-probability, and share of (token, layer) pairs with equal sets."""
    import numpy as np
    import torch

    errors, is_same = [], []
    for rollout in rollouts:
        tokens = torch.from_numpy(rollout.tokens.astype(np.int64))
        with torch.no_grad(), local._recorder.recording():
            logits = local._model(tokens[None], use_cache=False).logits[0]
            if rollout.routed_experts is not None:
                local._recorder.end_pass(len(tokens))
                rows = np.sort(local._recorder.take()["routed_experts"], -1) == np.sort(rollout.routed_experts, -1)
                is_same.append(rows.all(-1)[rollout.routed_mask].ravel())
        logprobs = logits.float().log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
        errors.append(np.abs(logprobs - rollout.rollout_logprobs[1:])[rollout.loss_mask[1:]])
    return float(np.concatenate(errors).mean()), float(np.concatenate(is_same).mean()) if is_same else None


_ERROR = re.compile(r"^(?:\w+\.)*(?:\w*Error|\w*Exception): .*|^\w*Error$", re.MULTILINE)


def _reason(log: str) -> str:
    """The last error of a server's output, which ended it, and where it was raised."""
    errors = [error for error in _ERROR.finditer(log) if "ConnectionError" not in error[0]]
    if not errors:
        return ""
    error = errors[-1]
    places = re.findall(r'File "(\S+)", line \d+, in (\w+)', log[: error.start()])
    file, function = next(((f, n) for f, n in reversed(places) if "/sglang/" in f), places[-1] if places else ("", ""))
    return f"{error[0][:220].strip()} (`{Path(file).name}`, `{function}`)"


LARGE = {"hidden_size": 1024, "moe_intermediate_size": 768, "num_experts": 64, "mlp_only_layers": []}
LARGE_LAYER_GIB = 64 * 3 * 1024 * 768 * 2 / 2**30
_WATCHED = """
import sys, threading, time
peak = 0
def watch():
    global peak
    while True:
        line = next(l for l in open("/proc/self/status") if l.startswith("RssAnon"))
        peak = max(peak, int(line.split()[1]))
        time.sleep(0.005)
threading.Thread(target=watch, daemon=True).start()
from megarl import cli
code = cli.main(["convert", *sys.argv[1:]])
print("peak", peak)
sys.exit(code)
"""
"""Prints the peak of anonymous memory in KiB: what a process has for itself, mapped files left out."""


def measure_large(gib: float) -> Row:
    """Seconds and MiB of the conversions of a Qwen3-MoE in bf16, verification included."""

    def convert(source: Path, out: Path, *words: str) -> tuple[int, int]:
        started = time.perf_counter()
        command = [sys.executable, "-c", _WATCHED, str(source), str(out), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return round(time.perf_counter() - started), int(done.stdout.split("peak ")[-1]) // 1024

    layers = max(1, round(gib / LARGE_LAYER_GIB))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = write_family(folder / "hf", "qwen3_moe", **LARGE, num_hidden_layers=layers, dtype="bfloat16")
        size = sum(file.stat().st_size for file in source.glob("*.safetensors")) / 2**30
        there = convert(source, folder / "megatron", "--layers", "te")
        return {"gib": size, "to": there, "back": convert(folder / "megatron", folder / "back", "--shard-gib", "0.5")}


# The families of one part, in a process of its own


def run_part(part: str, names: Sequence[str], rows: Path) -> None:
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if part == "releases":
        environment["PYTHONPATH"] = str(megatron_release(OTHER))
    command = [sys.executable, "-W", "ignore", __file__, "--worker", part, "--rows", str(rows), "--only", *names]
    subprocess.run(command, env=environment, check=True)


def work(part: str, names: Sequence[str], rows: Path) -> None:
    import on_cpu  # noqa: F401 (before Megatron)

    measure = {"model": measure_model, "releases": measure_releases, "server": measure_server}[part]
    for name in names:
        file = rows / f"{name}.json"
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            cells = measure(name) | {"seconds": round(time.perf_counter() - started)}
        row = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(row | {part: cells}, indent=1, sort_keys=True) + "\n")
        print(name, part, json.dumps(cells), flush=True)


# The page


def faults(row: Row) -> list[str]:
    """The cells of a row that are beyond their bounds, and those of Megatron that are missing."""
    found = [f"{part} was not run" for part in ("model", "releases") if part not in row]
    for part, cells in row.items():
        if not isinstance(cells, dict):
            continue
        if "error" in cells:
            found.append(f"{part}: {cells['error']}")
        for cell, value in cells.items():
            if isinstance(value, dict) and "error" in value and part == "model":
                found.append(f"{part}, {cell}: {value['error']}")
            elif isinstance(value, dict) and value.get("is_right") is False:
                found.append(f"{part}, {cell}: {value}")
    return found


def table(rows: dict[str, Row]) -> list[str]:
    heads = ("family", "config", "plan", "convert", "logits", "gradient", "R3", "R2", "Megatron-Core", "server")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for name, row in rows.items():
        model = row.get("model", {})
        cells = [
            _show(model, "config", lambda cell: f"{cell['tensors']} tensors"),
            _show(model, "plan", lambda cell: f"{cell['parameters']:,}"),
            _show(model, "convert", lambda cell: f"every bit, {cell['bytes'] / 2**10:.0f} KiB"),
            _show(model, "computes", lambda cell: f"{cell['logprob']:.1e}"),
            _show(model, "computes", lambda cell: f"{cell['gradient']:.1e}"),
            _show(model, "replay", lambda cell: f"{cell['r3'][0]}/{cell['r3'][1]} ({100 * cell['native']:.0f} %)"),
            _show(model, "replay", lambda cell: "{}/{}".format(*cell["r2"])),
            _releases(row),
            _server(row),
        ]
        lines.append(f"| {' | '.join([f'`{name}`', *cells])} |")
    return lines


def _show(cells: Row, name: str, show: Callable[[Any], str]) -> str:
    if name not in cells:
        return "not run"
    value = cells[name]
    if value is None:
        return "-"
    if "error" in value:
        return f"no: {value['error']}".replace("|", "\\|")
    return show(value) if value["is_right"] else f"WRONG: {show(value)}"


def _releases(row: Row) -> str:
    ran = []
    for part in PARTS[:2]:
        if "computes" in (cells := row.get(part, {})):
            shown = _show(cells, "computes", lambda cell: f"{cell['logprob']:.1e}")
            ran.append(f"{cells['megatron-core']}: {shown}" if part == "releases" else cells["megatron-core"])
    return "; ".join(ran) or "not run"


def _server(row: Row) -> str:
    def show(cell: Row) -> str:
        parts = []
        for step in ("loaded", "updated"):
            mean, sets = cell[step]
            parts.append(f"{step} {mean:.1e}" + ("" if sets is None else f", {100 * sets:.4g} %"))
        return "; ".join(parts)

    return _show(row.get("server", {}), "server", show)


EXPLAINED = """\
One process, fp32, Megatron-Core's local layers, with megarl's stand-ins for parts that need a GPU. transformers makes
every tiny model, with random weights, norms and biases (`tests/tiny_families.py`). The tests run the same families in
more layouts. `-`: a dense model has no routes. `no: ...`: the error, as it was raised.

| column | what ran | bound |
|---|---|---|
"""
COLUMNS = (
    ("config", "tensors that megarl derives from `config.json`, names and shapes, against transformers' file", "equal"),
    ("plan", "parameters that `megarl plan` counts, against transformers' (of the text model)", "equal"),
    ("convert", "Hugging Face -> `torch_dist` -> Hugging Face, with a vision tower", "every bit"),
    ("logits", "largest difference of a log-probability from transformers', packed sequences", f"{LOGPROB_BOUND:g}"),
    (
        "gradient",
        f"largest error of an entry, over the gradient's largest entry plus {GRADIENT_FLOOR:g}; every parameter",
        f"{GRADIENT_BOUND:g}",
    ),
    (
        "R3",
        "(token, layer) rows with the experts that transformers' engine recorded with other weights, of those "
        "replayed, by `megarl.verify.RoutingWatch`; in brackets the share without replay",
        "all",
    ),
    ("R2", "the same for Megatron's own routes of an earlier pass, after a change of its weights", "all"),
    (
        "Megatron-Core",
        f"the installed release; largest difference of a log-probability on {OTHER}, where gradients are compared too",
        f"{LOGPROB_BOUND:g}",
    ),
    (
        "server",
        "SGLang on the CPU, fp32: mean difference of a response token's log-probability from transformers', and "
        "share of equal expert sets; *loaded*: from the folder that megarl exported from Megatron, *updated*: after "
        "an update of all weights",
        f"{Served.bound:g} (`gpt_oss` 0.001), {100 * LEAST_SETS:g} %",
    ),
)

SERVERS = """\
## Servers

Servers run without SGLang's compiled kernels: Triton kernels in Triton's interpreter, kernels of delta nets and of
MiniMax-M2's norms by plain torch (`tests/sglang_on_cpu`). So a cell shows that SGLang reads the exported folder,
computes the same model and takes an update; it shows nothing about kernels of GPUs.

- Keys below: SGLang's class needs them in `config.json`. Published files have them, transformers 5 does not write them.
- Sizes below: SGLang on a CPU knows latent attention with YaRN alone, and its Triton kernel rows of 256 + 32 or
  512 + 64; its Qwen3-MoE and Qwen3-Next have experts in every layer; its OLMoE has as many key-value heads as heads;
  its Hunyuan 3 has dense layers at the start alone.
- SGLang holds sinks in bf16, hence the larger bound of `gpt_oss`. The window, 64, is longer than the sequences: with 3
  tokens log-probabilities were 0.3 off on average, for a reason that was not found.
- `deepseek_v32` and `glm_moe_dsa`: SGLang's sparse attention asks for a CUDA device.
- SGLang's norms of latents take `rms_norm_eps`, transformers' 1e-6: `moonlight` and `glm4_moe_lite`, with 1e-5, differ
  more.
- `torch_native` attends neither to latents nor with sinks: these families run SGLang's Triton kernels.
- SGLang 0.5.23 has no class of `dots1` and `solar_open`. It falls back to transformers' model: `dots1` answers without
  routes, `solar_open` is not loaded (`head_dim`).

| family | sizes | keys | arguments |
|---|---|---|---|
"""


def page(rows: dict[str, Row], large: Row) -> str:
    models, servers = ([row[part] for row in rows.values() if part in row] for part in ("model", "server"))
    versions = ", ".join(
        f"{name} {' and '.join(sorted({str(cells[name]) for cells in cells_of if cells.get(name)}))}"
        for cells_of, names in ((models, ("python", "torch", "megatron-core", "transformers")), (servers, ("sglang",)))
        for name in names
    )
    lines = [
        "# Families, as they ran",
        "",
        "Written by `tools/families.py` from the measured rows in `docs/families/`; on a CPU,",
        f"{versions}.",
        "",
        EXPLAINED + "".join(f"| {' | '.join(column)} |\n" for column in COLUMNS),
        *table(rows),
        "",
        f"Conversion of a Qwen3-MoE of {large['gib']:.2f} GiB in bf16, verification included, each way in a process:",
        "to Megatron in {} s, {} MiB of anonymous memory; back in {} s, {} MiB.".format(*large["to"], *large["back"]),
        "",
        SERVERS.rstrip(),
    ]
    for name in rows:
        if name in SERVED:
            one = SERVED[name]
            cells = (*map(_words, (one.sizes, one.keys)), f"`{' '.join(one.arguments)}`" if one.arguments else "")
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    lines += ["", "## Model types", "", "| model type | class | tiny model |", "|---|---|---|"]
    kinds = {kind: name for name, (kind, _) in reversed(FAMILIES.items())}
    for kind, entry in TABLE["families"].items():
        tiny = f"`{kinds[kind]}`" if kind in kinds else f"as `{entry['like']}`"
        lines.append(f"| `{kind}` | `{entry['class']}` | {tiny} |")
    lines += ["", "## What remains refused and why", "", "| model type | what megarl lacks |", "|---|---|"]
    lines += [f"| `{kind}` | {reason} |" for kind, reason in TABLE["lacking"].items()]
    return "\n".join([*lines, "", NOTES])


NOTES = """\
## Which Megatron release

megarl pins 0.16.1 ([version_matrix.md](version_matrix.md) has all releases). What the families need of a release:

- **Gated delta nets** (`qwen3_next`, `qwen3_5_moe`): Megatron's class takes packed sequences from 0.19 on only, and
  needs flash-linear-attention. megarl's subclass runs on both releases.
- **Sparse attention** (`deepseek_v32`, `glm_moe_dsa`): Megatron's module takes packed sequences in 0.19.2, not in
  0.16.1. megarl's module, with the same parameter names, runs on both.
- **Norms over all heads** (`olmoe`, `minimax_m2`): neither release has them; megarl adds a layer of its own.
- **Sinks, windows, clamped gates, biases of experts** (`gpt_oss`): fields of both releases. The attention of packed
  sequences with sinks is Transformer Engine's from 2.12 on, else torch's.
- **Everything else** is built from Megatron's own modules.

[convert.md](convert.md#families) has the details of each family.
"""


def _words(values: Row) -> str:
    plain = [f"`{key} = {json.dumps(value)}`" for key, value in values.items() if not isinstance(value, dict)]
    return ", ".join([*plain, *(["YaRN"] if "rope_parameters" in values else [])])


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rows", type=Path, default=ROOT / "docs" / "families")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "families.md")
    parser.add_argument("--large-gib", type=float, help="also convert a model of this size, and measure the memory")
    parser.add_argument("--worker", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    args.rows = args.rows.absolute()
    if args.worker:
        work(args.worker, args.only, args.rows)
        return 0
    if args.large_gib:
        (args.rows / "large.json").write_text(json.dumps(measure_large(args.large_gib)) + "\n")
    for part in args.parts if args.only else ():
        run_part(part, args.only, args.rows)
    rows = {name: json.loads(file.read_text()) for name in FAMILIES if (file := args.rows / f"{name}.json").exists()}
    args.out.write_text(page(rows, json.loads((args.rows / "large.json").read_text())))
    wrong = [f"{name}: {fault}" for name, row in rows.items() for fault in faults(row)]
    wrong += [f"{name}: no row" for name in FAMILIES if name not in rows]
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
