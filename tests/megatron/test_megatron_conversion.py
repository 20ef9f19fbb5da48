"""``megarl convert``: what goes wrong in practice leaves the old checkpoint or the new one, and says what it was."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from fp8_worlds import BLOCK, rounded_by_loops
from safetensors.torch import load_file, save_file
from tiny_families import FAMILIES, write_family
from tiny_world import safetensors_of

from megarl import cli
from megarl.convert.conversion import to_hf, to_megatron
from megarl.convert.job import MANIFEST, Options, same_bits
from megarl.convert.megatron_files import HF_FOLDER, Keys, MegatronCheckpoint, torch_dist_folder, units_of
from megarl.convert.quantization import quantize
from megarl.convert.torch_dist import Chunk, write_file, write_metadata
from megarl.core.fp8_names import is_fp8_weight
from megarl.errors import CheckpointError, ConfigError, NumericsError
from megarl.files.outputs import MARK
from megarl.models.hf_folder import INDEX
from megarl.models.layouts import LAYOUTS, Layout
from megarl.models.names import rules_of
from megarl.models.shapes import read_shape

LOCAL = Options(layers="local")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3 in three files with an index."""
    folder = write_family(tmp_path_factory.mktemp("source") / "model", "deepseek_v3")
    tensors = safetensors_of(folder)
    (folder / "model.safetensors").unlink()
    parts = [sorted(tensors)[start::3] for start in range(3)]
    where = {}
    for number, names in enumerate(parts):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        where.update(dict.fromkeys(names, file))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copy"))


def assert_same(one: Path, other: Path) -> None:
    stored, found = safetensors_of(one, True), safetensors_of(other, True)
    assert sorted(stored) == sorted(found)
    assert [name for name in stored if not same_bits(stored[name], found[name])] == []


class TestRoundTrip:
    @pytest.mark.parametrize("layers", ["local", "te"])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_bit_comes_back(self, family: str, layers: Any, tmp_path: Path) -> None:
        source = write_family(tmp_path / "model", family)
        to_megatron(source, tmp_path / "megatron", Options(layers=layers))
        to_hf(tmp_path / "megatron", tmp_path / "back", None, Options(shard_bytes=20_000))
        assert_same(source, tmp_path / "back")
        index = json.loads((tmp_path / "back" / INDEX).read_text())
        assert len(set(index["weight_map"].values())) > 3
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in safetensors_of(source, True).values())

    def test_dtype_and_bits_of_nan_and_negative_zero(self, copy: Path, tmp_path: Path) -> None:
        odd = torch.tensor([0x7FC1, -32768, -63, 1], dtype=torch.int16).view(torch.bfloat16)
        for file in copy.glob("*.safetensors"):
            tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
            next(tensor for tensor in tensors.values() if tensor.numel() > 8).view(-1)[:4] = odd
            save_file(tensors, file)
        to_megatron(copy, tmp_path / "megatron", LOCAL)
        to_hf(tmp_path / "megatron", tmp_path / "back", None, Options())
        assert_same(copy, tmp_path / "back")

    def test_fp8_sources_are_read_as_what_they_stand_for(self, source: Path, tmp_path: Path) -> None:
        quantize(source, tmp_path / "fp8", Options(block=BLOCK))
        to_megatron(tmp_path / "fp8", tmp_path / "megatron", LOCAL)
        to_hf(tmp_path / "megatron", tmp_path / "back", None, Options())
        found = safetensors_of(tmp_path / "back")
        for name, tensor in safetensors_of(source).items():
            assert torch.equal(found.pop(name), rounded_by_loops(tensor) if is_fp8_weight(name) else tensor), name
        assert not found
        assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


