"""Checkpoints of Hugging Face and Megatron into each other, and into FP8, without building a model.

A conversion can be interrupted and resumed: see ``job``.
"""
