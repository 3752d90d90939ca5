"""Custom operators: arguments that torch passes differently from version to version."""

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch


def as_dtypes(dtypes: Sequence[torch.dtype | int]) -> list[torch.dtype]:
    """Return the dtypes that an operator in Python gets for a ``ScalarType[]``: numbers before torch 2.12."""
    return [dtype if isinstance(dtype, torch.dtype) else _dtype(dtype) for dtype in dtypes]


@functools.cache
def _dtype(number: int) -> torch.dtype:
    return torch.ops.aten.empty.memory_format([0], dtype=cast(Any, number), device="meta").dtype
