"""The configuration of a run: what can be set, what it means, and what goes together.

A run is described by one TOML file; each class below, and in ``megarl.config.sampling``, is one table of it. Values
come from the defaults, then the file, then the command line. ``Config.to_toml`` writes the resolved configuration,
which reads back equal. ``megarl.config.file`` reads the file and turns every problem into a ConfigError with one line.

Nothing here imports torch or Megatron, so that a wrong file is reported at once.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megarl.config import megatron_fields
from megarl.config.engines import EngineKind, engine_kind
from megarl.config.launch import LaunchConfig
from megarl.config.megatron_fields import REPLAY_BLOCKERS, ReplayBlocker, replay_blockers
from megarl.config.plugs import load_plug
from megarl.config.sampling import CreditConfig, EnvironmentConfig, EstimateConfig, GvmConfig, SamplingConfig
from megarl.config.table import Count, NonNegative, Table
from megarl.core.choices.credit import Credit
from megarl.core.choices.family import family_warning
from megarl.core.choices.parts import PARTS, TOKEN_ADVANTAGES, Objective
from megarl.core.choices.stopping import POSITIVE
from megarl.core.choices.table import OBJECTIVES
from megarl.errors import ConfigError

__all__ = ["OBJECTIVES", "OBJECTIVE_PARTS", "REPLAY_BLOCKERS", "Config", "Layout", "ReplayBlocker", "replay_blockers"]

OBJECTIVE_PARTS = PARTS
"""Names of the parts of an objective: the keys of train.objective_overrides."""

Dtype = Literal["fp32", "bf16"]
DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root"]
RecomputeModule = Literal["core_attn", "moe_act", "layernorm", "mlp", "moe", "shared_experts"]
Beta = Annotated[float, Field(ge=0, lt=1)]


class RunConfig(Table):
    """[run]: the run as a whole."""

    name: str = Field(default="run", min_length=1)
    """Name of the run, shown in logs and reports."""
    dir: str | None = None
    """Folder for metrics, checkpoints and the resolved configuration; default runs/<name>."""
    seed: Count = 0
    """Seed of everything random: prompt order, sampling, initial weights that no checkpoint gives."""
    steps: PositiveInt
    """Global steps; one step samples prompts_per_step * group_size responses and trains on them."""
    collective_timeout_s: PositiveFloat | None = None
    """How long a rank waits for the others before the run ends; default 1800, or longer than any of them may wait for
    SGLang servers."""
    deterministic: bool = False
    """Ask PyTorch and Megatron for deterministic kernels; slower on a GPU."""


class ModelConfig(Table):
    """[model]: the policy."""

    path: str = Field(min_length=1)
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer); it decides the architecture."""
    dtype: Dtype = "bf16"
    """Precision of training weights and activations; the optimizer keeps fp32 either way."""
    reference: str | None = None
    """Checkpoint folder of the reference policy, of the same architecture; default path. Read only by objectives with a
    KL to a reference: kl_grpo, or any with the part kl."""


