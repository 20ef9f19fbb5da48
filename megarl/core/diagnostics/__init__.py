"""What tells a healthy run from one that is about to collapse; every number is a mergeable ``Stat``.

measures   entropy, mismatch between the engines, staleness, dead groups, variance of the gradient
tripwires  which sequences disagree too much between the engines to train on
"""
