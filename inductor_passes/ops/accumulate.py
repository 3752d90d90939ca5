"""The operator that adds what earlier backwards have added up to a full gradient, in the backward that reduces both.

::

    full gradient - add_up(stand) - [pad] - reduction - wait -> ...

A *stand* is a leaf of the shape of the full gradient and the dtype of the sum, without the memory of one: autograd has
added up its ``grad`` (``simplefsdp/accumulation.py``). The operator takes that away when it runs, from the leaf that
was offered and has the same storage, as a graph may be given another tensor of it. So one graph is for all
accumulations, and what is read twice is added once. A backward may fail, or be asked for other gradients than the
parameter's: unless that has come in the backward that took it, the sum is still there.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from inductor_passes.ops.pack import LIBRARY
from inductor_passes.torch_compat.autograd import current_backward


@dataclass(eq=False)
class _Offer:
    proxy: Tensor
    taken: Tensor | None = None
    """The sum, by a backward whose gradient of the parameter has not come."""
    backward: int = -1
    """Which."""

    def restore(self) -> None:
        taken, self.taken = self.taken, None
        if taken is not None:
            self.proxy.grad = taken if self.proxy.grad is None else taken + self.proxy.grad


_offers: dict[int, _Offer] = {}
"""By storage of the stand."""


def offer(proxy: Tensor) -> None:
    """Let ``add_up`` have what ``proxy`` has."""
    _offers[proxy.untyped_storage()._cdata] = _Offer(proxy)


def withdraw(proxy: Tensor) -> None:
    """Let it have nothing; what was taken for nothing is restored."""
    if (offered := _offers.pop(proxy.untyped_storage()._cdata, None)) is not None:
        offered.restore()


def received(proxy: Tensor) -> None:
    """To be called when the parameter has got its gradient: with what the same backward has taken."""
    offered = _offers.get(proxy.untyped_storage()._cdata)
    if offered is not None and offered.backward == current_backward():
        offered.taken = None


def restore(proxy: Tensor) -> None:
    """Put back what was taken for nothing; between backwards."""
    if (offered := _offers.get(proxy.untyped_storage()._cdata)) is not None:
        offered.restore()


def add_up(gradient: Tensor, proxy: Tensor) -> Tensor:
    """``gradient``, in the dtype of ``proxy``, and what that has added up, if it was offered: new and contiguous."""
    result = torch.empty(gradient.shape, dtype=proxy.dtype, device=gradient.device)
    offered, backward = _offers.get(proxy.untyped_storage()._cdata), current_backward()
    if offered is not None and offered.backward != backward != -1:
        offered.restore()
        offered.taken, offered.proxy.grad, offered.backward = offered.proxy.grad, None, backward
        if offered.taken is not None:
            return torch.add(offered.taken, gradient, out=result)
    return result.copy_(gradient)


def _shape(gradient: Tensor, proxy: Tensor) -> Tensor:
    return torch.empty(gradient.shape, dtype=proxy.dtype, device=gradient.device)


LIBRARY.define(
    "add_up(Tensor gradient, Tensor stand) -> Tensor",
    tags=(torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe),  # a replayed graph would find nothing
)
LIBRARY.impl("add_up", add_up, "CompositeExplicitAutograd")
torch.library.register_fake("simplefsdp::add_up", _shape, lib=LIBRARY)

ADD_UP = torch.ops.simplefsdp.add_up.default
