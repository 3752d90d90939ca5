"""The operator that adds an accumulated gradient to a full gradient, in the backward that reduces both.

::

    full gradient - add_up(proxy) - [pad] - reduction - wait -> ...

A *proxy* is a leaf of the shape of the full gradient and the dtype of the sum, without the memory of one. Autograd has
added up its ``grad`` (``simplefsdp/frontend/gradient_accumulation.py``). The operator takes ``grad`` away when it runs,
from the proxy that was offered and has the same storage, as a graph may be given another tensor of that storage. So one
graph serves all accumulations, and a parameter that is read twice gets the sum once. A backward may fail, or be asked
for other gradients than the parameter's: the sum is gone only once the parameter has got its gradient in the backward
that took the sum.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from inductor_passes.ops.pack import LIBRARY
from inductor_passes.torch_compat.autograd import current_backward


@dataclass(eq=False)
class _Offer:
    """A proxy whose accumulated gradient ``add_up`` may take."""

    proxy: Tensor
    taken: Tensor | None = None
    """The sum, taken by a backward in which the parameter has not got its gradient yet."""
    backward: int = -1
    """Number of the backward that has taken the sum."""

    def restore(self) -> None:
        taken, self.taken = self.taken, None
        if taken is not None:
            self.proxy.grad = taken if self.proxy.grad is None else taken + self.proxy.grad


_offers: dict[int, _Offer] = {}
"""Offers, by the storage of their proxies."""


def offer(proxy: Tensor) -> None:
    """Let ``add_up`` take the accumulated gradient of ``proxy``."""
    _offers[proxy.untyped_storage()._cdata] = _Offer(proxy)


def withdraw(proxy: Tensor) -> None:
    """Take back the offer of ``proxy``; restore a sum that was taken without reaching the parameter."""
    if (offered := _offers.pop(proxy.untyped_storage()._cdata, None)) is not None:
        offered.restore()


def received(proxy: Tensor) -> None:
    """Note that the parameter has got its gradient, with the sum that the same backward has taken."""
    offered = _offers.get(proxy.untyped_storage()._cdata)
    if offered is not None and offered.backward == current_backward():
        offered.taken = None


def restore(proxy: Tensor) -> None:
    """Put back a sum that was taken without reaching the parameter; to be called between backwards."""
    if (offered := _offers.get(proxy.untyped_storage()._cdata)) is not None:
        offered.restore()


def add_up(gradient: Tensor, proxy: Tensor) -> Tensor:
    """Return ``gradient`` in the dtype of ``proxy``, plus the offered sum if there is one: new memory, contiguous."""
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
    "add_up(Tensor gradient, Tensor proxy) -> Tensor",
    tags=(torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe),  # a replayed graph would find nothing
)
LIBRARY.impl("add_up", add_up, "CompositeExplicitAutograd")
torch.library.register_fake("simplefsdp::add_up", _shape, lib=LIBRARY)

ADD_UP = torch.ops.simplefsdp.add_up.default
