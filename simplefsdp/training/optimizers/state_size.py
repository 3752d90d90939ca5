"""Bytes of state that an optimizer keeps of a parameter, before it has any: by a step of a copy on fake tensors.

A fake tensor has a shape and no memory, so this costs no more for a large parameter. Numbers that the step reads from
tensors are all one, and then all zero, as steps begin by one number or another; the most that is kept counts.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from simplefsdp.training.optimizers.probe import fresh_copy

_READ_NUMBER = torch.ops.aten._local_scalar_dense.default


class _AllNumbersAre(TorchDispatchMode):
    """Meanwhile a number that is read from a tensor is this one."""

    def __init__(self, number: int):
        super().__init__()
        self._number = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _READ_NUMBER:
            dtype = args[0].dtype
            return (float if dtype.is_floating_point else bool if dtype is torch.bool else int)(self._number)
        return func(*args, **(kwargs or {}))


def state_bytes(optimizer: torch.optim.Optimizer, group: int, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of the tensors that are the state of one parameter after its first step.

    Args:
        optimizer: an optimizer; a copy takes the step.
        group: index of the parameter's group, whose settings count.
        shape: of the parameter, or of this rank's part of it.
        dtype: of the parameter.

    Returns:
        The bytes; those of two moments if the step fails on fake tensors and has made less.
    """
    tried = [_after_a_step(optimizer, group, shape, dtype, number) for number in (1, 0)]
    if not any(completed for _, completed in tried):
        tried.append((2 * math.prod(shape) * dtype.itemsize, True))
    return max(nbytes for nbytes, _ in tried)


def _after_a_step(
    optimizer: torch.optim.Optimizer, group: int, shape: Sequence[int], dtype: torch.dtype, number: int
) -> tuple[int, bool]:
    """Return the bytes of state, and whether the step came to its end."""
    state: dict[Any, Any] = {}
    completed = False
    with FakeTensorMode(allow_non_fake_inputs=True), _AllNumbersAre(number), torch.no_grad(), suppress(Exception):
        param = torch.empty(tuple(shape), dtype=dtype).requires_grad_()
        param.grad = torch.empty_like(param)
        stepping = fresh_copy(optimizer, group)
        stepping.param_groups[0]["params"] = [param]
        state = stepping.state
        with torch.compiler.set_stance("force_eager"):
            type(stepping).step.__wrapped__(stepping)  # type: ignore[attr-defined]
        completed = True
    leaves = tree_leaves([dict(of) for of in state.values()])
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor)), completed
