"""Warnings of schedules that are worse than planned: once, by name, and from a warm cache too."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import ir
from torch._inductor.scheduler import Scheduler
from torch._inductor.utils import fresh_cache

from simplefsdp import simple_fsdp
from simplefsdp.compile import passes
from tests.ranks import fake_group

pytestmark = [pytest.mark.compile, pytest.mark.subprocess]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def trained(model: nn.Module, *inputs: Any, **options: Any) -> Callable[..., Any]:
    compiled = torch.compile(model, backend="simplefsdp", options={"plan": "block", **options})
    compiled(*inputs).sum().backward()
    return compiled


class _Block(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x).relu()
        if self.breaks:
            torch._dynamo.graph_break()
        return self.two(x)


class _Blocks(nn.Module):
    """Graph breaks ``"within"`` its blocks, ``"between"`` them, or nowhere."""

    def __init__(self, breaks: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block(breaks == "within") for _ in range(3))
        self.breaks = breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.breaks == "between":
                torch._dynamo.graph_break()
        return x


@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize("breaks", ["within", "between"])
def test_a_graph_break_that_splits_a_bucket_is_named(caplog: pytest.LogCaptureFixture, breaks: str) -> None:
    torch._dynamo.reset()
    compiled = trained(simple_fsdp(_Blocks(breaks)), torch.ones(4, 8), lower_with="aot_eager")
    with torch.no_grad():  # other graphs of the same parameters
        compiled(torch.ones(4, 8))
    compiled(torch.ones(2, 8)).sum().backward()
    expected = (
        "a graph break splits the bucket of layers.0.one.weight .. layers.0.two.weight (2): layers.0.one.weight and "
        "layers.0.two.weight are in graphs of their own, gathered and reduced apart, and hidden by nothing in the "
        "other graph; TORCH_LOGS=graph_breaks says where it is"
    )
    assert warnings(caplog) == [expected] * (breaks == "within")


def earlier(kernels: list[Any]) -> list[Any]:
    """With a wait right behind the gather that it is for, where compute was between."""
    names = {name: i for i, kernel in enumerate(kernels) for name in kernel.get_buffer_names()}
    for i, kernel in enumerate(kernels):
        if isinstance(kernel.node, ir._WaitKernel):
            gather = max(names[dep.name] for dep in kernel.read_writes.reads if dep.name in names)
            if any(not isinstance(other.node, ir._CollectiveKernel) for other in kernels[gather + 1 : i]):
                return [*kernels[: gather + 1], kernel, *kernels[gather + 1 : i], *kernels[i + 1 :]]
    return kernels


def a_little_earlier(kernels: list[Any]) -> list[Any]:
    """With a wait earlier by a kernel of compute, and so in the same place among collectives."""
    for i, kernel in enumerate(kernels[1:], 1):
        if isinstance(kernel.node, ir._WaitKernel) and not isinstance(kernels[i - 1].node, ir._CollectiveKernel):
            return [*kernels[: i - 1], kernel, kernels[i - 1], *kernels[i + 1 :]]
    return kernels


@pytest.mark.parametrize(
    ("move", "named"),
    [
        (earlier, "the wait for all_gather_into_tensor of "),
        (a_little_earlier, "the wait for "),
        (lambda kernels: kernels, ""),
    ],
)
def test_a_pass_that_moves_a_wait_afterwards_is_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, move: Any, named: str
) -> None:
    last = Scheduler.compute_last_usage

    def foreign(self: Any) -> None:
        self.nodes = move(self.nodes)
        last(self)

    monkeypatch.setattr(Scheduler, "compute_last_usage", foreign)
    with fresh_cache():
        for world in ("cold", "warm"):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            caplog.clear()
            with fake_group(4):
                compiled = trained(simple_fsdp(_Blocks()), torch.ones(4, 8))
                compiled(torch.ones(4, 8)).sum().backward()
            assert torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"] == (world == "warm")
            found = warnings(caplog)
            assert bool(found) == bool(named)
            assert all("another pass has moved, after the plan was carried out: " + named in line for line in found)
            assert len(found) <= 2, "one for each graph"


def test_a_chain_that_was_not_identified_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    identify = passes.identify
    monkeypatch.setattr(passes, "identify", lambda graph, params: [*identify(graph, params), "layers.1.weight"])
    expected = "no bucket for the gradients of layers.1.weight: their reductions were not recognised"
    with fresh_cache():
        for _ in ("cold", "warm"):
            torch._dynamo.reset()
            caplog.clear()
            with fake_group(4):
                compiled = trained(simple_fsdp(nn.Linear(8, 8)), torch.ones(4, 8))
                compiled(torch.ones(4, 8)).sum().backward()
            assert warnings(caplog) == [expected]
