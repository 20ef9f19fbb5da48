"""The tables about the objective and the optimizer: [train], [optim]."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megarl.config.plugs import check_function, load_plug
from megarl.config.tables.base import Beta, Count, NonNegative, Row, Table
from megarl.core.choices.parts import OWN_PARTS, Objective
from megarl.core.choices.records import make
from megarl.core.choices.table import OBJECTIVES
from megarl.errors import ConfigError

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root"]
_AROUND_A_FUNCTION = replace(OBJECTIVES["minirl"], masks=(), factors=())
"""Parts that a function does not compute: advantages (group mean), denominator (sequences), penalties (none)."""
OpenShare = Annotated[float, Field(gt=0, lt=1)]
_PARTS_AROUND = [
    *("advantage", "selection", "std_ddof", "std_eps", "aggregation", "norm_length"),
    *("penalties", "entropy_coef", "kl_coef", "kl_horizon", "kl_at"),
]


class TrainConfig(Table):
    """[train]: the objective, replay, and how a step is split."""

    objective: str = "minirl"
    """A row of the table in docs/objectives.md, or your own, "package.module:name": an Objective, or a function of the
    batch's columns."""
    objective_overrides: dict[str, Any] = {}
    """Parts of the objective to replace, e.g. masks.0.high = 1.28, or factors = [{policies = "theta_mu", high = 2.0}];
    the string "off" stands for None. The advantage, a mask and a factor's fn may be your own,
    "package.module:function". A function as objective has fewer parts."""
    mini_batches: PositiveInt = 1
    """Optimizer steps N per global step, each on an equal share of the responses."""
    micro_batch_tokens: PositiveInt = 16384
    """Most tokens of one forward pass on one rank; at least the longest prompt plus the longest response."""
    old_logprobs: Literal["recomputed", "rollout"] = "recomputed"
    """pi_old: of the training engine before the first update, or (rollout) mu of the sampling engine. With rollout, the
    old-log-prob pass is saved, theta/old is theta/mu, and only the first mini-batch is compared with the engine."""
    replay: Literal["none", "r2", "r3"] = "r3"
    """Experts in training: the routers' own choice (none; the only value for dense models), the choice of the
    old-log-prob pass (r2), or the engine's (r3)."""
    replay_min_score: float = Field(default=0.0, ge=0, le=1)
    """Least score of a replayed expert, as a share of the weakest score in the training router's own top K; the best of
    the own top K take the place of other experts (docs/replay.md). 0 replays all experts."""
    replay_gates: bool = False
    """Whether r3 replays the engine's gate weights too: their values are the rollout's, their gradients the router's
    own. Closes more of the gap between the engines, and hides how the router has changed since the rollout
    (docs/replay.md)."""
    replay_indexer: bool = False
    """Whether r3 replays the keys that the engine's sparse attention selected (DeepSeek-V3.2, GLM-5)."""
    replay_reference: bool = False
    """Whether a reference policy uses the replayed experts too: the KL at equal weights is then exactly 0. Otherwise
    the reference policy routes natively."""
    max_missing_rows: float = Field(default=0.05, ge=0, le=1)
    """Largest fraction of tokens without a recorded route; more end the run. The last token of a sequence does not
    count: no engine has processed the token, and the token predicts nothing."""
    min_route_agreement: float = Field(default=0.5, ge=0, le=1)
    """Least agreement beyond chance between replayed experts and the training routers' own choice, in the first pass
    over a mini-batch: 1 is full agreement, 0 switches the check off. Rows of another batch agree by chance alone."""
    max_k3: Literal["learn", "off"] | OpenShare = "learn"
    """Largest k3 of a response and of a step (docs/tripwires.md); responses beyond the limit are dropped. "learn"
    derives the limit from the first steps."""
    max_native_flip: Literal["learn", "off"] | OpenShare = "learn"
    """Largest share of (token, layer) pairs in which the training routers choose other experts than the rollout; off by
    itself without routes. "off" also stops the search for foreign rows, and requests no routes unless replay or traces
    need routes."""
    max_bad_steps: Count = 3
    """The run stops after this number of steps in a row that lose more than a quarter of the responses, or after as
    many steps in which smaller drops persist; the first step after a start stops the run at once. 0: never."""

    @property
    def _named(self) -> Any:
        """The Objective or function named by ``objective``."""
        if self.objective in OBJECTIVES:
            return OBJECTIVES[self.objective]
        return load_plug("objective", self.objective, OBJECTIVES)

    @property
    def resolved_objective(self) -> Objective:
        """The objective with its parts replaced; for a function, the parts around the function. ConfigError for parts
        that contradict each other."""
        whole = self._named if self.objective_function is None else _AROUND_A_FUNCTION
        return make(Objective, self.objective_overrides, whole, _load_part)

    @property
    def objective_function(self) -> Callable[[Any], Any] | None:
        """The user's function of the columns, if the objective is a function; see
        ``megarl.core.objectives.functions``."""
        objective = self._named
        return None if isinstance(objective, Objective) else objective

    def rows(self) -> Iterable[Row]:
        function = self.objective_function
        if function is not None:
            check_function("objective", self.objective, function, "columns", "an Objective or ")
        for key in self.objective_overrides:
            is_computed = function is not None and key not in _PARTS_AROUND
            yield self.row("overrides_of_function", is_computed, key=key, parts=", ".join(_PARTS_AROUND))
        try:
            _ = self.resolved_objective
        except ConfigError as error:
            yield True, f"objective_overrides: {str(error).removeprefix('objective: ')}"
        # What training records itself closes no gap between the engines, and hides a change of the policy.
        yield from self.only_with('replay = "r3"', self.replay == "r3", "replay_gates", "replay_indexer")


def _load_part(key: str, path: str) -> Any:
    return check_function(key, path, load_plug(key, path), OWN_PARTS[key])


class Schedule(Table):
    """Learning rate and weight decay; steps are optimizer steps."""

    lr: PositiveFloat
    """Peak learning rate."""
    min_lr: NonNegative = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: Count = 0
    """Optimizer steps of linear warm-up from 0."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""

    def rows(self) -> Iterable[Row]:
        yield self.row("min_lr", self.min_lr > self.lr)


class OptimConfig(Schedule):
    """[optim]: Adam and its learning-rate schedule, counted in optimizer steps."""

    decay_steps: PositiveInt | None = None
    """Optimizer steps until min_lr, warm-up included; default all steps of the run."""
    decay_style: DecayStyle = "constant"
    """Shape of the decay."""
    adam_beta1: Beta = 0.9
    """Decay of the first moment."""
    adam_beta2: Beta = 0.95
    """Decay of the second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment."""
    clip_grad: NonNegative = 1.0
    """Largest global gradient norm; 0 = no clipping."""

    def rows(self) -> Iterable[Row]:
        yield from super().rows()
        yield self.row("warmup_steps", self.decay_steps is not None and self.warmup_steps >= self.decay_steps)
