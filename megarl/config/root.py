"""The whole configuration of a run, and the layout of its ranks."""

from dataclasses import dataclass

from megarl.config import rules
from megarl.config.tables import Tables
from megarl.errors import ConfigError


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


class Config(Tables):
    """A configuration that has been checked: each table by itself, and all together."""

    def check(self) -> None:
        rules.check(self)

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence for each setting that is allowed but biases the gradient; shown at start and by the doctor."""
        return rules.find_warnings(self)

    def check_world_size(self, world_size: int) -> Layout:
        """Divide world_size ranks; ConfigError if the layout or the batch does not come out even."""
        p, n = self.parallel, self.train.mini_batches
        dense, expert = p.tp * p.pp * p.cp, p.ep * p.expert_tp * p.pp
        for names, sizes, product in (
            ("tp * pp * cp", f"{p.tp} * {p.pp} * {p.cp}", dense),
            ("ep * etp * pp", f"{p.ep} * {p.expert_tp} * {p.pp}", expert),
        ):
            if world_size % product:
                raise ConfigError(
                    f"parallel: found {world_size} ranks, expected a multiple of {names} = {sizes} = {product}; start "
                    "another number of processes or change the layout"
                )
        dp = world_size // dense
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
        same = {name: getattr(p, name) for name in ("tp", "pp", "vpp", "cp", "ep")}
        sequences = self.responses_per_step // (n * dp)
        return Layout(
            world_size, **same, dp=dp, etp=p.expert_tp, edp=world_size // expert, sequences_per_rank=sequences
        )

    def to_toml(self) -> str:
        """The resolved configuration as TOML; ``file.parse(tomllib.loads(text))`` equals this one."""
        import tomli_w  # a run writes its configuration; nothing else needs the package

        return tomli_w.dumps(self.model_dump(exclude_none=True))
