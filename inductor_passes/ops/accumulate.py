"""The operators that add up full gradients on each rank, and reduce the sum with the last micro-batch.

::

    full gradient - accumulate(receiver) -> gradient of the receiver                every micro-batch but the last
    full gradient - add_up(proxy) - [pad] - reduction - wait -> ...                 the last

A *proxy* is a leaf of the shape of the full gradient and the dtype of the sum, without the memory of one; its ``grad``
is the sum (``simplefsdp/frontend/gradient_accumulation.py``). Compiled code that does not reduce has a *receiver* in
its place: a leaf without dimensions whose value is the number of a proxy, also if a graph is given a copy of it.
``accumulate`` adds to the sum in place, as soon as the gradient is there: if the graph returned all full gradients for
autograd to add, there would be twice the memory of a sum. A backward that fails half-way leaves sums that nobody can
use; whoever needs them next is told, and they are dropped.

``add_up`` takes the sum away when it runs, from the proxy that was offered and has the same storage, as a graph may be
given another tensor of that storage. So one graph serves all accumulations, and a parameter that is read twice gets the
sum once, also where a reentrant checkpoint begins a backward in a backward. A backward may fail, or be asked for other
gradients than the parameter's: the sum is gone only once the parameter has got its gradient in the backward that took
the sum.
"""

import functools
import itertools
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from inductor_passes.ops.pack import LIBRARY
from inductor_passes.torch_compat.autograd import after_backward, current_backward, is_due, is_nested


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


def _offer_of(proxy: Tensor) -> _Offer | None:
    return _offers.get(proxy.untyped_storage()._cdata)


def is_taken(proxy: Tensor) -> bool:
    """Return whether a backward has taken the sum in which the parameter has not got its gradient yet."""
    offered = _offer_of(proxy)
    return offered is not None and offered.taken is not None


def received(proxy: Tensor) -> None:
    """Note that the parameter has got its gradient, with the sum that the same backward has taken."""
    offered = _offer_of(proxy)
    if offered is not None and offered.backward == current_backward():
        offered.taken = None


def restore(proxy: Tensor) -> None:
    """Put back a sum that was taken without reaching the parameter; to be called between backwards."""
    if (offered := _offer_of(proxy)) is not None:
        offered.restore()


@dataclass(eq=False)
class _Sum:
    """The sum that a receiver stands for."""

    proxy: Tensor
    receiver: TensorWeakRef
    backward: int = -1
    """Number of the backward that adds to the sum and is not over; -1: none."""


_sums: WeakValueDictionary[int, _Sum] = WeakValueDictionary()
"""Sums, by the number that is the value of their receiver."""
_sum_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The sum of each receiver, which lives as long as the receiver does."""
_numbers = itertools.count(1)
_under_way: list[_Sum] = []
"""The sums that a backward has added to which is not over, or has failed."""


def receiver_of(proxy: Tensor) -> Tensor:
    """Return a new receiver: a float64 leaf on CPU, for whose gradient ``accumulate`` adds to the sum of ``proxy``."""
    number = next(_numbers)
    receiver = torch.tensor(float(number), dtype=torch.float64).requires_grad_(proxy.requires_grad)
    _sums[number] = _sum_of[receiver] = _Sum(proxy, TensorWeakRef(receiver))
    return receiver


def check_complete() -> None:
    """Drop sums that a backward has added to and failed; to be called outside of that backward.

    Raises:
        RuntimeError: there are such sums.
    """
    backward = current_backward()
    failed = [each for each in _under_way if each.backward != backward]
    if failed and not is_nested():  # or else they are of the backward around this one
        _under_way[:] = [each for each in _under_way if each.backward == backward]
        for each in failed:
            each.proxy.grad, each.backward = None, -1
        raise RuntimeError(
            f"a backward failed after it had added to the sums of {len(failed)} parameters in a gradient accumulation; "
            "these sums were dropped: go back to the first micro-batch of the step"
        )


def accumulate(gradient: Tensor, receiver: Tensor, dtype: torch.dtype) -> Tensor:
    """Add ``gradient`` to the sum that ``receiver`` stands for, if its backward is asked for it; return a zero.

    Args:
        gradient: of the shape of the sum.
        receiver: the receiver or a copy of it.
        dtype: of the sum.

    Raises:
        RuntimeError: an earlier backward failed while it added up.
    """
    found, backward = _sums.get(int(receiver)), current_backward()
    leaf: Tensor | None = None if found is None else found.receiver()
    if found is None or leaf is None:
        raise RuntimeError("a gradient has come for an accumulation that is over and forgotten")
    if backward == -1 or is_due(leaf, backward):
        if found.backward not in (-1, backward):
            check_complete()
        if backward != -1 and found.backward == -1:
            if not _under_way or _under_way[-1].backward != backward:
                after_backward(functools.partial(_finish, backward))
            found.backward = backward
            _under_way.append(found)
        _add(found.proxy, gradient, dtype)
    return torch.zeros((), dtype=torch.float64)


def _add(proxy: Tensor, gradient: Tensor, dtype: torch.dtype) -> None:
    if proxy.grad is None:
        proxy.grad = torch.empty(gradient.shape, dtype=dtype, device=gradient.device).copy_(gradient)
    elif torch.promote_types(gradient.dtype, dtype) == dtype:
        proxy.grad.add_(gradient)
    else:
        proxy.grad.add_(gradient.to(dtype))


def _finish(backward: int) -> None:
    for each in _under_way:
        if each.backward == backward:
            each.backward = -1
    _under_way[:] = [each for each in _under_way if each.backward != -1]


def _zero(_gradient: Tensor, receiver: Tensor, _dtype: torch.dtype) -> Tensor:
    return receiver.new_empty(())


def add_up(gradient: Tensor, proxy: Tensor) -> Tensor:
    """Return ``gradient`` in the dtype of ``proxy``, plus the offered sum if there is one: new memory, contiguous."""
    result = torch.empty(gradient.shape, dtype=proxy.dtype, device=gradient.device)
    storage, backward = proxy.untyped_storage()._cdata, current_backward()
    if any(each.proxy.untyped_storage()._cdata == storage for each in _under_way if each.backward != backward):
        check_complete()
    offered = _offers.get(storage)
    if offered is not None and offered.backward != backward != -1:
        if offered.taken is not None and is_nested():  # the backward around this one has it
            return result.copy_(gradient)
        offered.restore()
        offered.taken, offered.proxy.grad, offered.backward = offered.proxy.grad, None, backward
        if offered.taken is not None:
            return torch.add(offered.taken, gradient, out=result)
    return result.copy_(gradient)


def _shape(gradient: Tensor, proxy: Tensor) -> Tensor:
    return torch.empty(gradient.shape, dtype=proxy.dtype, device=gradient.device)


_TAGS = (torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe)  # a replayed graph would find nothing
LIBRARY.define("add_up(Tensor gradient, Tensor proxy) -> Tensor", tags=_TAGS)
LIBRARY.define("accumulate(Tensor gradient, Tensor receiver, ScalarType dtype) -> Tensor", tags=_TAGS)
for _function, _fake in ((add_up, _shape), (accumulate, _zero)):
    LIBRARY.impl(_function.__name__, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"simplefsdp::{_function.__name__}", _fake, lib=LIBRARY)

ADD_UP = torch.ops.simplefsdp.add_up.default
ACCUMULATE = torch.ops.simplefsdp.accumulate.default