class ParallelConfig(Table):
    """[parallel]: how the model is spread over ranks; data parallelism takes the ranks that are left."""

    tp: PositiveInt = 1
    """Tensor-parallel ranks."""
    pp: PositiveInt = 1
    """Pipeline-parallel ranks."""
    vpp: PositiveInt | None = None
    """Virtual pipeline stages per pipeline rank (interleaved schedule); needs pp > 1."""
    ep: PositiveInt = 1
    """Expert-parallel ranks; they are taken from the data- and tensor-parallel ones."""
    etp: PositiveInt | None = None
    """Tensor-parallel ranks inside an expert; default tp."""
    cp: PositiveInt = 1
    """Context-parallel ranks: each holds an early and a late chunk of every sequence."""
    sequence_parallel: bool | None = None
    """Split activations along the sequence between tensor-parallel ranks; default tp > 1, where Megatron needs it."""
    dispatcher: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens travel to their experts; flex is DeepEP, needs GPUs, and has not been run with megarl."""
    distributed_optimizer: bool = True
    """Shard optimizer state over data-parallel ranks."""

    @property
    def expert_tp(self) -> int:
        """etp with its default resolved."""
        return self.tp if self.etp is None else self.etp

    @property
    def equal_micro_batches(self) -> bool:
        """Whether all micro-batches need as many slots: the all-gather dispatcher exchanges no sizes."""
        return self.dispatcher == "allgather"

    @property
    def micro_batch_multiple(self) -> int:
        """What the number of micro-batches must be a multiple of: the interleaved schedule takes pp at a time."""
        return self.pp if self.vpp else 1

    @property
    def uses_sequence_parallel(self) -> bool:
        """sequence_parallel with its default resolved."""
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.vpp is not None and self.pp == 1:
            raise ValueError(f"vpp: found {self.vpp} with pp = 1, expected pp > 1; remove vpp or raise pp")
        if self.vpp == 1:
            raise ValueError("vpp: found 1, expected 2 or more stages per rank; remove vpp for the plain schedule")
        if self.expert_tp > self.tp or (self.ep == 1 and self.expert_tp != self.tp):
            raise ValueError(
                f"etp: found {self.expert_tp} with tp = {self.tp} and ep = {self.ep}: Megatron reduces such expert "
                "gradients over the wrong ranks; expected etp = tp, or ep > 1 and etp below tp"
            )
        if self.tp > 1 and self.sequence_parallel is False:
            raise ValueError(
                f"sequence_parallel: found false with tp = {self.tp}, but Megatron's MoE needs it; remove it"
            )
        if self.tp == 1 and self.sequence_parallel:
            raise ValueError("sequence_parallel: found true with tp = 1, expected tp > 1; remove it or raise tp")
        return self


class DataConfig(Table):
    """[data]: prompts and answers."""

    train: str = Field(min_length=1)
    """JSONL or Parquet file, or the name of a hub data set."""
    heldout: str | None = None
    """The same for evaluation; needed when eval.every > 0."""
    prompt_field: str = "prompt"
    """Field that holds the prompt: plain text, or a list of chat messages."""
    answer_field: str = "answer"
    """Field that holds the answer that the reward compares with."""
    chat_template: bool = False
    """Wrap plain-text prompts with the tokenizer's chat template."""
    max_prompt_tokens: PositiveInt = 2048
    """Longest prompt, in tokens; a longer one is an error."""
    split: str | None = None
    """Split of a hub data set or folder, e.g. "train"."""
    heldout_split: str | None = None
    """The same for heldout; default split, if heldout is no file."""

    @property
    def resolved_heldout_split(self) -> str | None:
        """heldout_split with its default resolved; files have no splits."""
        if self.heldout_split is None and not (self.heldout or "").endswith((".jsonl", ".parquet")):
            return self.split
        return self.heldout_split

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.heldout_split is not None and self.heldout is None:
            raise ValueError(f"heldout_split: found {self.heldout_split!r} without heldout; set heldout or remove it")
        return self


class RewardConfig(Table):
    """[reward]: how a response is scored."""

    function: str = Field(default="exact_match", min_length=1)
    """"exact_match", "math_verify", or "package.module:function"; see docs/rewards.md."""
    workers: PositiveInt = 1
    """Processes of each rank that it runs in; exact_match needs none."""
    timeout_s: PositiveFloat = 30.0
    """Longest time for one response, which is then left out and counted; seconds."""
    threshold: float = POSITIVE
    """A response is correct (positive) if its reward is above this: for adaptive sampling, RAFT, and all pass rates."""


