"""The tables of a configuration, and ``Tables``: all tables, with the values that follow from several.

A table checks its own keys; rules between tables are in ``megarl.config.refusals``. The docstring below a field is the
help text of the field. The tables import no torch.
"""

from pathlib import Path
from typing import Any

from megarl.config.tables.base import Table
from megarl.config.tables.data import DataConfig, RewardConfig, RewardModelConfig, SftConfig
from megarl.config.tables.health import HealthConfig
from megarl.config.tables.model import ModelConfig, ParallelConfig, RecomputeConfig
from megarl.config.tables.rollout import EnvironmentConfig, RolloutConfig, SGLangConfig, Sync
from megarl.config.tables.run import CheckpointConfig, EvalConfig, LaunchConfig, LogConfig, RunConfig
from megarl.config.tables.sampling import CreditConfig, EstimateConfig, GvmConfig, SamplingConfig
from megarl.config.tables.train import OptimConfig, TrainConfig
from megarl.core.choices.credit import Credit


class Tables(Table):
    """Valid tables of a configuration, perhaps in contradiction."""

    run: RunConfig
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
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
    health: HealthConfig = HealthConfig()
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
    def train_size(self) -> int:
        """sampling.train_size with its default resolved: responses to a prompt for training."""
        return self.sampling.train_size or self.rollout.group_size

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def responses_per_step(self) -> int:
        """Responses that a step trains on: B * G, or B * sampling.train_size. A prompt may have fewer."""
        return self.rollout.prompts_per_step * self.train_size

    @property
    def prompts_per_step_at_most(self) -> int:
        """Prompts that a step may begin: B, or with sampling.refill sampling.max_prompts."""
        prompts = self.rollout.prompts_per_step
        return (self.sampling.max_prompts or 4 * prompts) if self.sampling.refill else prompts

    @property
    def credit_record(self) -> Credit:
        """[credit] with its defaults resolved; ConfigError for contradicting parts."""
        table = self.credit
        estimated = self.sampling.rule == "ada_est" and self.sampling.uses_credit
        scale, rate_eps = ("root_rate", self.estimate.eps) if estimated else ("none", 0.0)
        rate_eps = rate_eps if table.rate_eps is None else table.rate_eps
        return Credit(**table.model_dump(exclude={"scale", "rate_eps"}), scale=table.scale or scale, rate_eps=rate_eps)

    @property
    def benchmarks(self) -> tuple[str, ...]:
        """Names of the benchmarks of an evaluation."""
        return (*(("heldout",) if self.data.heldout is not None else ()), *self.eval.sets)

    def judge_options(self, function: str) -> dict[str, Any]:
        """Options of a judge for this reward function; only the run's own function gets weights."""
        options = self.reward.model_dump(include={"workers", "timeout_s", "max_characters"})
        weights = self.reward.weights if function == self.reward.function else None
        return options | {"model": self.reward_model, "weights": weights}

    @property
    def weight_sync(self) -> Sync:
        """sglang.sync with "auto" resolved. Servers on this machine's CPUs take tensors from shared memory, too."""
        if self.sglang.deltas:
            return "tensor"
        if self.sglang.sync in ("auto", "tensor") and not (self.sglang.urls or self.sglang.gpus or self.launch.apart):
            return "ipc"
        return self.sglang.sync if self.sglang.sync != "auto" else "ipc" if self.servers_share_gpus else "distributed"

    @property
    def servers_share_gpus(self) -> bool:
        """Whether a GPU holds a rank of the trainer and a rank of a server."""
        return not self.launch.apart and any(gpu < self.launch.ranks_per_node for gpu in self.sglang.gpus)

    @property
    def old_passes(self) -> int:
        """Number of mini-batches, counted from the last, with an old-log-prob pass before the first update.

        The first mini-batch needs no pass: no weight has moved, so the update computes pi_old itself, and r2 would
        replay the routers' own choice. All mini-batches have a pass for
        - an objective that needs log-probabilities of whole mini-batches before the first update;
        - a reference policy or balancing losses that follow the routes replayed by r2.
        """
        train, objective = self.train, self.train.resolved_objective
        if train.old_logprobs == "rollout":
            return 0
        adapts = bool(objective.beforehand - {"theta_old"})
        balances = self.megatron.get("moe_router_load_balancing_type", "none") not in ("none", None)
        follows = train.replay == "r2" and (train.replay_reference or balances)
        beforehand = adapts or follows or objective.advantage == "token_level_kl"
        return train.mini_batches if beforehand else train.mini_batches - 1

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run: steps * N."""
        return self.run.steps * self.train.mini_batches

    @property
    def collective_timeout_s(self) -> float:
        """run.collective_timeout_s with its default resolved: longer than a rank may wait for an SGLang server."""
        servers = self.sglang
        if self.run.collective_timeout_s is not None:
            return self.run.collective_timeout_s
        if not self.rollout.engine_kind.server:
            return 1800.0
        return max(1800.0, servers.attempts * servers.deadline_s + servers.start_deadline_s + 600.0)
