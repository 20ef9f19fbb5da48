"""The whole configuration of a run, and the layout of its ranks."""

from collections.abc import Iterable
from dataclasses import dataclass

from megarl.config.refusals.tables import between_tables, find_warnings, for_ranks
from megarl.config.tables import Tables
from megarl.config.tables.base import Row, refuse


@dataclass(frozen=True, slots=True)
class Layout:
    """How a given number of ranks is divided, all defaults resolved."""

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
    """A checked configuration: each table alone, and all tables together."""

    def rows(self) -> Iterable[Row]:
        return between_tables(self)

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence for each allowed setting that biases the gradient; shown by the run and the doctor."""
        return find_warnings(self)

    def check_world_size(self, world_size: int, start: str = "megarl launch CONFIG") -> Layout:
        """Divide world_size ranks; ConfigError, with the command that starts enough ranks, if the layout or the batch
        does not come out even."""
        refuse(for_ranks(self, world_size, start))
        p = self.parallel
        dp = world_size // (p.tp * p.pp * p.cp)
        sizes = p.model_dump(include={"tp", "pp", "vpp", "cp", "ep"}) | {"dp": dp, "etp": p.expert_tp}
        edp = world_size // (p.ep * p.expert_tp * p.pp)
        return Layout(**sizes, edp=edp, sequences_per_rank=self.responses_per_step // (self.train.mini_batches * dp))

    def to_toml(self) -> str:
        """The resolved configuration as TOML; ``file.parse(tomllib.loads(text))`` equals the configuration."""
        import tomli_w  # only a run writes a configuration and needs the package

        return tomli_w.dumps(self.model_dump(exclude_none=True))
