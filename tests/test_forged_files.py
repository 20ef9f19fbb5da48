"""Files that a stranger has forged: each command ends with one line and exit code 2, soon, and within 4 GB of memory.

A table of (what is forged, how, what the line says) is crossed with the commands that read such a file. Each runs in a
process with the kernel's limits on memory and processor time, so that nothing can hang or fill the machine.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch

from megarl.models.hf_folder import INDEX, SINGLE

TRAIN, PLAN, DOCTOR, CONVERT = "train run.toml", "plan run.toml", "doctor run.toml", "convert model out"
QUANTIZE, TRACE, DATA = "quantize model out", "trace inspect a.safetensors", "eval run.toml --data task/heldout.jsonl"
LIMITED = """
import resource, sys
from pathlib import Path
from megarl import cli

pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (4 << 30),) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
sys.exit(cli.main(sys.argv[1:]))
"""


def run(command: str) -> tuple[int, str]:
    """(exit code, what was printed) of a command in a process that the kernel limits."""
    words = [sys.executable, "-c", LIMITED, *command.split()]
    done = preloaded.run(words, stderr=subprocess.STDOUT, timeout=500)  # what waits takes no processor time
    return done.returncode, done.stdout


def check(command: str, expected: str) -> None:
    code, said = run(command)
    assert code == 2 or (command == DOCTOR and code == 1), (code, said)
    lines = [line for line in said.splitlines() if "megarl: error: " in line or command == DOCTOR]
    assert expected in " ".join("\n".join(lines).split()), said
    assert "raceback" not in said
    if command != DOCTOR:
        assert len(lines) == 1


def key(name: str, value: Any) -> Callable[[], object]:
    """Set a key of config.json."""

    def change() -> None:
        path = Path("model/config.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

    return change


def replace(name: str, make: Callable[[Path], object]) -> Callable[[], object]:
    """Make something else in place of a file."""

    def change() -> None:
        path = Path(name)
        path.unlink(missing_ok=True)
        make(path)

    return change


def text(content: str | bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content.encode())


def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def index(listed: Any) -> Callable[[], object]:
    return replace(f"model/{INDEX}", text(json.dumps({"weight_map": listed})))


def header(table: Any, length: int | None = None, data: bytes = b"") -> Callable[[], object]:
    """The weights as a safetensors file with this header."""
    content = table if isinstance(table, bytes) else json.dumps(table).encode()
    size = len(content) if length is None else length
    return replace(f"model/{SINGLE}", text(size.to_bytes(8, "little") + content + data))


def tensor(begin: int, end: int, shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


DEEP = "[" * 100_000
FILES = {"a FIFO": os.mkfifo, "a socket": listen, "a device": lambda path: path.symlink_to("/dev/zero")}
# test_hf_config gives every key of every family other values; these would cost memory or time, or are of two keys.
NUMBERS: dict[str, tuple[str, Any, str]] = {
    "1e9 layers": ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000, expected an integer from 1 to 1024"),
    "1e400 layers": ("num_hidden_layers", 10**400, "num_hidden_layers is 1000000"),
    "an infinite base": ("rope_theta", float("inf"), "rope_theta is inf"),
    "two names, two types": ("num_experts", 4.0, "num_local_experts is 4 and num_experts 4.0, expected one value"),
    "layers that are not there": ("mlp_only_layers", [7], "mlp_only_layers is [7], expected some of layers 0 to 0"),
    "a type that is a list": ("model_type", ["qwen3_moe"], "is not supported"),
    "blocks of no rows": ("quantization_config", {"quant_method": "fp8", "weight_block_size": [0, 1]}, "with blocks"),
}
NAMED = "expected weight_map, a table of names and files beside it"
FORGED: dict[str, tuple[Callable[[], object], tuple[str, ...], str]] = {
    **{name: (key(k, value), (PLAN,), told) for name, (k, value, told) in NUMBERS.items()},
    **{
        f"{name} as {kind}": (replace(name, make), commands, "device or broken link, expected a regular file")
        for kind, make in FILES.items()
        for name, commands in {
            "model/config.json": (PLAN, TRAIN, CONVERT),
            f"model/{SINGLE}": (CONVERT, TRAIN, QUANTIZE),
            f"model/{INDEX}": (CONVERT,),
            "model/other.safetensors": (CONVERT,),
            "model/tokenizer.json": (TRAIN,),
            "task/train.jsonl": (TRAIN,),
            "run.toml": (PLAN,),
            "a.safetensors": (TRACE,),
        }.items()
    },
    **{
        f"{name} nested deeply": (replace(name, text(DEEP)), commands, "levels of lists and objects")
        for name, commands in {
            "model/config.json": (PLAN, CONVERT),
            f"model/{INDEX}": (CONVERT,),
            "model/tokenizer.json": (TRAIN,),
            "task/train.jsonl": (TRAIN,),
        }.items()
    },
    "a config.json of 100 MB": (replace("model/config.json", text(b" " * 10**8)), (PLAN,), "expected at most"),
    "an index of numbers": (index({"a": 1}), (CONVERT,), NAMED),
    "an index of a path above": (index({"a": "../x.safetensors"}), (CONVERT,), NAMED),
    "a header of 2**60 bytes": (header(b"{}", 2**60), (CONVERT,), "truncated, or no safetensors file"),
    "tensors that overlap": (header({"a": tensor(0, 8), "b": tensor(4, 12)}, data=bytes(12)), (CONVERT,), "truncated"),
    "an end of text": (replace("model/generation_config.json", text('{"eos_token_id": ["x"]}')), (TRAIN,), "is ['x']"),
    "a side file that links out": (
        replace("model/notes.txt", lambda path: path.symlink_to("/etc/passwd")),
        (CONVERT, TRAIN, DOCTOR, QUANTIZE),
        "notes.txt is a link to /etc/passwd, outside of its folder",
    ),
    "a long tracker": (replace("model/latest_checkpointed_iteration.txt", text("9" * 10**6)), (CONVERT,), "at most 64"),
}
ROWS = [(name, command) for name, (_, commands, _) in FORGED.items() for command in commands]


@pytest.mark.parametrize(("name", "command"), ROWS)
def test_what_is_forged_costs_one_line(name: str, command: str, here: Path) -> None:
    forge, _, told = FORGED[name]
    forge()
    check(command, told)


def test_links_of_hugging_faces_cache_are_read_and_copied(here: Path) -> None:
    """<cache>/models--a--b/snapshots/<revision>/config.json -> ../../blobs/<digest>."""
    root = here / "cache" / "models--a--b"
    (root / "blobs").mkdir(parents=True)
    snapshot = root / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for number, file in enumerate((here / "model").iterdir()):
        file.rename(root / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    (here / "linked").symlink_to(snapshot)
    for source in (snapshot, here / "linked"):
        out = here / f"of {source.name}".replace(" ", "_")
        assert run(f"convert {source} {out}")[0] == 0
        copied = out / "huggingface" / "tokenizer.json"
        assert copied.read_bytes() == (snapshot / "tokenizer.json").read_bytes()
        assert not copied.is_symlink()


def test_a_folder_that_looks_like_the_cache_leads_nowhere_else(here: Path) -> None:
    """Neither blobs that are a link, nor the folder above."""
    secret = here / "secret"
    secret.mkdir()
    (secret / "key").write_text("secret")
    snapshot = here / "home" / "snapshots" / "0123"
    shutil.copytree(here / "model", snapshot)
    (here / "home" / "blobs").symlink_to(secret)
    for target in ("../../blobs/key", "../../../secret/key"):
        (snapshot / "notes.txt").unlink(missing_ok=True)
        (snapshot / "notes.txt").symlink_to(target)
        check(f"convert {snapshot} out", "secret/key, outside of its folder")
        assert not Path("out").exists()


def test_a_checkpoint_names_no_file_elsewhere_and_is_not_unpacked(here: Path) -> None:
    import pickle

    from megarl.files.pickles import load_metadata

    assert run(CONVERT)[0] == 0
    torch_dist = here / "out"
    (torch_dist / "conversion.json").unlink()  # a stranger writes checksums that fit
    file = torch_dist / ".metadata"
    sound = file.read_bytes()
    whole = load_metadata(torch_dist)
    outside = here / "elsewhere.distcp"
    shutil.copyfile(torch_dist / "__0_0.distcp", outside)
    first = next(iter(whole.storage_data.values()))
    for name in ("../elsewhere.distcp", str(outside), "\ud800", 7):
        before, first.relative_path = first.relative_path, name
        file.write_bytes(pickle.dumps(whole))
        first.relative_path = before
        check("convert out back", "expected a file of the folder itself")
    first.offset = -5
    file.write_bytes(pickle.dumps(whole))
    check("convert out back", "expected bytes")
    # A hundred megabytes from a hundred kilobytes.
    file.write_bytes(sound)
    file = torch_dist / "common.pt"
    torch.save({"loop": {"model": {}}, "x": torch.zeros(25_000_000)}, torch_dist.parent / "plain.pt")
    with (
        zipfile.ZipFile(torch_dist.parent / "plain.pt") as plain,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out,
    ):
        for each in plain.infolist():
            out.writestr(each.filename, plain.read(each))
    assert file.stat().st_size < 1_000_000
    check("convert out back", "compressed, which is no part of a checkpoint")
