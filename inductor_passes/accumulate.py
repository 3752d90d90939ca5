"""The operator that adds what earlier backwards have added up to a full gradient, in the backward that reduces both.

::

    full gradient - add_up(stand) - [pad] - reduction - wait -> ...

A *stand* is a leaf of the shape of the full gradient and the dtype of the sum, without the memory of one: autograd has
added up its ``grad`` (``simplefsdp/accumulation.py``). The operator takes that away when it runs, from the leaf that
was offered and has the same storage, as a graph may be given another tensor of it. So one graph is for all
accumulations, and what is read twice is added once.
"""

import torch
from torch import Tensor

from .copies import LIBRARY

_offered: dict[int, Tensor] = {}
"""Stands by storage."""


def offer(stand: Tensor) -> None:
    """Let the next ``add_up`` have what ``stand`` has."""
    _offered[stand.untyped_storage()._cdata] = stand


def withdraw(stand: Tensor) -> None:
    """Let it have nothing."""
    _offered.pop(stand.untyped_storage()._cdata, None)


def add_up(gradient: Tensor, stand: Tensor) -> Tensor:
    """``gradient``, in the dtype of ``stand``, and what that has added up, if it was offered; contiguous."""
    leaf = _offered.get(stand.untyped_storage()._cdata)
    if leaf is None or leaf.grad is None:
        return torch.empty(gradient.shape, dtype=stand.dtype, device=gradient.device).copy_(gradient)
    total, leaf.grad = leaf.grad, None  # contiguous, as autograd keeps that of a leaf without memory of its own
    return total.add_(gradient)


def _shape(gradient: Tensor, stand: Tensor) -> Tensor:
    return torch.empty(gradient.shape, dtype=stand.dtype, device=gradient.device)


LIBRARY.define(
    "add_up(Tensor gradient, Tensor stand) -> Tensor",
    tags=(torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe),  # a replayed graph would find nothing
)
LIBRARY.impl("add_up", add_up, "CompositeExplicitAutograd")
torch.library.register_fake("simplefsdp::add_up", _shape, lib=LIBRARY)

ADD_UP = torch.ops.simplefsdp.add_up.default
