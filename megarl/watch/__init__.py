"""Signs of a run about to collapse: tripwires, health, the gap between the engines. limits.toml holds all limits."""
