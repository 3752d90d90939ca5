"""Optimizers that take their step on this rank's shards as plain tensors."""

import types
from typing import Any, TypeVar

import torch

from simplefsdp.training.optimizers.claims import claim
from simplefsdp.training.optimizers.closure import loss_of
from simplefsdp.training.optimizers.substitutes import on_shard, substitution

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)

ELEMENTWISE = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
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
    steps, so nothing changes for checkpoints, clipping, hooks, schedulers (built afterwards) or a ``GradScaler``. A
    closure that ``step`` is given is called once, before anything is stepped.

    Raises:
        TypeError: ``optimizer`` is none of torch's elementwise ones (ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax,
            NAdam, RAdam, RMSprop, Rprop, SGD), or of a class of yours made from one: what others do to a part may not
            be what they do to the whole. ``distribute_optimizer`` finds out what they do.
    """
    if type(optimizer) not in ELEMENTWISE:
        names = ", ".join(each.__name__ for each in ELEMENTWISE)
        raise TypeError(
            f"optimizer: expected one of {names}, found {type(optimizer).__name__}; distribute_optimizer() takes others"
        )
    replace_step(optimizer, _step)
    claim((param for group in optimizer.param_groups for param in group["params"]), optimizer)
    return optimizer


def replace_step(optimizer: torch.optim.Optimizer, step: Any) -> None:
    """Let ``optimizer.step(closure)`` call the closure, if any, and then ``step(optimizer)`` without gradients."""

    def with_closure(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        loss = loss_of(closure)
        with torch.no_grad():
            step(self)
        return loss

    hooked = torch.optim.Optimizer.profile_hook_step(with_closure)  # hooks see what they would see without this
    optimizer.step = types.MethodType(hooked, optimizer)  # type: ignore[method-assign]


def _step(optimizer: torch.optim.Optimizer) -> None:
    with substitution(optimizer) as call:
        call([on_shard(param) for group in optimizer.param_groups for param in group["params"]])
