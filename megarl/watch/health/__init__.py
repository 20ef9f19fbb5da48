"""Is a run healthy? Verdicts from its records: what is seen, since when, what usually causes it, and what to try.

- ``checks``: what each check reads, and what its verdict says; limits are in the table [health];
- ``judgement``: ``judge_run`` for all records at once, ``Health`` for one after the other.

Nothing here imports torch.
"""

from megarl.watch.health.judgement import Health, HealthVerdict, judge_run

__all__ = ["Health", "HealthVerdict", "judge_run"]