class RolloutConfig(Table):
    """[rollout]: how responses are sampled."""

    engine: str = "local"
    """"local": transformers in the trainer's own processes; "sglang": SGLang servers (see [sglang]); or your own,
    "package.module:name", see docs/plugin.md."""
    prompts_per_step: PositiveInt
    """Prompts B of a global step."""
    group_size: PositiveInt
    """Responses G to each prompt."""
    max_response_tokens: PositiveInt
    """Longest response, in tokens; a longer one is cut off."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus: the smallest set of tokens with at least this probability is sampled from. Training computes
    log-probabilities over the whole vocabulary, so below 1 its gradient misses the rest."""
    fp8_rounding: bool = False
    """Round the engine's weights through FP8 (e4m3, 128 x 128 blocks), as a real FP8 engine would hold them."""
    dtype: Dtype = "bf16"
    """Precision of the engine's weights and activations."""
    one_step_off: bool = False
    """Sample the next step's responses while this one is trained, with weights that are one step old."""
    max_batch_size: PositiveInt = 256
    """Responses that the local engine decodes at once, per rank."""

    @property
    def engine_kind(self) -> EngineKind:
        """What the engine can do, and what makes it."""
        return engine_kind(self.engine)

    @model_validator(mode="after")
    def _engine_can(self) -> Self:
        kind = self.engine_kind
        if self.top_p < 1 and not kind.nucleus:
            raise ValueError(
                f'top_p: found {self.top_p:g}, expected 1 with engine = "{self.engine}", whose log-probabilities are '
                "of the whole vocabulary and not of the nucleus that it samples from"
            )
        if self.one_step_off and not kind.server:
            raise ValueError(
                f'one_step_off: found true with engine = "{self.engine}", which samples in the trainer\'s own '
                'processes and cannot do so while they train; set engine = "sglang"'
            )
        if self.fp8_rounding and not kind.fp8:
            raise ValueError(f'fp8_rounding: found true with engine = "{self.engine}", which cannot round; remove it')
        return self


class SGLangConfig(Table):
    """[sglang]: the servers of rollout.engine = "sglang"."""

    urls: list[str] = []
    """Servers that run already and load nothing but what megarl sends; empty: megarl starts its own."""
    servers: PositiveInt = 1
    """Servers that megarl starts on each node, beside the node's first rank."""
    gpus: list[Count] = []
    """GPUs of a node that its servers share out, tp to each; empty: servers compute on the CPU."""
    host: str | None = None
    """Address that servers listen on; default the loopback address, or on several nodes that of each node."""
    python: str = ".venv-sglang/bin/python"
    """Python of the environment that holds SGLang."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks of each server."""
    mem_fraction: float | None = Field(default=None, gt=0, lt=1)
    """Share of a GPU's memory (of the machine's, on a CPU, where all of it is taken at once) for a server's weights and
    cache; default what SGLang finds fitting, 0.1 on a CPU."""
    max_total_tokens: PositiveInt | None = None
    """Tokens that a server's cache holds; default what fits."""
    arguments: list[str] = []
    """Further words for sglang.launch_server."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the servers' API key."""
    sync: Literal["distributed", "tensor", "disk"] = "distributed"
    """How weights reach the servers: through a process group with each server, NCCL from GPUs and gloo from CPUs; over
    HTTP, which is slow; or through a folder below run.dir that servers can read."""
    spare_weights: Literal["memory", "disk"] = "memory"
    """Where a copy of the weights waits for a server that is started again: in the memory of the node's first rank,
    or below run.dir."""
    release_memory: bool = False
    """Give the servers' memory to the trainer while it trains, and that of gradients and optimizer state to the servers
    while they sample: for servers on the trainer's GPUs."""
    checksums: bool = False
    """Whether the servers' checksums of their weights are compared after every update."""
    fp8: bool = False
    """Whether servers compute in FP8, with weights in blocks of 128 x 128; needs a GPU with FP8."""
    compact_routes: bool = True
    """Ask for routes in a short form, which servers that megarl starts know; others send the long one."""
    concurrency: PositiveInt = 64
    """Requests that each rank has under way at one server."""
    deadline_s: PositiveFloat = 600.0
    """Longest time for one response; seconds."""
    attempts: PositiveInt = 4
    """How often a request is answered badly or too late before the run ends."""
    start_deadline_s: PositiveFloat = 600.0
    """Longest start of a server, and how long a lost one may stay away; seconds."""
    max_restarts: Count = 20
    """Restarts of a server that dies; those at urls are not restarted."""


_AROUND_A_FUNCTION = replace(OBJECTIVES["minirl"], weight="none", mask="none", cap=None)
"""What a function does not compute: advantages (group mean), denominator (sequences), KL (none)."""
_PARTS_AROUND = (
    "advantage",
    "selection",
    "std_ddof",
    "std_eps",
    "aggregation",
    "norm_length",
    "kl",
    "kl_coef",
    "kl_horizon",
)


