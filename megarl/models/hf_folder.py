"""config.json and the files of weights in a Hugging Face folder, without torch."""

import os
from pathlib import Path
from typing import Any

from megarl.errors import CheckpointError, DataError, reworded, some
from megarl.files.foreign_json import is_file_name, read_object, require_regular

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. CheckpointError for a missing or damaged file."""
    with reworded(DataError, CheckpointError, suffix="; download it again"):
        return read_object(path)


def weight_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Return (files of the weights, the index's table of tensor -> file name; None without an index).

    transformers reads model.safetensors, or the files of the index, or pytorch_model.bin. SGLang reads the files of the
    index, or every *.safetensors. CheckpointError, naming the files, if the two would read different weights, and for
    absent files.
    """
    index, single, present = folder / INDEX, folder / SINGLE, sorted(folder.glob("[!.]*.safetensors"))
    with reworded(DataError, CheckpointError):
        for file in (*present, index, folder / "config.json"):
            require_regular(file)
    hf = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    listed = read_json(index).get("weight_map") if index.is_file() else None
    if index.is_file() and not (isinstance(listed, dict) and listed and all(map(is_file_name, listed.values()))):
        raise CheckpointError(f"{index} cannot be read: expected weight_map, a table of names and files beside it")
    files = [single] if single.is_file() else present
    if listed is not None:
        files = sorted({folder / name for name in listed.values()})
    names = some([file.name for file in files])
    if hf.get("transformers_weights"):
        fault = f"has transformers_weights in config.json, a file for transformers alone; call it {SINGLE}"
    elif (folder / "adapter_config.json").is_file():
        fault = "holds adapter_config.json: transformers with peft applies the adapter, SGLang does not; merge it"
    elif not files:
        fault = "has no *.safetensors; download the weights, or have transformers load and save_pretrained() others"
    elif absent := [file.name for file in files if not os.path.isfile(file)]:
        fault = f"has an {INDEX} that names {some(absent)}, which are not there; download the rest"
    elif single.is_file() and files != [single]:
        fault = f"holds {SINGLE}, which transformers reads, and {INDEX} with {names}, which SGLang reads; move one away"
    elif listed is None and not single.is_file() and any(folder.glob("pytorch_model.bin*")):
        fault = f"holds {names} without {INDEX}, which SGLang reads, and pytorch_model.bin, which transformers reads"
    else:
        return files, listed
    raise CheckpointError(f"{folder} {fault}")
