"""What lies in a Hugging Face folder, read without torch: its config.json and the files of its weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; CheckpointError if there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return found


def weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files of a model's weights, and the index's table of tensor and file name; None without an index.

    transformers reads model.safetensors, else the files of the index, else pytorch_model.bin. SGLang reads the files of
    the index, else every *.safetensors. CheckpointError, saying what lies there, where the two would read different
    weights, and for files that are absent.
    """
    index, single, present = folder / INDEX, folder / SINGLE, sorted(folder.glob("[!.]*.safetensors"))
    hf = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if hf.get("transformers_weights"):
        raise CheckpointError(
            f"{folder}/config.json: transformers_weights is {hf['transformers_weights']!r}, a file that transformers "
            f"reads and SGLang does not; remove the key, and call the file {SINGLE}"
        )
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{folder} holds adapter_config.json: transformers applies the adapter where peft is installed, SGLang "
            "does not; merge it into the weights, or move it away"
        )
    if not index.is_file():
        if not present:
            raise CheckpointError(f"{folder} has no *.safetensors{_others(folder)}")
        torch_files = [file.name for file in folder.glob("pytorch_model.bin*")]
        if not single.is_file() and torch_files:
            raise CheckpointError(
                f"{folder} holds {some([file.name for file in present])} without {INDEX}, which SGLang reads, and "
                f"{some(torch_files)}, which transformers reads; remove what is not the model"
            )
        return [single] if single.is_file() else present, None
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise CheckpointError(f"{index} cannot be read: weight_map is no table of names and files")
    if outside := [name for name in listed.values() if Path(name).name != name]:
        raise CheckpointError(f"{index} names {some(outside)}, expected files beside it: SGLang reads no others")
    files = sorted({folder / name for name in listed.values()})
    if absent := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{folder}: {INDEX} names {some(absent)}, which are not there; download the rest")
    if single.is_file() and files != [single]:
        shards = some([file.name for file in files])
        raise CheckpointError(
            f"{folder} holds {SINGLE}, which transformers reads, and {INDEX} with {shards}, which SGLang reads: which "
            "of them is the model cannot be told; move the other one away"
        )
    return files, listed


def _others(folder: Path) -> str:
    """What a folder holds instead, where other tools keep weights."""
    ends = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
    names = [file.name for file in folder.glob("*") if file.suffix in ends]
    names += [f"{name}/" for name in ("original",) if (folder / name).is_dir()]
    advice = "; have transformers load it and save_pretrained() write safetensors" if names else ""
    return f", but {some(names)}{advice}" if names else ", expected a Hugging Face checkpoint folder"


def some(names: Sequence[str]) -> str:
    """The first three names of a list that may be long, and how many more there are."""
    first = ", ".join(sorted(set(names))[:3])
    return first if len(set(names)) <= 3 else f"{first} and {len(set(names)) - 3} more"
