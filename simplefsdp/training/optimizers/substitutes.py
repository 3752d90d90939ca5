"""A step of an optimizer on plain tensors that stand in for its parameters.

The optimizer keeps its parameters and its state by parameter; only while its own ``step`` runs does it see substitutes:
this rank's shards, or whole matrices that this rank owns.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from inductor_passes.torch_compat.dtensor import dtensor, local_tensor


class Substitute(NamedTuple):
    """A tensor that is stepped in place of a parameter."""

    param: Tensor
    """The parameter, as the optimizer has it."""
    tensor: Tensor
    """The plain tensor that is stepped, with its ``grad``."""
    is_shard: bool
    """Whether ``tensor`` is this rank's shard of ``param``: state of its shape is then kept as a ``DTensor``."""


Call = Callable[[Sequence[Substitute]], None]
"""Steps some parameters by their substitutes, each in its group and in the order of the optimizer."""


@contextmanager
def substitution(optimizer: torch.optim.Optimizer) -> Iterator[Call]:
    """Take one step of ``optimizer`` by any number of calls, each for other parameters.

    Every call starts from the settings that the groups of parameters had at first, so that counters that an optimizer
    keeps in them (``group["step"]``) go on by one and not by one for each call. At the end the optimizer has its
    parameters again, also after an error.
    """
    groups, state = optimizer.param_groups, optimizer.state
    params = [group["params"] for group in groups]
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def call(substitutes: Sequence[Substitute]) -> None:
        optimizer.state = defaultdict(dict, {key: value for key, value in state.items() if not isinstance(key, Tensor)})
        tensors = {id(param): tensor for param, tensor, _ in substitutes}
        for group, whole, before in zip(groups, params, settings, strict=True):
            group.clear()
            group.update({"params": [tensors[id(param)] for param in whole if id(param) in tensors], **before})
        for param, tensor, _ in substitutes:
            if param in state:
                of = state[param]
                optimizer.state[tensor] = (
                    of if tensor is param else {key: local_tensor(value) for key, value in of.items()}
                )
        try:
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
        finally:
            stepped = optimizer.state
            for each in substitutes:
                if each.tensor in stepped:
                    state[each.param] = _state(each, stepped.pop(each.tensor), state[each.param])
            state.update((key, value) for key, value in stepped.items() if not isinstance(key, Tensor))

    try:
        yield call
    finally:
        optimizer.state = state
        for group, whole in zip(groups, params, strict=True):
            group["params"] = whole


def on_shard(param: Tensor) -> Substitute:
    """Return this rank's shard as a plain tensor of the same memory, with its part of the gradient."""
    if not isinstance(param, DTensor):
        return Substitute(param, param, is_shard=False)
    shard = param._local_tensor.detach().requires_grad_(param.requires_grad)
    shard.grad = local_tensor(param.grad)
    return Substitute(param, shard, is_shard=True)


def _state(of: Substitute, found: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return the state that the optimizer found for a substitute as that of the parameter."""
    if not of.is_shard:
        return found
    param: Any = of.param
    state = {}
    for key, value in found.items():
        if local_tensor(before.get(key)) is value:
            state[key] = before[key]
        elif isinstance(value, Tensor) and value.shape == of.tensor.shape and key != "step":
            state[key] = dtensor(value, param.device_mesh, param.placements, param.shape)
        else:
            state[key] = value
    return state
