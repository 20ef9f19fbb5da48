"""``megarl eval``: sample and score a checkpoint on benchmarks. May import everything up to ``megarl.trainer``.

The way through:

    request      the command line, checked without torch
    evaluation   the main path: weights, sampling, scores, the printed table
    gap          ``megarl gap``
"""
