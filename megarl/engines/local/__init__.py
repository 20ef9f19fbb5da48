"""The engine on transformers, in the trainer's own process.

``engine`` has requests, weights and batches. ``decode`` is the loop over tokens: it draws from the sampling
distribution, and reads the routes with a ``recorder``. ``fp8`` computes as engines with FP8 kernels do.
"""