class TestNamesOfMegatron:
    """The map serves what local layers, Transformer Engine's and other ages of Megatron call a parameter."""

    def stored_under(self, keys: Keys, source: Path, folder: Path, padding: int = 0) -> Path:
        """The model of ``source`` as a Megatron with these names would have saved it."""
        shape, tensors = read_shape(source), safetensors_of(source)
        chunks = []
        for piece in (piece for unit in units_of(shape) for piece in unit):
            whole = LAYOUTS[piece.rule.layout].cut([tensors[name] for name in piece.hf], 0, 1, shape)
            if piece.rule.layout == "vocab":
                whole = torch.nn.functional.pad(whole, (0, 0, 0, padding), value=5.0)
            chunks.append(Chunk(keys.place(piece, shape), tuple(whole.shape), whole.dtype, lambda whole=whole: whole))
        folder.mkdir()
        write_metadata(folder, chunks, [], [write_file(folder, 0, chunks, [])])
        return folder

    @pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])
    def test_every_way_of_naming_is_recognised_and_a_padded_vocabulary_is_cut(
        self, family: str, tmp_path: Path
    ) -> None:
        source = write_family(tmp_path / "model", family)
        for number, keys in enumerate(Keys.all_of(read_shape(source))):
            stored = self.stored_under(keys, source, tmp_path / f"{number}", padding=34 * number)
            assert to_hf(stored, tmp_path / f"{number}-hf", source, Options())["keys"] == asdict(keys)
            assert_same(source, tmp_path / f"{number}-hf")

    def test_names_of_transformer_engine_and_of_grouped_products(self, source: Path) -> None:
        shape = read_shape(source)
        keys = Keys("te", stacked=False)
        found = {keys.place(piece, shape).key for unit in units_of(shape) for piece in unit}
        first = {key.removeprefix("decoder.layers.0.") for key in found if key.startswith("decoder.layers.0.")}
        up, down = ("self_attention.linear_q_up_proj", "self_attention.linear_kv_up_proj"), ("q", "kv")
        assert first == {
            *(f"{name}.{part}" for name in (*up, "mlp.linear_fc1") for part in ("weight", "layer_norm_weight")),
            *(f"self_attention.linear_{name}_down_proj.weight" for name in down),
            *("input_layernorm.weight", "self_attention.linear_proj.weight", "mlp.linear_fc2.weight"),
        }
        experts = "mlp.experts.experts.linear_fc1.weight"
        assert {f"decoder.layers.1.{name}" for name in ("pre_mlp_layernorm.weight", experts)} <= found
        names = [name for rule in rules_of(shape) for name in rule.megatron]
        assert {f"decoder.layers.{{layer}}.mlp.experts.linear_fc{n}.weight{{expert}}" for n in (1, 2)} <= set(names)


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], file: str) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


def edit_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


NAME = "model.layers.2.mlp.experts.5.down_proj.weight"
UNKNOWN = "model.layers.4.mlp.up_proj.weight"


def file_of(folder: Path, name: str = NAME) -> str:
    return json.loads((folder / INDEX).read_text())["weight_map"][name]


