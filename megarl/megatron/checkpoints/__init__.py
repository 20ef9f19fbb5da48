"""Checkpoints of a run: saved, verified, found again, loaded.

``checkpoint`` saves and loads, ``background_saver`` saves while training continues, ``state`` is what a checkpoint
holds, ``versions`` adapts to releases of Megatron-Core. May import megatron, but not replay.
"""
