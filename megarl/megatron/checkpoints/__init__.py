"""Checkpoints of a run: saved, verified, found again, loaded.

``saver`` saves, also while training continues, ``checkpoint`` verifies and loads. Below them, ``state`` is what a
checkpoint holds, ``folders`` puts it in place, ``manifest`` says what belongs to it, ``versions`` adapts to releases of
Megatron-Core. May import megatron, but not replay.
"""
