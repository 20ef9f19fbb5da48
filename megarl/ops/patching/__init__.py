"""The replay hook for releases of Megatron-Core that lack it, and ``megarl patch``, which puts it in (docs/patches.md).

``VERSION.patch`` is the change for a release, ``patch`` chooses and applies one, ``hunks`` finds the place of a hunk.
Imports the standard library and ``megarl.errors`` alone: the tool runs before torch is installed.
"""
