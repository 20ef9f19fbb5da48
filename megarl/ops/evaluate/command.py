"""``megarl gap``; ``megarl eval`` is in ``megarl.commands``, because it asks the doctor first."""

from pathlib import Path
from typing import ClassVar

import pydantic

from megarl import enable_cpu
from megarl.config import process_environment
from megarl.config.command import Overrides, Positional, command
from megarl.watch.limits import GAP


@command
class Gap:
    """Compare rollout and training engine on the same responses before a run, and give a verdict: docs/gap.md."""

    takes_keys: ClassVar[bool] = True
    checkpoint: Positional[Path]
    """A Hugging Face folder, a run's folder, or one of its checkpoints."""
    config: Path | None = None
    """The configuration; default that of the run. Its keys are flags."""
    prompts: str | None = None
    """A file or hub name in the place of data.train; needed for a model without a configuration."""
    responses: int = pydantic.Field(32, ge=1)
    """Responses of each precision."""
    tokens: int = pydantic.Field(256, ge=1)
    """Longest response; the configuration's limit if that is lower."""
    max_k3: float = pydantic.Field(GAP.k3, ge=0)
    """A larger gap per token, as configured, is bad."""
    trust: bool = False
    """As for ``megarl train``."""
    json: bool = False
    """Print everything as JSON."""

    def run(self, overrides: Overrides) -> int:
        enable_cpu()
        from megarl.ops.evaluate.gap import find_weights, measure_and_show

        config, checkpoint = find_weights(self.checkpoint, self.config, self.prompts, dict(overrides), self.trust)
        process_environment.apply(config)
        return measure_and_show(config, checkpoint, self.responses, self.tokens, self.max_k3, self.json)
