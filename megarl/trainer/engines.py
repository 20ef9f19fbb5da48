"""Builds the sampling engine of a configuration."""

import os
import secrets
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.config import Config
from megarl.config.addresses import url_host
from megarl.config.plugs import ENGINES, load_plug
from megarl.core.choices.records import call_own
from megarl.engines.local.engine import LocalEngine
from megarl.engines.protocol import Engine
from megarl.engines.sglang.engine import SGLangEngine
from megarl.engines.sglang.fleet import Fleet
from megarl.engines.sglang.http import key_named
from megarl.engines.sglang.spec import SERVER_DTYPES, ServerSpec
from megarl.engines.sglang.transports.broadcast import Broadcast, own_address
from megarl.engines.sglang.transports.folder import Disk, write_empty_model
from megarl.engines.sglang.transports.ipc import Helper, SharedMemory
from megarl.engines.sglang.transports.protocol import Tensors, Transport
from megarl.engines.weights import FP8Form, WeightForm, checkpoint_shapes, read_model_config
from megarl.errors import ConfigError, RolloutError, printable, refusal, some
from megarl.files.hf_config import find_quantization
from megarl.files.writing import find_tokenizer_code
from megarl.megatron import distributed
from megarl.megatron.policy import DTYPES
from megarl.models.fit import servers_record
from megarl.models.hf_folder import read_json
from megarl.models.names import hf_shapes
from megarl.models.shapes import read_shape


def make_engine(config: Config, tell: Callable[[str], None]) -> Engine:
    """Return an engine without weights; a collective call. ``tell`` prints a line about the servers of this rank.

    ConfigError if a factory of the user makes something else.
    """
    factory = load_factory(config)
    if config.rollout.engine in ENGINES:
        return factory(config, tell)
    engine = call_own(f'rollout.engine "{config.rollout.engine}"', factory, config, tell)
    if not callable(getattr(engine, "update_weights", None)):
        raise ConfigError(refusal("factory_of_engine", config=config, kind=type(engine).__name__))
    return engine


def load_factory(config: Config) -> Callable[..., Any]:
    """Return the factory of the engine; ConfigError if it cannot be imported, or for tensors unlike the trainer's."""
    if config.rollout.engine in ENGINES:
        built, megatron = checkpoint_shapes(config.model.path), hf_shapes(read_shape(config.model.path))
        if other := [name for name in built.keys() | megatron if built.get(name) != megatron.get(name)]:
            pairs = [f"{n} {built.get(n, 'absent')} (Megatron's {megatron.get(n, 'absent')})" for n in other]
            raise ConfigError(f"model.path: transformers builds another model of config.json: {some(pairs)}")
    factory = config.rollout.engine_kind.factory
    if isinstance(factory, str):
        factory = load_plug(f'rollout.engine "{config.rollout.engine}": factory', factory)
    return factory


def make_local_engine(config: Config, tell: Callable[[str], None]) -> LocalEngine:
    """Return the engine on transformers, in this process."""
    device, model = "cuda" if torch.cuda.is_available() else "cpu", read_model_config(config.model.path)
    options = config.rollout.model_dump(include={"fp8_rounding", "fp8_activations", "fp8_kv_cache", "max_batch_size"})
    return LocalEngine(model, dtype=DTYPES[config.rollout.dtype], device=device, **options)


def make_sglang_engine(config: Config, tell: Callable[[str], None]) -> SGLangEngine:
    """Return the engine on SGLang servers.

    The first rank of each node starts the node's servers. With ``sglang.urls``, the main rank connects to running
    servers.
    """
    settings, key = config.sglang, _api_key(config)
    transport = make_transport(config)
    fleet, urls = _start_servers(config, key, transport, tell)
    helper = None
    if fleet is None and isinstance(transport, SharedMemory) and transport.gpu in settings.gpus:
        helper = Helper(transport, Path(config.model.path))
    fp8: FP8Form = "blocks" if settings.fp8 else "rounded" if config.rollout.fp8_rounding else "off"
    agree = partial(distributed.fail_together, action="the weight update")
    options: Any = {"fleet": fleet, "helper": helper, "agree": agree, "settings": settings, "api_key": key}
    options |= {"form": WeightForm(DTYPES[config.rollout.dtype], fp8), "reread": config.rollout.reread, "tell": tell}
    return SGLangEngine(urls, read_json(Path(config.model.path) / "config.json"), **options)


def _api_key(config: Config) -> str | None:
    """Return the key of the user's variable, or a new key for servers that are started here; a collective call."""
    if config.sglang.urls or config.sglang.api_key_env is not None:
        return key_named(config.sglang.api_key_env)
    return distributed.from_main_rank(lambda: secrets.token_hex(16))


def make_transport(config: Config) -> Transport:
    """Return how weights travel from this node's ranks to its servers; a collective call.

    ConfigError if the servers open the trainer's memory, and a server's GPU has no rank of the trainer.
    """
    if config.weight_sync != "ipc":
        return {"distributed": Broadcast, "disk": Disk, "tensor": Tensors}[config.weight_sync]()
    gpus = config.sglang.gpus
    if not gpus:
        return SharedMemory()  # the first rank alone, in memory of the host
    local_ranks, leaders = distributed.gather_objects(distributed.local_rank()), distributed.node_leaders()
    transport = SharedMemory(gpus, distributed.local_rank())
    for start, end in zip(leaders, [*leaders[1:], len(local_ranks)], strict=True):
        on_node = local_ranks[start:end]
        if missing := sorted({*gpus} - {*on_node}):
            raise ConfigError(refusal("gpus_without_rank", missing=missing, ranks=len(on_node), gpus=gpus))
        members = [rank for rank in range(start, end) if local_ranks[rank] in (0, *gpus)]
        group = dist.new_group(members, timeout=timedelta(seconds=config.collective_timeout_s), backend="gloo")
        if isinstance(group, dist.ProcessGroup):  # ranks outside of the group get a number
            transport.gather = partial(distributed.gather_objects, group=group)
    return transport