def truncate(folder: Path) -> None:
    with (folder / "model-1.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 100)


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated file": (truncate, "model-1.safetensors cannot be read"),
    "missing index entry": (
        lambda f: edit_index(f, lambda w: w.pop(NAME)),
        f"hold {NAME}, which {INDEX} does not name",
    ),
    "index entry of another file": (
        lambda f: edit_index(f, lambda w: w.update({NAME: f"model-{(int(w[NAME][6]) + 1) % 3}.safetensors"})),
        f"names {NAME}",
    ),
    "missing tensor": (
        lambda f: (edit_tensors(f, lambda t: t.pop(NAME), file_of(f)), edit_index(f, lambda w: w.pop(NAME))),
        f"1 tensors missing: {NAME}",
    ),
    "unknown tensor": (
        lambda f: (
            edit_tensors(f, lambda t: t.update({UNKNOWN: torch.ones(2)}), "model-0.safetensors"),
            edit_index(f, lambda w: w.update({UNKNOWN: "model-0.safetensors"})),
        ),
        f"1 tensors unknown: {UNKNOWN}",
    ),
    "transposed tensor": (
        lambda f: edit_tensors(f, lambda t: t.update({NAME: t[NAME].T.contiguous()}), file_of(f)),
        rf"1 tensors of another shape: {NAME} \(16, 32\) \(expected \(32, 16\)\)",
    ),
    "two dtypes in one parameter": (
        lambda f: edit_tensors(
            f,
            lambda t: t.update({n: x.half() for n, x in t.items() if n.endswith("layers.0.mlp.up_proj.weight")}),
            file_of(f, "model.layers.0.mlp.up_proj.weight"),
        ),
        "are one parameter, but have dtypes",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_source_is_named_and_nothing_is_written(what: str, copy: Path, tmp_path: Path) -> None:
    spoil, says = BROKEN[what]
    spoil(copy)
    with pytest.raises(CheckpointError, match=says):
        to_megatron(copy, tmp_path / "out", LOCAL)
    assert not (tmp_path / "out").exists()


def cut(folder: Path) -> None:
    with (folder / "__2_0.distcp").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 1)


def in_metadata(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Change what the metadata of a checkpoint say of its tensors."""

    def edit(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata.state_dict_metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return edit


EXPERTS = "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"
PREDICTION = "mtp.layers.0.eh_proj.weight"
add_prediction = in_metadata(lambda known: known.update({PREDICTION: known["decoder.final_layernorm.weight"]}))
DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (cut, "cannot be read .*the file is damaged"),
    "missing": (lambda folder: (folder / "__2_0.distcp").unlink(), "lacks __2_0.distcp"),
    "other metadata": (lambda folder: (folder / ".metadata").write_bytes(b"garbage"), r"\.metadata cannot be read"),
    "no metadata": (lambda folder: (folder / ".metadata").unlink(), r"holds no metadata\.json and \.metadata"),
    "other common state": (lambda f: (f / "common.pt").write_bytes(b"garbage"), r"common\.pt cannot be read"),
    "no router": (
        in_metadata(lambda known: known.pop("decoder.layers.1.mlp.router.weight")),
        "1 tensors missing: decoder.layers.1.mlp.router.weight",
    ),
    "no last expert": (
        in_metadata(lambda known: known[EXPERTS].chunks.pop()),
        f"the chunks of {EXPERTS} do not cover",
    ),
    "unknown tensor": (add_prediction, f"1 tensors unknown: {PREDICTION}"),
}


@pytest.fixture
def converted(source: Path, tmp_path: Path) -> Path:
    to_megatron(source, tmp_path / "megatron", LOCAL)
    (tmp_path / "megatron" / MANIFEST).unlink()  # its checksums would notice first
    return tmp_path / "megatron"


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_of_a_megatron_source_is_named_and_nothing_is_written(damage: str, converted: Path) -> None:
    spoil, says = DAMAGED[damage]
    spoil(converted)
    with pytest.raises(CheckpointError, match=says):
        to_hf(converted, converted.with_name("out"), None, Options())
    assert not converted.with_name("out").exists()


def test_what_the_model_has_not_may_be_left_out_by_name(copy: Path, converted: Path, tmp_path: Path) -> None:
    """And optimizer states are no weights."""
    BROKEN["unknown tensor"][0](copy)
    done = to_megatron(copy, tmp_path / "out", Options(layers="local", drop=("model.layers.4.*",)))
    assert done["dropped"] == json.loads((tmp_path / "out" / MANIFEST).read_text())["dropped"] == [UNKNOWN]
    add_prediction(converted)
    in_metadata(lambda known: known.update({"optimizer.state.x": known["output_layer.weight"]}))(converted)
    assert to_hf(converted, tmp_path / "back", None, Options(drop=("mtp.*",)))["dropped"] == [PREDICTION]


def test_a_flipped_bit_is_found_by_the_checksums(source: Path, tmp_path: Path) -> None:
    to_megatron(source, tmp_path / "megatron", LOCAL)
    file = tmp_path / "megatron" / "__3_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"__3_0\.distcp is not the file that was written"):
        to_hf(tmp_path / "megatron", tmp_path / "back", None, Options())
    assert not (tmp_path / "back").exists()


def test_a_wrong_map_is_found_by_the_verification(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swapped(tensors: Any, rank: int, size: int, shape: Any) -> torch.Tensor:
        return torch.cat([tensors[1], tensors[0]])

    layouts = {**LAYOUTS, "gate_up": Layout(swapped, LAYOUTS["gate_up"].join)}
    monkeypatch.setattr("megarl.convert.conversion.LAYOUTS", layouts)
    with pytest.raises(CheckpointError, match=r"gate_proj.weight.*came out different"):
        to_megatron(source, tmp_path / "out", LOCAL)
    assert not (tmp_path / "out").exists()


class TestInterruptions:
    def killed(self, source: Path, out: Path, *words: str) -> None:
        """Convert in another process that is killed when a file is written."""
        code = "import sys; from megarl import cli; sys.exit(cli.main(['convert', *sys.argv[1:]]))"
        slow = "import os, time; from megarl.convert import conversion; real = conversion.write_file\n"
        slow += "def write(*given): time.sleep(0.5); return real(*given)\nconversion.write_file = write\n"
        command = [sys.executable, "-c", slow + code, str(source), str(out), "--layers", "local", *words]
        process = preloaded.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 900
        while not list(out.with_name(out.name + ".partial").glob("*.distcp")):
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def test_a_kill_leaves_what_was_there_and_the_next_start_begins_anew(self, source: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        self.killed(source, out)
        assert not out.exists()
        to_megatron(source, out, LOCAL)
        assert not out.with_name("out.partial").exists()
        assert sorted(entry.name for entry in out.iterdir() if entry.name.startswith(".")) == [MARK, ".metadata"]
        to_hf(out, tmp_path / "back", None, Options())
        assert_same(source, tmp_path / "back")
        before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
        self.killed(source, out, "--overwrite", "--dtype", "bf16")
        assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
        to_megatron(source, out, Options(dtype=torch.bfloat16, layers="local", overwrite=True))
        (piece, *_), *_ = units_of(read_shape(source))
        assert MegatronCheckpoint(out, read_shape(source)).read(piece).dtype == torch.bfloat16


@pytest.mark.parametrize("before", ["nothing", "old"])
def test_a_full_disk_leaves_what_was_there(
    before: str, source: Path, disk: Callable[[int | None], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = disk(None) / "out"
    if before == "old":
        to_megatron(source, out, LOCAL)
    disk(256 << 10)
    held = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    words = ["convert", str(source), str(out), "--layers", "local", "--overwrite"]
    assert cli.main(words) == 2
    assert "cannot be written" in (told := capsys.readouterr().err)
    assert "Traceback" not in told
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == held
    assert out.exists() == (before == "old")
    disk(None)
    assert cli.main(words) == 0
    to_hf(out, tmp_path / "back", None, Options())
    assert_same(source, tmp_path / "back")
    shutil.copytree(out, tmp_path / "megatron")
    assert cli.main(["convert", str(tmp_path / "megatron"), str(disk(256 << 10) / "full")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow
def test_memory_is_bounded_by_one_parameter(tmp_path: Path) -> None:
    """300 MB go through a process that needs less than 120 MB more than for a tiny model."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 768, "num_experts": 16, "mlp_only_layers": []}
    peaks = []
    for name, more in (("small", {}), ("large", sizes)):
        folder, megatron = write_family(tmp_path / name, "qwen3_moe", **more), tmp_path / f"{name}-megatron"
        tensors = safetensors_of(folder)
        (folder / "model.safetensors").unlink()
        for start in range(8):  # as large checkpoints come: in several files
            part = {name: tensors[name].clone() for name in sorted(tensors)[start::8]}
            save_file(part, folder / f"model-{start}.safetensors")
        peaks.append((peak_of(folder, megatron), peak_of(megatron, tmp_path / f"{name}-back")))
    assert sum(tensor.nbytes for tensor in tensors.values()) > 250e6
    assert all(large - small < 120e6 for small, large in zip(*peaks, strict=True))


WATCHED = """
import sys, threading, time
peak = 0
def watch():
    global peak
    while True:
        line = next(l for l in open('/proc/self/status') if l.startswith('RssAnon'))
        peak = max(peak, int(line.split()[1]) * 1024)
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
from megarl import cli
assert cli.main(['convert', *sys.argv[1:], '--layers', 'local', '--shard-gib', '0.03']) == 0
print('peak', peak)
"""


def peak_of(source: Path, out: Path) -> int:
    """Peak of the memory that a conversion has for itself (anonymous pages), in bytes."""
    # What is freed goes back at once: holes that malloc keeps differ from run to run.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    command = [sys.executable, "-c", WATCHED, str(source), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout.split("peak ")[-1])


class TestCommand:
    def run(self, *words: Any) -> int:
        return cli.main(["convert", *map(str, words)])

    def test_checkpoints_of_runs_and_of_megatron_lm_are_found(self, source: Path, tmp_path: Path) -> None:
        run, lm = tmp_path / "run" / "checkpoints", tmp_path / "lm"
        for folder in (run / "step_0000002", run / "step_0000010", lm / "iter_0000007", lm / "iter_0000005"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            assert self.run(source, folder, "--layers", "local") == 0
        (lm / "latest_checkpointed_iteration.txt").write_text("7\n")
        shutil.rmtree(run / "step_0000002" / HF_FOLDER)
        shutil.rmtree(lm / "iter_0000005" / HF_FOLDER)
        for found in (run.parent, run, lm):
            assert self.run(found, tmp_path / "back", "--overwrite") == 0
            assert_same(source, tmp_path / "back")

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (["{source}", "{tmp}/out", "--model", "{source}"], "--model belongs to a Megatron source"),
            (["{source}", "{tmp}/out", "--shard-gib", "0"], "--shard-gib: found"),
        ],
    )
    def test_wrong_requests_are_one_line(
        self, words: list[str], says: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(*(word.format(source=source, tmp=tmp_path) for word in words)) == 2
        told = capsys.readouterr().err
        assert says in told
        assert "Traceback" not in told


class TestWhatMustNotBeLost:
    def test_a_source_that_is_called_like_the_unfinished_folder(self, copy: Path, tmp_path: Path) -> None:
        partial = copy.rename(tmp_path / "out.partial")
        with pytest.raises(ConfigError, match="would replace its own source"):
            to_megatron(partial, tmp_path / "out", LOCAL)
        assert (partial / "config.json").is_file()
        assert len(list(partial.glob("*.safetensors"))) == 3

    @pytest.mark.parametrize("out", ["run/checkpoints/step_0000001", "run/checkpoints", "model"])
    def test_the_checkpoint_behind_a_run_and_its_model(self, out: str, source: Path, tmp_path: Path) -> None:
        step = tmp_path / "run" / "checkpoints" / "step_0000001"
        step.parent.mkdir(parents=True)
        to_megatron(source, step, LOCAL)
        model = shutil.copytree(source, tmp_path / "model")
        with pytest.raises(ConfigError, match="would replace its own source"):
            to_hf(tmp_path / "run", tmp_path / out, model, Options(overwrite=True))
        assert (step / ".metadata").is_file()
        assert (model / "config.json").is_file()

    def test_unfinished_steps_are_no_checkpoints(self, source: Path, tmp_path: Path) -> None:
        for name in ("step_0000002", "step_0000010.partial", "step_0000010.old"):
            (tmp_path / name).mkdir()
        assert torch_dist_folder(tmp_path) == tmp_path / "step_0000002"

    def test_what_appears_meanwhile(self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "there").mkdir()
        (tmp_path / "there" / "precious").touch()
        monkeypatch.setattr("megarl.files.outputs.sync_all", lambda _: (tmp_path / "there").rename(tmp_path / "out"))
        with pytest.raises(CheckpointError, match="has appeared meanwhile"):
            to_megatron(source, tmp_path / "out", LOCAL)
        assert (tmp_path / "out" / "precious").is_file()

    def test_a_link_stays_one(self, source: Path, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "out").symlink_to(tmp_path / "real")
        to_megatron(source, tmp_path / "out", Options(layers="local", overwrite=True))
        assert (tmp_path / "out").is_symlink()
        assert (tmp_path / "real" / ".metadata").is_file()

    def test_values_that_the_dtype_cannot_hold(self, copy: Path, tmp_path: Path) -> None:
        name = "model.norm.weight"
        edit_tensors(copy, lambda t: t[name].fill_(1e5), file_of(copy, name))
        with pytest.raises(NumericsError, match=r"model\.norm\.weight has values up to 100000"):
            to_megatron(copy, tmp_path / "out", Options(dtype=torch.float16, layers="local"))


HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}


class TestOtherModels:
    """Shapes alone do not tell four heads of width eight from eight of width four."""

    @pytest.mark.parametrize(
        ("said", "changes", "found"),
        [
            ("loop", HEADS, "num_attention_heads|kv_channels"),
            ("args", HEADS, "num_attention_heads|kv_channels"),
            ("loop", {"vocab_size": 20}, "vocab_size"),
        ],
    )
    def test_what_the_checkpoint_says_of_its_model(
        self, said: str, changes: dict[str, Any], found: str, tmp_path: Path
    ) -> None:
        source, other = write_family(tmp_path / "a", "mixtral"), write_family(tmp_path / "b", "mixtral", **changes)
        to_megatron(source, tmp_path / "megatron", LOCAL)
        if said == "args":
            common = torch.load(tmp_path / "megatron" / "common.pt", weights_only=False)
            del common["loop"]
            torch.save(common, tmp_path / "megatron" / "common.pt")
        with pytest.raises(CheckpointError, match=rf"is of another model: ({found})"):
            to_hf(tmp_path / "megatron", tmp_path / "out", other, Options())

    def test_copies_that_say_nothing_new(self, tmp_path: Path) -> None:
        source = write_family(tmp_path / "model", "qwen3")  # its embedding is tied
        file = source / "model.safetensors"
        tensors = load_file(file)
        copies = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        copies["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        save_file(tensors | copies, file)
        to_megatron(source, tmp_path / "out", LOCAL)
        copies["lm_head.weight"] += 1
        save_file(tensors | copies, file)
        with pytest.raises(CheckpointError, match=r"1 tensors unknown: lm_head\.weight.*--drop"):
            to_megatron(source, tmp_path / "other", LOCAL)
