"""The engine on transformers, in the trainer's own process.

engine (requests, weights, and batches of what all episodes wait for) -> decode (the loop over tokens), which draws from
a distribution and reads the routes with a recorder. fp8 computes as engines with FP8 kernels do.
"""
