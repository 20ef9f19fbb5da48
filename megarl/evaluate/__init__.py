"""Evaluation of a checkpoint on benchmarks: requests, sampling, figures and the folder that holds the results."""
