"""Replacements for parts of SGLang that need CUDA; never imported by megarl.

``spec.environment`` puts this folder on the PYTHONPATH of a server process, and only without a CUDA device: Python then
runs ``sitecustomize`` at the start of the process and its children, and finds the stub ``sgl_kernel``.
"""