def _check_function(name: str, function: object) -> None:
    if not callable(function):
        raise ConfigError(
            f"objective: found {type(function).__name__} at {name!r}, expected an Objective or a function of columns"
        )
    signature = inspect.signature(function)
    try:
        signature.bind(None)
    except TypeError as error:
        raise ConfigError(
            f"objective: the function {name!r} has the parameters {signature} ({error}), expected (columns)"
        ) from None


class TrainConfig(Table):
    """[train]: the objective and how a step is split."""

    objective: str = "minirl"
    """A row of the table in docs/objectives.md, or your own, "package.module:name": an Objective, or a function of the
    batch's columns."""
    objective_overrides: dict[str, Any] = {}
    """Parts of the objective to replace, e.g. eps_low = 0.1; the string "off" stands for None. A function has fewer."""
    mini_batches: PositiveInt = 1
    """Optimizer steps N per global step, each on an equal share of the responses."""
    micro_batch_tokens: PositiveInt = 16384
    """Most tokens of one forward pass on one rank; must hold the longest prompt with its longest response."""
    replay: Literal["none", "r2", "r3"] = "r3"
    """Which experts training uses: its own, those of the old-log-prob pass (r2), or those of the engine (r3)."""
    max_missing_rows: float = Field(default=0.05, ge=0, le=1)
    """Largest share of tokens without a recorded route before the step is an error; fraction. The last token of a
    sequence does not count: no engine has processed it, and nothing is predicted from it."""
    min_route_agreement: float = Field(default=0.5, ge=0, le=1)
    """How far replayed experts must agree with the training routers' own choice in the first pass over a mini-batch,
    beyond chance: 1 is all of them, 0 switches the check off. Rows of another batch agree by chance alone."""
    mixed_versions: Literal["allow", "refuse"] = "allow"
    """Whether a response may mix weight versions, in its tokens or between a token and its routes."""
    replay_aux_loss: Literal["dispatch", "off"] = "dispatch"
    """What load-balancing losses count under replay: the experts that tokens go to, or nothing."""

    @property
    def objective_parts(self) -> dict[str, bool | int | float | str | None]:
        """objective_overrides with "off" turned into None, for ``dataclasses.replace``."""
        return {key: None if value == "off" else value for key, value in self.objective_overrides.items()}

    @property
    def _named(self) -> Any:
        """What ``objective`` names: an Objective or a function."""
        if self.objective in OBJECTIVES:
            return OBJECTIVES[self.objective]
        return load_plug("objective", self.objective, f"one of {', '.join(OBJECTIVES)}")

    @property
    def resolved_objective(self) -> Objective:
        """The objective with its parts replaced; of a function what it does not compute. ConfigError if parts do not
        go together."""
        named = self._named
        return replace(named if isinstance(named, Objective) else _AROUND_A_FUNCTION, **self.objective_parts)

    @property
    def objective_function(self) -> Callable[[Any], Any] | None:
        """The user's function of the columns, if the objective is one; see ``megarl.core.objectives.functions``."""
        named = self._named
        return None if isinstance(named, Objective) else named

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        function = self.objective_function
        if function is not None:
            _check_function(self.objective, function)
        for key, value in self.objective_overrides.items():
            if key not in OBJECTIVE_PARTS:
                close = difflib.get_close_matches(key, OBJECTIVE_PARTS, n=1) or OBJECTIVE_PARTS
                raise ValueError(f"objective_overrides.{key}: unknown part; did you mean {' or '.join(close)}?")
            if function is not None and key not in _PARTS_AROUND:
                raise ValueError(
                    f"objective_overrides.{key}: found with the function {self.objective!r}, which computes weight and "
                    f"mask itself; expected one of {', '.join(_PARTS_AROUND)}"
                )
            if not isinstance(value, (bool, int, float, str)):
                raise ValueError(f"objective_overrides.{key}: found {value!r}, expected a number, a string or a bool")
        try:
            _ = self.resolved_objective
        except ConfigError as error:
            raise ValueError(f"objective_overrides: {str(error).removeprefix('objective: ')}") from error
        return self


