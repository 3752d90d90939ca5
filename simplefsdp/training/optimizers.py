"""Optimizers that take their step on this rank's shards as plain tensors."""

import types
from collections import defaultdict
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from inductor_passes.torch_compat.dtensor import dtensor, local_tensor

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)

_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
)
"""Optimizers in which no value of a parameter depends on another value."""


def step_on_shards(optimizer: Optimizer) -> Optimizer:
    """Let ``optimizer.step()`` compute on this rank's shards as plain tensors, and return ``optimizer``.

    ::

        optimizer = step_on_shards(torch.optim.AdamW(model.parameters(), fused=True))

    With the same ``fused`` or ``foreach`` the values are the same, to the bit; what is saved is the time that the host
    takes to call each operator on a ``DTensor``. By default a GPU's plain tensors are stepped with ``foreach``,
    ``DTensor`` one by one. Parameters, gradients and the optimizer's state remain the ``DTensor`` that they are between
    steps, so nothing changes for checkpoints, clipping, hooks, schedulers (built afterwards) or a ``GradScaler``.

    Raises:
        TypeError: ``optimizer`` is none of torch's elementwise ones (Adadelta, Adagrad, Adam, Adamax, AdamW, RAdam,
            RMSprop, SGD), or of a class of yours made from one: what others do to a part may not be what they do to the
            whole.
        ValueError (by ``step``): a closure is given.
    """
    if type(optimizer) not in _ELEMENTWISE:
        names = ", ".join(each.__name__ for each in _ELEMENTWISE)
        raise TypeError(f"optimizer: expected one of {names}, found {type(optimizer).__name__}")
    step = torch.optim.Optimizer.profile_hook_step(_step)  # hooks see what they would see without this
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


def _step(self: torch.optim.Optimizer, closure: Any = None) -> None:
    if closure is not None:
        raise ValueError("closure: step_on_shards() takes none; compute the gradients before step()")
    whole, state = [group["params"] for group in self.param_groups], self.state
    shards = [[_shard(param) for param in params] for params in whole]
    pairs = [pair for params in zip(whole, shards, strict=True) for pair in zip(*params, strict=True)]
    self.state = defaultdict(dict)
    for param, shard in pairs:
        if param in state:
            self.state[shard] = {key: local_tensor(value) for key, value in state[param].items()}
    try:
        for group, params in zip(self.param_groups, shards, strict=True):
            group["params"] = params
        type(self).step.__wrapped__(self)  # type: ignore[attr-defined]
    finally:
        stepped, self.state = self.state, state
        for group, params in zip(self.param_groups, whole, strict=True):
            group["params"] = params
        for param, shard in pairs:
            if shard in stepped:
                state[param] = _of(param, stepped[shard], state[param])


def _shard(param: Tensor) -> Tensor:
    """Return this rank's shard as a plain tensor of the same memory, with its part of the gradient."""
    if not isinstance(param, DTensor):
        return param
    shard = param._local_tensor.detach()
    shard.grad = local_tensor(param.grad)
    return shard


def _of(param: Tensor, local: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return the optimizer's state of a shard as that of the parameter."""
    if not isinstance(param, DTensor):
        return local
    found = {}
    for key, value in local.items():
        if local_tensor(before.get(key)) is value:
            found[key] = before[key]
        elif isinstance(value, Tensor) and key != "step":
            found[key] = dtensor(value, param.device_mesh, param.placements, param.shape)
        else:
            found[key] = value
    return found
