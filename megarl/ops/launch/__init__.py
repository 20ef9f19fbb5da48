"""Starting a run on one machine or on the nodes of a Slurm job, and keeping it going: ``megarl launch``."""