class OptimConfig(Table):
    """[optim]: Adam and its learning-rate schedule, counted in optimizer steps."""

    lr: PositiveFloat
    """Peak learning rate."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: Count = 0
    """Optimizer steps of linear warm-up from 0."""
    decay_steps: PositiveInt | None = None
    """Optimizer steps until min_lr, warm-up included; default all steps of the run."""
    decay_style: DecayStyle = "constant"
    """Shape of the decay."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    adam_beta1: Beta = 0.9
    """Decay of the first moment."""
    adam_beta2: Beta = 0.95
    """Decay of the second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    clip_grad: NonNegative = 1.0
    """Largest global gradient norm; 0 = no clipping."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr: found {self.min_lr}, expected at most lr = {self.lr}")
        if self.decay_steps is not None and self.warmup_steps >= self.decay_steps:
            raise ValueError(
                f"warmup_steps: found {self.warmup_steps}, expected fewer than decay_steps = {self.decay_steps}"
            )
        return self


class RecomputeConfig(Table):
    """[recompute]: activations that are computed again in the backward pass to save memory; names are Megatron's."""

    granularity: Literal["selective", "full"] | None = None
    """None, only some modules of each layer, or whole layers."""
    method: Literal["uniform", "block"] | None = None
    """With full: recompute every num_layers layers as a unit, or only the first num_layers layers of a stage."""
    num_layers: PositiveInt | None = None
    """With full: see method; layers."""
    modules: list[RecomputeModule] | None = None
    """With selective: which modules; default core_attn."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        full_keys = [key for key in ("method", "num_layers") if getattr(self, key) is not None]
        if self.granularity == "full" and len(full_keys) < 2:
            raise ValueError('granularity: found "full" without method and num_layers; set e.g. "uniform" and 1')
        if self.granularity != "full" and full_keys:
            raise ValueError(f'{full_keys[0]}: goes only with granularity = "full"; remove it')
        if self.granularity != "selective" and self.modules is not None:
            raise ValueError('modules: goes only with granularity = "selective"; remove it')
        return self


class EvalConfig(Table):
    """[eval]: sampling on held-out prompts."""

    every: Count = 0
    """Global steps between evaluations; 0 = never."""
    samples: PositiveInt = 1
    """Responses per prompt."""
    max_prompts: PositiveInt | None = None
    """Only the first so many prompts; default all."""
    temperature: NonNegative = 1.0
    """Sampling temperature; 0 = greedy."""


class CheckpointConfig(Table):
    """[checkpoint]: what a killed run can start again from."""

    every: Count = 0
    """Global steps between checkpoints; 0 = none in between. A run that is asked to stop (Ctrl-C) saves itself."""
    at_end: bool = True
    """Save the last step, whatever every is; false for a benchmark that needs no weights."""
    keep: PositiveInt = 2
    """Newest checkpoints that stay on disk."""
    asynchronous: bool = False
    """Write checkpoints in processes beside the ranks, while training goes on; needs host memory for a copy."""
    resume: bool = True
    """Continue from the newest checkpoint in run.dir, if there is one."""


class LogConfig(Table):
    """[log]: where metrics go besides metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard event files below run.dir."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project; default not."""
    hang_s: PositiveFloat = 900.0
    """A rank that has not moved for so long writes the stacks of its threads below run.dir/ranks; seconds."""
    traces_every: Count = 0
    """Write the routes of every so many steps below run.dir/traces, for `megarl trace`; 0 = never."""


class SftConfig(Table):
    """[sft]: the supervised cold start that `megarl sft` runs; layout, precision, chat template and the longest prompt
    and response as for RL."""

    data: str = Field(min_length=1)
    """JSONL file of demonstrations; a longer one than RL could sample is an error."""
    out: str | None = None
    """Folder of the Hugging Face checkpoint that comes out; default <run.dir>/sft."""
    steps: PositiveInt
    """Optimizer steps."""
    batch_size: PositiveInt
    """Demonstrations per step, over all ranks."""
    lr: PositiveFloat
    """Peak learning rate."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: Count = 0
    """Steps of linear warm-up from 0."""
    decay_style: DecayStyle = "linear"
    """Shape of the decay over all steps."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    prompt_field: str = "prompt"
    """Field that holds the prompt."""
    response_field: str = "response"
    """Field that holds the response to learn."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a given number of ranks is divided, all defaults resolved."""

    world_size: int
    tp: int
    pp: int
    vpp: int | None
    cp: int
    dp: int
    """Data-parallel ranks of dense weights: world_size / (tp * pp * cp)."""
    ep: int
    etp: int
    edp: int
    """Data-parallel ranks of expert weights: world_size / (ep * etp * pp)."""
    sequences_per_rank: int
    """Responses of one mini-batch on one data-parallel rank: B * G / (N * dp); a mean if prompts differ."""


