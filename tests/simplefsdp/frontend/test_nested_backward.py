"""A reentrant checkpoint begins a backward in a backward: gradients are added up and reduced as in one."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from inductor_passes.ops.accumulate import ACCUMULATE, ADD_UP, check_complete, offer, received, receiver_of, withdraw
from inductor_passes.torch_compat.autograd import after_backward, is_nested
from simplefsdp import simple_fsdp
from tests import zoo
from tests.compare import same_steps, vectors
from tests.ranks import Ranks
from tests.watch import Watch


class Inside(nn.Module):
    """A checkpointed module; ``outer``: a layer of the module around it, or ``None``."""

    def __init__(self, outer: nn.Module | None) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(zoo.DIM, zoo.DIM), outer

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x).tanh()
        return x if self.outer is None else self.outer(x)


class Layer(nn.Module):
    """A linear layer that can be compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(zoo.DIM, zoo.DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Around(nn.Module):
    """A layer that is read before and behind a reentrant checkpoint, so that the backward in between sees it half done.

    Args:
        is_shared: whether the layer is also read in the checkpoint.
        has_last: whether there is a layer behind, whose gradient comes before the checkpoint is reached.
    """

    def __init__(self, is_shared: bool, has_last: bool = False) -> None:
        super().__init__()
        self.first, self.outer, self.last = Layer(), Layer(), Layer() if has_last else nn.Identity()
        self.inside = Inside(self.outer if is_shared else None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.outer(self.first(x))
        return self.last(self.outer(checkpoint(self.inside, x, use_reentrant=True)))


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("compiled", ["nothing", "all but the checkpoint", "each part"])
def test_what_is_read_around_a_reentrant_checkpoint_is_added_up_once(
    two_ranks: Ranks, compiled: str, is_shared: bool
) -> None:
    two_ranks.run(_added_up_once, compiled, is_shared)


def _added_up_once(compiled: str, is_shared: bool) -> None:
    def wrap(model: nn.Module) -> nn.Module:
        simple_fsdp(model)
        for part in (model.outer, model.inside) if compiled == "each part" else ():
            part.compile(backend="simplefsdp", options={"lower_with": "aot_eager"})
        return model

    torch._dynamo.reset()
    lowering = "aot_eager" if compiled == "all but the checkpoint" else "eager"
    for micro_batches in (1, 3):
        same_steps(lambda: Around(is_shared), lowering, wrap=wrap, micro_batches=micro_batches, steps=2)


class _InBackward(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            ctx.call()
        return grad, None


def test_a_backward_in_another_is_nested() -> None:
    found: list[bool] = []

    def note() -> None:
        found.append(is_nested())

    def note_twice() -> None:
        note()
        after_backward(note)

    def begin_another() -> None:
        note()
        _InBackward.apply(_ones(), note_twice).sum().backward()
        note_twice()

    note()
    _InBackward.apply(_ones(), begin_another).sum().backward()
    thread = threading.Thread(target=note)
    thread.start()
    thread.join()
    #        outside, around, in it, at its end, around, at the end, another thread
    assert found == [False, False, True, True, False, False, False]


class _Add(torch.autograd.Function):
    """Three ones, whose gradient is added to the sum of a receiver."""

    @staticmethod
    def forward(ctx, receiver):
        ctx.receiver = receiver.detach()
        return torch.ones(3)

    @staticmethod
    def backward(ctx, grad):
        return ACCUMULATE(grad, ctx.receiver, torch.float32)


class _AddUp(torch.autograd.Function):
    """A weight, whose gradient comes with the sum of a proxy."""

    @staticmethod
    def forward(ctx, weight, proxy):
        ctx.proxy = proxy
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        return ADD_UP(grad, ctx.proxy), None


def _ones() -> Tensor:
    return torch.ones(3, requires_grad=True)


def _fail() -> None:
    raise ValueError("half-way")


def test_a_backward_in_another_adds_to_the_same_sum() -> None:
    proxy = torch.zeros(()).expand(3).requires_grad_()
    receiver = receiver_of(proxy)

    def add() -> None:
        _Add.apply(receiver).sum().backward()

    (_InBackward.apply(_ones(), add) * _Add.apply(receiver)).sum().backward()  # from the last to the first
    check_complete()
    torch.testing.assert_close(proxy.grad, torch.full((3,), 2.0), rtol=0, atol=0)
    fails = _InBackward.apply(_ones(), _fail)
    with pytest.raises(ValueError, match="half-way"):
        (fails * _InBackward.apply(_ones(), add) * _Add.apply(receiver)).sum().backward()
    with pytest.raises(RuntimeError, match="a backward failed after it had added to the sums of 1 parameters"):
        check_complete()
    assert proxy.grad is None


def test_a_backward_in_another_takes_no_sum_that_the_other_has_taken() -> None:
    proxy, weight = torch.zeros(()).expand(3).requires_grad_(), _ones()
    proxy.grad = torch.full((3,), 5.0)
    offer(proxy)
    weight.register_post_accumulate_grad_hook(lambda _: received(proxy))

    def add() -> None:
        _AddUp.apply(weight, proxy).sum().backward()

    first = _AddUp.apply(weight, proxy)
    (first * _InBackward.apply(_ones(), add) * _AddUp.apply(weight, proxy)).sum().backward()  # from last to first
    withdraw(proxy)
    torch.testing.assert_close(weight.grad, torch.full((3,), 5.0 + 3.0), rtol=0, atol=0)
    assert proxy.grad is None


def test_what_was_added_up_is_reduced_at_the_end_of_the_outer_backward(two_ranks: Ranks) -> None:
    two_ranks.run(_reduced_together)


def _reduced_together() -> None:
    model: Any = simple_fsdp(Around(is_shared=False, has_last=True))
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        loss = model(vectors(0, 0)).square().mean()
        with Watch() as watch:
            loss.backward()
    assert watch.counts["reduce_scatter_tensor_coalesced"] == 1
