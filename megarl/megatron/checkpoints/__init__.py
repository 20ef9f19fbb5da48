"""Checkpoints of a run: saved, verified, found again, loaded.

``saver`` saves, also while training continues; ``checkpoint`` verifies and loads. ``state`` is the content of a
checkpoint, and the differences between releases of Megatron-Core. ``folders`` puts checkpoints in place and lists
their files.
"""
