"""The property that all models must have: sharded training is training of the whole model on all ranks' batches."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from simplefsdp import simple_fsdp
from simplefsdp.frontend.sharding import is_float8
from tests.models import PROFILE, train

LOWERINGS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "aot_eager": {"lower_with": "aot_eager", "plan": "block"},
    "auto": {"lower_with": "aot_eager", "plan": "auto", "profile": PROFILE},
    "inductor": {"plan": "auto", "profile": PROFILE},
}
EVERY_LOWERING = [pytest.param(name, marks=[pytest.mark.slow] if name == "auto" else []) for name in LOWERINGS]
"""For tests of what has to work with each; ``conftest.py`` makes cases of ``"inductor"`` slow."""


def lowered(model: nn.Module, lowering: str, fullgraph: bool = False) -> Any:
    """``model``, to be called: compiled as ``LOWERINGS`` says, or as it is."""
    options = LOWERINGS[lowering]
    return torch.compile(model, backend="simplefsdp", options=options, fullgraph=fullgraph) if options else model


def trained_to_the_bits_of_eager(build: Callable[[], nn.Module], **options: Any) -> Any:
    """Train ``build()`` on a rank as it is, and compiled by ``lower_with="aot_eager"`` with options: to the same bits.

    Returns what ``train`` returns of the compiled one.
    """
    eager, model = build(), build()
    expected = train(eager, eager, 3, dist.get_rank())
    compiled: Any = {"lower_with": "aot_eager", **options}
    forward = torch.compile(model, backend="simplefsdp", fullgraph=True, options=compiled)
    found = train(model, forward, 3, dist.get_rank())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    return found


def vectors(step: int, rank: int, rows: int = 3) -> Tensor:
    """Input of a rank and a step, (rows, 6)."""
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(1000 * step + rank))


def whole(tensor: Any) -> Tensor:
    """The value of a DTensor, or the tensor itself; float8, with which nothing computes, in float32."""
    tensor = tensor.detach()
    if is_float8(tensor.dtype):
        tensor = tensor.float()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same_steps(
    build: Callable[[], nn.Module],
    lowering: str = "eager",
    *,
    wrap: Callable[[nn.Module], nn.Module] = simple_fsdp,
    inputs: Callable[[int, int], Tensor] = vectors,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    steps: int = 5,
    fullgraph: bool = False,
    tolerance: float = 1e-5,
    micro_batches: int = 1,
    resumes: bool = False,
) -> nn.Module:
    """Train ``build()`` sharded, and in one process on the batches of all ranks. Gradients (and which are ``None``),
    parameters and buffers must agree to rounding. Runs on a rank; returns the sharded model.

    Args:
        micro_batches: how many are added up in each step, and reduced together.
        resumes: whether another sharded model goes on after the second step, with the state of the first.
    """
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    model = wrap(build())
    forward = lowered(model, lowering, fullgraph)
    optimizers = [optimizer([p for p in m.parameters() if p.requires_grad], lr=0.05) for m in (plain, model)]
    for step in range(steps):
        if resumes and step == 2:
            state = model.state_dict()
            model = wrap(build())
            model.load_state_dict(state)
            forward = lowered(model, lowering, fullgraph)
            optimizers[1] = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.05)
        for number in numbers_of_micro_batches(model, step, micro_batches):
            batches = [inputs(number, rank) for rank in range(dist.get_world_size())]
            plain(torch.cat(batches)).square().mean().backward()
            forward(batches[dist.get_rank()]).square().mean().backward()
        assert_same(
            {n: p.grad for n, p in model.named_parameters()},
            {n: p.grad for n, p in plain.named_parameters()},
            tolerance,
        )
        for each in optimizers:
            each.step()
            each.zero_grad()
    assert_same(dict(model.named_parameters()), dict(plain.named_parameters()), tolerance)
    assert_same(dict(model.named_buffers()), dict(plain.named_buffers()), tolerance)
    return model


def numbers_of_micro_batches(model: nn.Module, step: int, count: int) -> Iterator[int]:
    """Yield the number of each micro-batch of a step, before the last of which gradients are reduced again."""
    for number in range(step * count, (step + 1) * count):
        if count > 1:
            model.set_requires_gradient_sync((number + 1) % count == 0)
        yield number


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert list(found) == list(expected)
    assert {n for n, t in found.items() if t is None} == {n for n, t in expected.items() if t is None}
    for name, value in expected.items():
        if value is None:
            continue
        allowed = 0.02 if value.dtype is torch.bfloat16 else tolerance
        try:
            torch.testing.assert_close(whole(found[name]), whole(value), rtol=allowed, atol=allowed)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