def _start_servers(
    config: Config, key: str | None, transport: Transport, tell: Callable[[str], None]
) -> tuple[Fleet | None, list[str]]:
    """Return the servers of this rank's node, on the rank that started the servers, and all URLs; a collective call."""
    settings = config.sglang
    nodes = [0] if settings.urls else distributed.node_leaders()
    host = settings.host or (_find_host(nodes) if len(nodes) > 1 else "127.0.0.1")
    fleet: Fleet | None = None
    urls: list[str] = []
    failure: Exception | None = None
    if dist.get_rank() in nodes:
        try:
            fleet = _make_fleet(config, key, nodes, host, transport, tell)
            if fleet.specs:
                logs = ", ".join(str(spec.log_file) for spec in fleet.specs)
                tell(f"starting SGLang; what it prints is in {logs}")
            urls = fleet.start(is_only=len(nodes) == 1)
            failure = fleet.failure
        except Exception as error:  # send the error to the ranks that wait for the URLs
            failure = error
    by_rank = distributed.gather_objects((urls, failure))
    failures = [error for _, error in by_rank if error is not None]
    fatal = [error for error in failures if not isinstance(error, RolloutError)]
    if fatal or len(failures) == len(nodes):
        if fleet is not None:
            fleet.close()
        raise (fatal or failures)[0]
    return fleet, [url for of_rank, _ in by_rank for url in of_rank]


def _find_host(nodes: Sequence[int]) -> str:
    """Return the address of this rank's node as seen from other nodes; a collective call."""
    address = own_address(f"tcp://{url_host(os.environ['MASTER_ADDR'])}")
    addresses = distributed.gather_objects(address)
    # On the master node, the master's name may resolve to the loopback address: ask for the way to another node.
    return address if dist.get_rank() != nodes[0] else own_address(f"tcp://{url_host(addresses[nodes[1]])}")


def _make_fleet(
    config: Config, key: str | None, nodes: Sequence[int], host: str, transport: Transport, tell: Callable[[str], None]
) -> Fleet:
    """Return the servers of this rank's node. They write below run.dir, with several nodes in a folder per node."""
    settings = config.sglang
    folder = config.run_dir / "sglang"
    if len(nodes) > 1:
        node = nodes.index(dist.get_rank())
        folder = folder / f"node{node}"
        tell = tell if node == 0 else lambda line: print(printable(f"node {node}: {line}"), file=sys.stderr, flush=True)
    copies = folder / "spare" if settings.spare_weights == "disk" else settings.spare_weights
    copies = folder / "weights" if isinstance(transport, Disk) else copies
    specs = [] if settings.urls else server_specs(config, host, key, folder)
    options: Any = {"settings": settings, "api_key": key, "routes": servers_record(config), "copies": copies}
    options |= {"nucleus": config.rollout.top_p < 1, "source": Path(config.model.path), "tell": tell}
    return Fleet(specs=specs, urls=settings.urls, served=_served_model(config, folder), transport=transport, **options)


def server_specs(config: Config, host: str, key: str | None, folder: Path) -> list[ServerSpec]:
    """Return the ``sglang.servers`` servers of one node, on free ports, with logs in ``folder``."""
    settings, model = config.sglang, _served_model(config, folder)
    folder.mkdir(parents=True, exist_ok=True)
    options: Any = settings.model_dump(include={"python", "tp", "mem_fraction", "max_total_tokens"})
    options |= {"dtype": SERVER_DTYPES[config.rollout.dtype], "host": host, "api_key": key}
    options |= {"routes": servers_record(config)}
    return [
        ServerSpec(
            model_path=model,
            **options,
            gpus=tuple(settings.gpus[index * settings.tp : (index + 1) * settings.tp]) or None,
            log_file=folder / f"server{index}.log",
            extra_args=(
                *(["--trust-remote-code"] if config.model.trust_remote_code and find_tokenizer_code(model) else []),
                *(["--load-format", "dummy"] if model != Path(config.model.path) else []),
                *(["--enable-return-indexer-topk"] if config.train.replay_indexer else []),
                *(["--enable-memory-saver"] if settings.release_memory and settings.gpus else []),
                *settings.arguments,
            ),
        )
        for index in range(settings.servers)
    ]


def _served_model(config: Config, folder: Path) -> Path:
    """Return the model folder for servers: model.path, or a folder without weights before the first update.

    Servers cannot load model.path if only the trainer or only the servers use FP8, or without weights.
    """
    source = Path(config.model.path)
    if not (source / "config.json").is_file():  # not on this machine
        return source
    is_quantized = find_quantization(read_json(source / "config.json")) is not None
    if config.sglang.fp8 or is_quantized or not any(source.glob("*.safetensors")):
        return write_empty_model(source, folder / "model", config.sglang.fp8)
    return source
