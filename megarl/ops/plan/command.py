"""``megarl plan``."""

from pathlib import Path

from megarl.config.command import OnConfiguration, Overrides, command
from megarl.errors import printable


@command
class Plan(OnConfiguration):
    """Estimate memory and batches from the configuration alone; refuse what cannot fit or divide."""

    model: Path | None = None
    """Folder with the model's config.json; default model.path, or the shipped folder of that name."""
    json: bool = False
    """Print the numbers as JSON."""

    def run(self, overrides: Overrides) -> None:
        config = self.load(overrides)
        from megarl.ops.plan import table
        from megarl.ops.plan.plan import plan

        result = plan(config, self.model)
        print(table.to_json(result) if self.json else printable(table.to_text(result, config)))
