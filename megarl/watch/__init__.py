"""Signs of a run about to collapse: tripwires, health. limits.toml holds all limits."""
