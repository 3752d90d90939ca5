"""Which optimizer steps which parameter, as far as this library has been told.

Torch tells no parameter of its optimizer. Optimizers that this library makes or changes are noted on their parameters,
so that no parameter gets two of them, and so that a planner knows the memory of their state. (A dictionary with weak
references to parameters would not do: ``module.to()`` cannot exchange a tensor that has one. It loses the note.)
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class _Claim:
    """A note of an optimizer on a parameter; copied or pickled with the parameter's attributes, it becomes ``None``."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = weakref.ref(optimizer)

    def __reduce__(self) -> Any:
        return type(None), ()


def claim(params: Iterable[Any], optimizer: torch.optim.Optimizer) -> None:
    """Note that ``optimizer`` steps these parameters; the last one that says so counts."""
    for param in params:
        param.simple_fsdp_claim = _Claim(optimizer)


def optimizer_of(param: Tensor) -> torch.optim.Optimizer | None:
    """Return the optimizer that was noted for a parameter, while it is in use."""
    found: _Claim | None = getattr(param, "simple_fsdp_claim", None)
    return None if found is None else found.optimizer()