class Config(Table):
    """The whole configuration of a run."""

    run: RunConfig
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig
    sampling: SamplingConfig = SamplingConfig()
    estimate: EstimateConfig = EstimateConfig()
    gvm: GvmConfig = GvmConfig()
    credit: CreditConfig = CreditConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    sglang: SGLangConfig = SGLangConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig
    recompute: RecomputeConfig = RecomputeConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    launch: LaunchConfig = LaunchConfig()
    log: LogConfig = LogConfig()
    sft: SftConfig | None = None
    megatron: dict[str, Any] = {}
    """Any other field of Megatron's TransformerConfig, DistributedDataParallelConfig or OptimizerConfig."""

    @property
    def run_dir(self) -> Path:
        """run.dir with its default resolved."""
        return Path(self.run.dir or f"runs/{self.run.name}")

    @property
    def sft_out(self) -> Path:
        """sft.out with its default resolved."""
        return Path(self.sft.out) if self.sft and self.sft.out else self.run_dir / "sft"

    @property
    def reference_path(self) -> str:
        """model.reference with its default resolved."""
        return self.model.reference or self.model.path

    @property
    def responses_per_step(self) -> int:
        """Responses that a step trains on: B * G, or B * sampling.train_size. Fewer where prompts have not as many."""
        return self.rollout.prompts_per_step * (self.sampling.train_size or self.rollout.group_size)

    @property
    def prompts_per_step_at_most(self) -> int:
        """Prompts that a step may begin: B, or with sampling.refill sampling.max_prompts."""
        prompts = self.rollout.prompts_per_step
        return (self.sampling.max_prompts or 4 * prompts) if self.sampling.refill else prompts

    @property
    def credit_record(self) -> Credit:
        """[credit] with its defaults resolved."""
        return self.credit.record(self.sampling.rule, self.estimate.eps)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run: steps * N."""
        return self.run.steps * self.train.mini_batches

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence for each setting that is allowed but biases the gradient; shown at start and by the doctor."""
        top_p = self.rollout.top_p
        nucleus = (
            f"rollout.top_p: found {top_p:g}: tokens outside of the nucleus are never sampled, so their part of the "
            f"gradient is missing; pi / mu of a sampled token is the mass of its nucleus ({top_p:g} to 1), so products "
            "over long responses shrink, and rollout/k1 and k3 grow; only 1 is unbiased"
            if top_p < 1
            else None
        )
        return tuple(filter(None, (family_warning(self.train.resolved_objective), nucleus)))

    @property
    def collective_timeout_s(self) -> float:
        """run.collective_timeout_s with its default resolved: longer than any of them may wait for an SGLang server."""
        servers = self.sglang
        if self.run.collective_timeout_s is not None:
            return self.run.collective_timeout_s
        if not self.rollout.engine_kind.server:
            return 1800.0
        return max(1800.0, servers.attempts * servers.deadline_s + servers.start_deadline_s + 600.0)

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        self._check_sizes()
        self._check_sampling()
        self._check_megatron()
        self._check_engine()
        if self.eval.every and self.data.heldout is None:
            raise ValueError(
                f"eval.every: found {self.eval.every} without data.heldout; set data.heldout or eval.every = 0"
            )
        return self

    def _check_engine(self) -> None:
        rollout = self.rollout
        served = rollout.engine_kind.server
        if self.train.replay == "r3" and not rollout.engine_kind.routes:
            raise ValueError(
                f'train.replay: found "r3" with rollout.engine = "{rollout.engine}", which returns no routes; set '
                'train.replay = "r2" or "none"'
            )
        self._check_servers()
        if self.sglang.release_memory and (not served or rollout.one_step_off or self.launch.apart):
            raise ValueError(
                "sglang.release_memory: found true, expected servers that share the trainer's GPUs and rest while it "
                'trains: engine = "sglang", one_step_off = false, launch.layout = "colocated" or "local"'
            )
        if self.sglang.release_memory and self.sampling.allotted:
            raise ValueError(
                f'sglang.release_memory: found true with sampling.rule = "{self.sampling.rule}", whose estimates need '
                "the policy while servers sample; set it to false, or another rule"
            )
        if self.launch.apart and not served:
            raise ValueError(
                f'launch.layout: found "{self.launch.layout}" with rollout.engine = "{rollout.engine}", which has no '
                'servers; set rollout.engine = "sglang", or layout = "colocated"'
            )
        if self.sglang.fp8 and rollout.dtype != "bf16":
            raise ValueError(
                f'rollout.dtype: found "{rollout.dtype}" with sglang.fp8 = true, whose kernels know bf16 only'
            )
        if self.sglang.fp8 and rollout.fp8_rounding:
            raise ValueError(
                "rollout.fp8_rounding: found true together with sglang.fp8 = true, whose weights are in FP8 already; "
                "set one of them"
            )

    def _check_servers(self) -> None:
        settings = self.sglang
        bases = [url.rstrip("/") for url in settings.urls]
        for url in settings.urls:
            if not url.startswith(("http://", "https://")) or url.endswith("/") or bases.count(url) > 1:
                raise ValueError(
                    f"sglang.urls: found {url}, expected each server once, as http://host:port without a slash"
                )
        if settings.urls and settings.gpus:
            raise ValueError("sglang.gpus: found together with sglang.urls, whose servers run already; set one of them")
        if len(set(settings.gpus)) < len(settings.gpus):
            raise ValueError(f"sglang.gpus: found {settings.gpus}, expected each GPU once")
        if settings.gpus and len(settings.gpus) != settings.servers * settings.tp:
            raise ValueError(
                f"sglang.gpus: found {len(settings.gpus)}, expected sglang.servers * sglang.tp = "
                f"{settings.servers * settings.tp}"
            )
        if settings.host not in (None, "127.0.0.1", "::1", "localhost") and settings.api_key_env is None:
            raise ValueError(
                f"sglang.host: found {settings.host} without sglang.api_key_env: whoever reaches a server can replace "
                "its weights; name the variable that holds a key, or leave the host out"
            )

    def _check_sizes(self) -> None:
        if self.sampling.fixed and self.responses_per_step % self.train.mini_batches:
            raise ValueError(
                f"train.mini_batches: found {self.train.mini_batches}, expected a divisor of "
                f"rollout.prompts_per_step * group_size = {self.responses_per_step}"
            )
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        if self.train.micro_batch_tokens < longest:
            raise ValueError(
                f"train.micro_batch_tokens: found {self.train.micro_batch_tokens}, expected at least "
                f"data.max_prompt_tokens + rollout.max_response_tokens = {longest}; raise it or lower one of those"
            )
        if self.train.micro_batch_tokens % self.parallel.tp:
            raise ValueError(
                f"train.micro_batch_tokens: found {self.train.micro_batch_tokens}, expected a multiple of "
                f"parallel.tp = {self.parallel.tp}"
            )

    def _check_sampling(self) -> None:
        sampling, rollout = self.sampling, self.rollout
        try:
            sampling.check_credit(self.credit_record, rollout.group_size)
            if not sampling.allotted:
                _ = sampling.rule_of(rollout.group_size)
        except ConfigError as error:
            raise ValueError(f"sampling: {error}") from error
        for table, default, rule in (("estimate", EstimateConfig(), "ada_est"), ("gvm", GvmConfig(), "gvm")):
            if sampling.rule != rule and getattr(self, table) != default:
                raise ValueError(f'{table}: found with sampling.rule = "{sampling.rule}"; it belongs to "{rule}"')
        if self.prompts_per_step_at_most < rollout.prompts_per_step:
            raise ValueError(
                f"sampling.max_prompts: found {sampling.max_prompts}, expected at least rollout.prompts_per_step = "
                f"{rollout.prompts_per_step}"
            )
        if not sampling.fixed and self.train.mini_batches > rollout.prompts_per_step:
            raise ValueError(
                f"train.mini_batches: found {self.train.mini_batches}, expected at most rollout.prompts_per_step = "
                f"{rollout.prompts_per_step}: mini-batches are of whole groups"
            )
        least, most = self.estimate.min_samples, sampling.max_samples
        if sampling.rule == "ada_est" and not least <= rollout.group_size <= most:
            raise ValueError(
                f"rollout.group_size: found {rollout.group_size}, the mean number of responses, expected "
                f"estimate.min_samples = {least} to sampling.max_samples = {most}"
            )
        by_token = self.train.resolved_objective.advantage in TOKEN_ADVANTAGES
        if by_token and sampling.uses_credit:
            raise ValueError(
                f'sampling.advantages: found "credit" (the default with rule = "{sampling.rule}") with an objective '
                'whose advantages differ between tokens; set sampling.advantages = "objective"'
            )
        if by_token and (self.credit.objective is not None or self.credit.weigh != "sample"):
            raise ValueError("credit: its weights do not go with an objective whose advantages differ between tokens")

    def _check_megatron(self) -> None:
        for key in self.megatron:
            if key in megatron_fields.DERIVED:
                raise ValueError(f"megatron.{key}: megarl sets this itself; use {megatron_fields.DERIVED[key]} instead")
        megatron_fields.check(self.megatron)
        for key in ("hidden_dropout", "attention_dropout"):
            if self.megatron.get(key):
                raise ValueError(
                    f"megatron.{key}: found {self.megatron[key]!r}, expected 0: two passes over a batch must agree"
                )
        if self.megatron.get("overlap_param_gather"):
            raise ValueError(
                "megatron.overlap_param_gather: found true, expected false: weights would go to the engine before they "
                "are gathered"
            )
        if self.train.replay == "none":
            return
        for blocker in replay_blockers(self.megatron):
            found = self.megatron.get(blocker.setting)
            raise ValueError(
                f'megatron.{blocker.setting}: found {found!r} with train.replay = "{self.train.replay}", which cannot '
                f'hold: {blocker.reason}; remove it or set train.replay = "none"'
            )

    def check_world_size(self, world_size: int) -> Layout:
        """Divide world_size ranks; ConfigError if the layout or the batch does not come out even."""
        p = self.parallel
        dense, expert = p.tp * p.pp * p.cp, p.ep * p.expert_tp * p.pp
        if world_size % dense:
            raise ConfigError(
                f"parallel: found {world_size} ranks, expected a multiple of tp * pp * cp = {p.tp} * {p.pp} * {p.cp} = "
                f"{dense}; start another number of processes or change the layout"
            )
        if world_size % expert:
            raise ConfigError(
                f"parallel: found {world_size} ranks, expected a multiple of ep * etp * pp = {p.ep} * {p.expert_tp} * "
                f"{p.pp} = {expert}; start another number of processes or change the layout"
            )
        dp, n = world_size // dense, self.train.mini_batches
        if not self.sampling.fixed and self.rollout.prompts_per_step < n * dp:
            raise ConfigError(
                f"rollout: found prompts_per_step = {self.rollout.prompts_per_step}, expected at least "
                f"train.mini_batches * dp = {n} * {dp} = {n * dp}: each rank trains on whole groups"
            )
        if self.sampling.fixed and self.responses_per_step % (n * dp):
            raise ConfigError(
                f"rollout: found prompts_per_step * group_size = {self.responses_per_step} responses, expected a "
                f"multiple of train.mini_batches * dp = {n} * {dp} = {n * dp}; change one of them"
            )
        if self.sft is not None and self.sft.batch_size % dp:
            raise ConfigError(f"sft.batch_size: found {self.sft.batch_size}, expected a multiple of dp = {dp}")
        return Layout(
            world_size,
            p.tp,
            p.pp,
            p.vpp,
            p.cp,
            dp,
            p.ep,
            p.expert_tp,
            world_size // expert,
            self.responses_per_step // (n * dp),
        )

    def to_toml(self) -> str:
        """The resolved configuration as TOML; ``config_file.parse(tomllib.loads(text))`` equals this one."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))
