"""Checkpoints of a run: written, verified, found again, saved in the background."""
