"""Is a run healthy? Verdicts from its records: observation, first step, usual cause, and advice.

- ``checks``: inputs of each check, and the words of a verdict; limits are in the table [health];
- ``judgement``: ``judge_run`` for a list of records, ``Health`` for a stream of records.

Nothing here imports torch.
"""

from megarl.watch.health.judgement import Health, HealthVerdict, judge_run

__all__ = ["Health", "HealthVerdict", "judge_run"]
