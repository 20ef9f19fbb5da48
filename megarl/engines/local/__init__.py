"""The engine on transformers, in the trainer's own process.

``engine`` has requests, weights, batches, and the arithmetic of FP8. ``decode`` is the loop over tokens: it draws from
the sampling distribution, and reads the routes off the calls of the experts.
"""
