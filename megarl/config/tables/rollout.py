"""The tables about rollouts: [rollout], [environment], [sglang]."""

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megarl.config.plugs import EngineKind, engine_kind
from megarl.config.tables.base import Count, Dtype, Row, Table

Reread = Literal["replay", "drop", "ask"]
Sync = Literal["ipc", "distributed", "tensor", "disk"]


class RolloutConfig(Table):
    """[rollout]: how responses are sampled."""

    engine: str = "local"
    """"local": transformers in the trainer's own processes; "sglang": SGLang servers (see [sglang]); or your own,
    "package.module:name", see "Plugs" in docs/architecture.md."""
    prompts_per_step: PositiveInt
    """Prompts B of a global step."""
    group_size: PositiveInt
    """Responses G to each prompt."""
    max_response_tokens: PositiveInt
    """Longest response, in tokens; a longer response is cut."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature. Not 0: log-probabilities of greedy samples are all 0, and ratios would be wrong."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: tokens come from the smallest set with at least this probability."""
    keep_sampling_mask: bool = True
    """With top_p below 1: record the ids of each token's nucleus, and compute log-probabilities over the nucleus in
    training ("Keep Sampling Mask", docs/sampling.md). false: over the whole vocabulary, with biased importance
    weights."""
    max_kept_ids: PositiveInt = 1 << 22
    """Most recorded ids of one response, 4 bytes per id; a response with more ids ends the run."""
    fp8_rounding: bool = False
    """Round the engine's weights through FP8 (e4m3, 128 x 128 blocks), to the values of an FP8 engine."""
    fp8_activations: bool = False
    """Round the inputs of linear layers as an FP8 engine does (e4m3, a scale for each token and 128 channels). The
    local engine only, with fp8_rounding; see docs/fp8.md."""
    fp8_kv_cache: bool = False
    """Round keys and values of attention too (e4m3, scale 1). The local engine only."""
    dtype: Dtype = "bf16"
    """Precision of the engine's weights and activations; expert biases are fp32."""
    one_step_off: bool = False
    """Sample the responses of the next step during training, with weights that are one step old."""
    max_staleness: Count = 0
    """Most updates between the weights that sample a token and the weights that train it. Above 0, free places sample
    later prompts, and a response that is unfinished when the weights change goes on with the new weights; see
    docs/partial_rollouts.md."""
    window: float = Field(default=0.3, ge=0, le=1)
    """With max_staleness: share of a step's prompts that complete younger prompts may pass over, at least one prompt; 0
    trains prompts strictly in order."""
    max_batch_size: PositiveInt = 256
    """Responses that the local engine decodes at once, per rank."""
    reread: Reread = "replay"
    """Routes of a response that a server has read twice, because its memory was full ("Retractions", docs/sglang.md).
    replay: routes of the second reading; drop: no routes for these tokens; ask: sample the response again."""

    @property
    def engine_kind(self) -> EngineKind:
        """Capabilities of the engine, and the factory."""
        return engine_kind(self.engine)

    @property
    def keeps_sets(self) -> bool:
        """Whether the ids of each token's nucleus are recorded; at top_p = 1 the nucleus is the whole vocabulary."""
        return self.keep_sampling_mask and self.top_p < 1

    def rows(self) -> Iterable[Row]:
        kind, rounding = self.engine_kind, "an engine that can round so"
        yield self.row("top_p_of_engine", self.top_p < 1 and not kind.nucleus)
        yield self.row("sampling_mask_of_engine", self.keeps_sets and not kind.kept_sets)
        servers = 'an engine that samples in servers while the trainer trains, such as engine = "sglang"'
        yield from self.only_with(servers, kind.server, "one_step_off")
        yield from self.only_with("an engine that can pause", kind.pauses, "max_staleness")
        yield from self.only_with("max_staleness above 0", self.max_staleness, "window")
        yield from self.only_with("max_staleness = 0", not self.max_staleness, "one_step_off")
        yield from self.only_with(rounding, kind.fp8, "fp8_rounding")
        yield from self.only_with(rounding, kind.fp8_arithmetic, "fp8_activations", "fp8_kv_cache")
        yield from self.only_with("fp8_rounding = true, which it adds to", self.fp8_rounding, "fp8_activations")
        yield from self.only_with('servers, whose memory may be full, such as engine = "sglang"', kind.server, "reread")


