"""CUDA: memory that torch gives to libraries."""

import os

import torch

_KEPT = "TORCH_CUBLAS_WORKSPACE_CACHE"
"""The environment variable by which torch keeps a workspace for each stream, as it always did before 2.15."""


def matmul_workspace_bytes() -> int:
    """Return how many bytes torch allocates for cuBLAS when a matmul is launched, and frees behind it."""
    size = getattr(torch._C, "_cuda_getCublasWorkspaceSize", None)
    if size is None or os.environ.get(_KEPT) == "1" or not torch.cuda.is_available():
        return 0
    return int(size())
