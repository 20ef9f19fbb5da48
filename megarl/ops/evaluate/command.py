"""``megarl gap``; ``megarl eval`` is in ``megarl.commands``, because it asks the doctor first."""

from pathlib import Path
from typing import ClassVar

import pydantic

from megarl import enable_cpu
from megarl.config import process_environment
from megarl.config.command import Overrides, Positional, command


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
    responses: int = 32
    """Responses of each precision."""
    tokens: int = 256
    """Longest response; the configuration's limit if that is lower."""
    max_k3: float = pydantic.Field(1e-2, ge=0)
    """A larger gap per token, as configured, is bad."""
    trust: bool = False
    """As for ``megarl train``."""
    json: bool = False
    """Print everything as JSON."""

    def run(self, overrides: Overrides) -> int:
        enable_cpu()
        from megarl.ops.evaluate.gap import gap_request, measure_and_show
        from megarl.watch.gap_verdict import Limits

        request = gap_request(self, dict(overrides))
        process_environment.apply(request.config)
        return measure_and_show(request, Limits(k3=self.max_k3), self.json)
