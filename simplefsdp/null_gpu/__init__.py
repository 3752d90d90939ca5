"""A GPU that does nothing: torch's own CUDA, Triton and NCCL code, run and logged on a machine without a GPU.

``python -m simplefsdp.null_gpu script.py`` starts a process under it. Nothing of the library imports this package.
"""
