"""``megarl launch``: starting a run on one machine or on the nodes of a Slurm job, and restarting after failures."""
