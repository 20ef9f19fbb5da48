"""Rows as the loss of real TRL: TRL's own gradients, the same ones for any split, refusals, and a learned task."""