class EnvironmentConfig(Table):
    """[environment]: rollouts of several turns, with tools; see docs/environments.md."""

    function: str | None = None
    """"tools" for the key tools, or "package.module:factory", or "package.module:coroutine" for an agent that speaks
    OpenAI's chat completions; default: a response is one turn."""
    options: dict[str, Any] = {}
    """Keyword arguments of the factory or coroutine in function."""
    tools: list[str] = []
    """Tools of the model: "calculator", "python" or "package.module:factory"."""
    format: Literal["block", "hermes"] = "block"
    """Form of a tool call. block: text between call_open and call_close, for a single tool; hermes: JSON in <tool_call>
    tags, as Qwen does."""
    call_open: str = "<tool>"
    """Text that begins a call, with format block."""
    call_close: str = "</tool>"
    """Text that ends a call, with format block; the text after call_close is ignored."""
    observation: str | None = None
    """Text appended after a call; {output} stands for the tool's output. The default depends on the format."""
    stop: list[str] = []
    """Texts of one token that end a turn, in addition to the end token."""
    max_turns: PositiveInt = 8
    """Most turns of the model; rollout.max_response_tokens bounds all turns and observations together."""
    max_turn_tokens: PositiveInt | None = None
    """Longest turn, in tokens; default the remaining tokens of the response."""
    step_s: PositiveFloat = 60.0
    """Longest answer of the environment, or pause of an agent between two requests; seconds."""
    episode_s: PositiveFloat = 1800.0
    """Longest time from the end of a rollout's first turn to the end of the rollout, sampling included; seconds. A late
    rollout is not trained, and is counted."""
    concurrency: PositiveInt = 4
    """Answers that the environment computes at a time, per rank; agents are not limited."""
    python_s: PositiveFloat = 10.0
    """Wall and CPU time of a call of the Python tool; seconds."""
    python_memory_mb: PositiveInt = 1024
    """Memory of each process of the Python tool."""
    python_output_kb: PositiveInt = 16
    """Longest output of the Python tool."""
    python_processes: int = Field(default=8, ge=0)
    """Processes and threads of the Python tool besides the first process."""

    def rows(self) -> Iterable[Row]:
        yield self.row("tools", (self.function == "tools") != bool(self.tools))
        yield self.row("unnamed_tools", self.format == "block" and len(self.tools) > 1)
        yield self.row("observation", self.observation is not None and "{output}" not in self.observation)
        yield self.row("no_environment", self.function is None and self != EnvironmentConfig.model_construct())


class SGLangConfig(Table):
    """[sglang]: the servers of rollout.engine = "sglang"."""

    urls: list[str] = []
    """Running servers, for this run alone; empty: megarl starts servers."""
    servers: PositiveInt = 1
    """Servers that megarl starts on each node, next to the node's first rank."""
    gpus: list[Count] = []
    """GPUs of a node for the servers, tp for each server; empty: servers compute on the CPU."""
    host: str | None = None
    """Address on which servers listen; default the loopback address, on several nodes the address of the node."""
    python: str = ".venv-sglang/bin/python"
    """Python interpreter of the environment with SGLang."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks of each server."""
    mem_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Share of a GPU's memory for a server's weights and cache; on a CPU, share of the machine's memory, taken at the
    start of the server. Default: SGLang's choice, on a CPU 0.1."""
    max_total_tokens: PositiveInt | None = None
    """Tokens in the cache of a server; default as many as fit."""
    arguments: list[str] = []
    """More command-line arguments for sglang.launch_server."""
    api_key_env: str | None = None
    """Name of the environment variable with the API key of the servers. Without a name, servers started by megarl get a
    random key."""
    sync: Literal["auto", Sync] = "auto"
    """Transport of weights to the servers. ipc: servers on the trainer's GPUs, or on this machine's CPUs, read the
    trainer's memory; distributed: one process group with all servers, NCCL from GPUs and gloo from CPUs; tensor: HTTP,
    slow, and ipc for servers on this machine's CPUs; disk: a folder below run.dir that the servers can read. auto: ipc
    where servers share GPUs or CPUs with the trainer, otherwise distributed."""
    deltas: bool = False
    """Send the servers only the bytes of the weights that differ from the last update, over HTTP (sync = "tensor")."""
    spare_weights: Literal["memory", "disk", "none"] = "memory"
    """Place of a copy of the weights for restarted servers: memory of the node's first rank, or a folder below run.dir.
    none: a restarted server gets no weights and no requests before the next update."""
    release_memory: bool = False
    """For servers on the trainer's GPUs: the servers release memory during training, and the trainer releases gradients
    and optimizer state during sampling."""
    checksums: bool = True
    """Compare the servers' checksums of the weights after every update, and again after the responses of a step. On
    CPUs, servers have checksums from SGLang 0.5.23 on."""
    fp8: bool = False
    """Compute in FP8 on the servers, with weights in blocks of 128 x 128; needs GPUs with FP8."""
    concurrency: PositiveInt = 256
    """Most requests of a rank in flight at one server, which queues what it has no room for."""
    deadline_s: PositiveFloat = 600.0
    """Longest time for one response; seconds."""
    attempts: PositiveInt = 4
    """Attempts at a request before the run ends. An attempt fails if the answer is bad or late."""
    start_deadline_s: PositiveFloat = 600.0
    """Longest start of a server, and longest absence of a lost server; seconds."""
    max_restarts: Count = 20
    """Most restarts of a server that dies; servers at urls are not restarted."""

    def rows(self) -> Iterable[Row]:
        yield from self.urls_rules(self.urls)
        gpus, num = self.gpus, self.servers * self.tp
        yield self.row("gpus_beside_urls", self.urls and gpus)
        yield self.row("gpu_twice", len(set(gpus)) < len(gpus))
        yield self.row("num_gpus", gpus and len(gpus) != num, found=len(gpus), expected=num)
