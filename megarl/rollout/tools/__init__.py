"""Tools for multi-turn rollouts: the protocols, a calculator, and Python in a sandbox."""
