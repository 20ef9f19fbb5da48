"""``megarl patch`` (docs/patches.md): the replay hook for releases of Megatron-Core that lack the hook.

``patches/VERSION.patch`` is the change of a release; ``patch`` chooses, applies and reverts a patch with git. The tool
imports the standard library, ``megarl.errors`` and two modules of ``megarl.files`` alone: torch need not be installed.
"""
