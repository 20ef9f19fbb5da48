"""``megarl eval``: sample a checkpoint on benchmarks and score it. May import everything up to ``megarl.trainer``.

The way through:

    request      what the command line asks for, checked without torch
    evaluation   the main path: weights, sampling, scores
    scores       avg@k, pass@k, intervals, the printed table
    results      the folder with all results
"""
