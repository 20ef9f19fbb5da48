"""What an unmodified SGLang lacks on a machine without CUDA; never imported by megarl.

``spec.environment`` puts this folder on the PYTHONPATH of a server process, and only where there is no CUDA device:
Python then runs ``sitecustomize`` at the start of that process and its children, and finds the stub ``sgl_kernel``.
"""
