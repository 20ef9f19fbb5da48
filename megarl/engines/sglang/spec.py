"""How one SGLang server is started: settings, command line, environment and secret file."""

import contextlib
import json
import os
import random
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megarl.config.process_environment import LAUNCHER, compile_caches, without_expandable_segments
from megarl.engines.sglang.versions import TABLE, check_arguments, parse_arguments
from megarl.errors import ConfigError, RolloutError

CPU_SHIM = Path(__file__).parent / "cpu"
PLUGIN = Path(__file__).parent / "plugin"
SERVER_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""``rollout.dtype`` in SGLang's words."""
NOT_EXTRA: Mapping[str, str] = TABLE["not_extra"]
"""Arguments that extra_args may not hold, and the remedy."""


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Settings to start a server on this host."""

    model_path: str | Path
    """A local folder in Hugging Face format."""
    python: str | Path
    """Interpreter of the environment with SGLang, usually not megarl's own."""
    dtype: str
    """float32, bfloat16, float16 or auto."""
    log_file: str | Path
    """The server's output is appended here. Only the owner may read the file, because SGLang logs its API key."""
    host: str = "127.0.0.1"
    """Loopback by default: whoever reaches an SGLang server can replace its weights."""
    port: int = 0
    """0 chooses a free port, and a restarted server keeps the port."""
    tp: int = 1
    """Tensor-parallel size."""
    gpus: tuple[int, ...] | None = None
    """A GPU per rank: device indices as nvidia-smi counts them; None serves on the CPU, without CUDA."""
    max_total_tokens: int | None = None
    """Size of the KV cache in tokens; None: SGLang derives the size from mem_fraction."""
    mem_fraction: float | None = None
    """Share of the memory for weights and KV cache; None is 0.1 on a CPU and SGLang's own choice on GPUs."""
    routes: bool = True
    """Whether to record routes; a dense model has none."""
    api_key: str | None = field(default=None, repr=False)
    """Bearer token of every request but the health check."""
    extra_args: tuple[str, ...] = ()
    """More arguments of sglang.launch_server; the last arguments override earlier arguments."""

    def __post_init__(self) -> None:
        for name in parse_arguments(self.extra_args):
            if name in NOT_EXTRA:
                raise ConfigError(f"extra_args hold --{name.replace('_', '-')}: {NOT_EXTRA[name]}")
        check_arguments(self.extra_args, self.routes)


def command(spec: ServerSpec, config_file: Path | None = None) -> list[str]:
    """Return the command line of the server.

    The API key is in ``config_file`` (see ``write_config``): every user of the host could read it among the arguments.
    """
    args = [str(spec.python), "-m", "sglang.launch_server"]
    args += ["--config", str(config_file)] if config_file is not None else []
    args += ["--model-path", str(spec.model_path), "--host", spec.host, "--port", str(spec.port)]
    args += ["--dtype", spec.dtype, "--tp-size", str(spec.tp)]
    args += ["--enable-return-routed-experts"] if spec.routes else []
    # The warm-up sends English text and ends a server whose tokenizer lacks a character. The health check generates
    # from a token id and is as good a test.
    args += ["--skip-server-warmup", "--log-level-http", "warning"]
    if spec.gpus is None:
        args += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        args += ["--grammar-backend", "none"]
        args += ["--sleep-on-idle"]  # else an idle scheduler keeps a core busy
    mem_fraction = 0.1 if spec.mem_fraction is None and spec.gpus is None else spec.mem_fraction
    args += ["--mem-fraction-static", str(mem_fraction)] if mem_fraction is not None else []
    args += ["--max-total-tokens", str(spec.max_total_tokens)] if spec.max_total_tokens is not None else []
    return [*args, *spec.extra_args]


def environment(spec: ServerSpec) -> dict[str, str]:
    """Return the server's environment: this process's without torchrun's ranks, plus variables of the device."""
    env = {name: value for name, value in os.environ.items() if not LAUNCHER.fullmatch(name)}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    env["PYTHONSAFEPATH"] = "1"  # no modules of the current folder
    env |= compile_caches(env)
    # SGLang asserts against the two together.
    env = without_expandable_segments(env) if "enable_memory_saver" in parse_arguments(spec.extra_args) else env
    env.pop("SGLANG_RETURN_ORIGINAL_LOGPROB", None)  # log-probabilities would ignore the temperature
    if "enable_return_indexer_topk" in parse_arguments(spec.extra_args):
        env["SGLANG_DSA_FUSE_TOPK"] = "0"  # else keys are slots of the cache
    # Without these variables a crashed server is silent for 65 seconds, to dump its GPU state.
    env.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")
    env.setdefault("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "0")
    # Interval in seconds in which a server notices closed connections; megarl drops many requests.
    env.setdefault("SGLANG_REQUEST_STATE_WAIT_TIMEOUT", "1")
    ours = [PLUGIN] if spec.gpus is not None else [CPU_SHIM, PLUGIN]
    env["PYTHONPATH"] = os.pathsep.join([*map(str, ours), *filter(None, [env.get("PYTHONPATH")])])
    if spec.gpus is not None:
        return env | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, spec.gpus))}
    env |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if spec.tp > 1:
        # SGLang demands a NUMA node per rank, unless the cores of every rank are given.
        cores = sorted(os.sched_getaffinity(0))
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(spec.tp))
    return env


def write_config(spec: ServerSpec) -> Path | None:
    """Write the API key to a YAML file that only the owner can read; None without a key. The caller removes the
    file."""
    if spec.api_key is None:
        return None
    descriptor, name = tempfile.mkstemp(prefix="megarl-sglang-", suffix=".yaml")  # created with mode 0600
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"api-key: {json.dumps(spec.api_key)}\n")  # a JSON string is a YAML string
    return Path(name)


def free_port(host: str) -> int:
    """Return a free port below 32768, outside of the range of outgoing connections; RolloutError if none is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in random.SystemRandom().sample(range(20000, 30000), 100):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, port))
            return port
    raise RolloutError(f"found no free port between 20000 and 30000 on {host}: give one")
