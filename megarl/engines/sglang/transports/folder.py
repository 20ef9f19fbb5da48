"""Weights through folders that servers load: the weights of one version, and a model without weights."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from safetensors import SafetensorError

from megarl.core.fp8_names import fp8_config
from megarl.engines.sglang.transports.protocol import Buckets, Delivery, Transport
from megarl.engines.weights import Bucket, Intake, Named
from megarl.errors import ConfigError, WeightSyncError, reworded
from megarl.files.outputs import HF_FILES, begin, marked, remove_own, replace_folder
from megarl.models.hf_files import copy_model_files, save_tensors, write_index
from megarl.models.hf_folder import read_json


class WeightFolder:
    """Writes ``folder/version_<n>``, one shard per bucket; WeightSyncError from any method if the disk refuses.

    When complete, the folder gets its name, and older versions are removed; other files stay. Config and tokenizer
    files are copied from the checkpoint folder ``source``.
    """

    def __init__(self, folder: Path, source: Path, version: int) -> None:
        self._folder, self._source, self._version = folder, source, version
        self._target = folder / f"version_{version:07d}"
        self._part = self._target.with_suffix(".part")
        self._where: dict[str, str] = {}
        self._bytes = 0
        with self._errors():
            begin(self._part, HF_FILES, source)

    def add(self, bucket: Bucket) -> None:
        """Write one more shard."""
        name = f"model-{len({*self._where.values()}):05d}.safetensors"
        host = bucket.on_host()
        with self._errors():
            save_tensors(dict(host.tensors()), self._part / name)
        self._where |= dict.fromkeys(bucket.names, name)
        self._bytes += bucket.flat.numel()

    def finish(self) -> Path:
        """Complete the folder on the first call; return its absolute path."""
        if not self._part.exists():
            return self._target.absolute()
        with self._errors():
            write_index(self._part, self._where, self._bytes)
            quantization = read_json(self._source / "config.json").get("quantization_config")
            copy_model_files(self._source, self._part, None, quantization)
            replace_folder(self._part, self._target)
            for old in self._folder.glob("version_*"):
                if old != self._target:
                    remove_own(old, marked(old))
        return self._target.absolute()

    def _errors(self) -> AbstractContextManager[None]:
        problem = f"{self._folder}: the weights of version {self._version} could not be written ("
        return reworded((OSError, SafetensorError, ConfigError), WeightSyncError, problem, ")")


def write_empty_model(source: Path, folder: Path, fp8: bool) -> Path:
    """Write ``folder``: the model in ``source``, in FP8 or not, without weights; the first update brings the weights.

    ConfigError if the folder holds foreign files.
    """
    begin(folder, HF_FILES, source, keep=["*"])
    copy_model_files(source, folder, None, fp8_config(["lm_head"]) if fp8 else None)
    return folder


class Disk(Transport):
    """The fleet writes its copy of the weights to disk; afterwards all servers load the folder."""

    def stream(self, intake: Intake, tensors: Iterable[Named], delivery: Delivery | None) -> Buckets:
        """Yield the buckets; after the last bucket is written, complete the folder and have the servers load it."""
        yield from super().stream(intake, tensors, delivery)
        assert delivery is not None, "one rank writes the folder, without help"
        assert delivery.folder is not None, "a fleet with this transport keeps its copy on disk"
        delivery.wait()
        path = str(delivery.folder.finish())
        delivery.receivers.each(lambda member: member.sender.load_from_disk(path))

    def send(self, bucket: Bucket, delivery: Delivery) -> None:
        """Do nothing: the fleet has written the bucket."""
