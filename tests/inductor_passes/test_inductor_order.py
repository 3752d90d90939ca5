"""The order of Inductor's kernels and of the code that it generates is that of the ordered graph."""

import ast
import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import Graph

from inductor_passes import inductor_order as scheduler
from inductor_passes.collectives import FQNS
from inductor_passes.runtime.record import Record
from inductor_passes.scheduling.order_items import graph_items
from inductor_passes.torch_compat.inductor import NO_OTHER_REORDERING
from simplefsdp import manual_plan, simple_fsdp
from simplefsdp.compile import passes as compilation
from tests.graphs import called_code, capture
from tests.models import batch, tiny_llama

aten = torch.ops.aten


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_kernels_that_were_not_put_in_order_are_an_error(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(scheduler, "order", lambda items: list(range(len(items))))
    model = simple_fsdp(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))))
    compiled = torch.compile(model, backend="simplefsdp", options={"plan": "block"})
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        pytest.raises(Exception, match="the plan is not carried out: at node"),
    ):
        compiled(torch.ones(4, 8))


def _across_a_matmul(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first = x.sin().sum(0)
    return first, ((x @ w) * x).sum(0)


def _side_by_side(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sin().sum(0), (x * w).sum(0)


@pytest.mark.compile
@pytest.mark.parametrize(
    ("function", "context", "kernels"),
    [
        (_across_a_matmul, nullcontext, 1),
        (_across_a_matmul, scheduler.no_sums_across_matmuls, 2),
        (_side_by_side, scheduler.no_sums_across_matmuls, 1),
    ],
)
def test_a_sum_is_fused_with_what_reads_the_same_where_no_matmul_is_between_them(function, context, kernels):
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True), context():
        _, (code,) = run_and_get_code(torch.compile(function), torch.ones(64, 64), torch.ones(64, 64))
    assert code.count("async_compile.cpp_pybinding(") == kernels


@pytest.mark.usefixtures("one_of_four")
@pytest.mark.slow
def test_the_code_that_inductor_generates_has_the_order_of_the_graph():
    model = simple_fsdp(tiny_llama(layers=3))
    captured = capture(model, *batch(0, 0), plan="block")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="simplefsdp", options={"plan": "block"})
    # Also where the user has switched on all that moves kernels.
    with torch._inductor.config.patch({"force_disable_caches": True, **dict.fromkeys(NO_OTHER_REORDERING, True)}):
        _, codes = run_and_get_code(lambda: compiled(*batch(0, 0)).backward())
    assert len(codes) == 2
    calls = re.compile(r"(all_gather_into_tensor|reduce_scatter_tensor|wait_tensor|mm)(?:\.default)?\(")
    for code, graph in zip(codes, (captured.forward, captured.backward), strict=True):
        expected = [str(node.target).split(".")[-2] for node in graph.nodes if calls.search(f"{node.target}(")]
        assert "= body_0(" in code
        body = called_code(code)
        assert calls.findall(body) == expected
        # Ranks compare this order, before the first of its collectives.
        agreement = body.split("all_gather_into_tensor.default(", 1)[0]
        text = re.search(r"simplefsdp\.agree\.default\(\w+, ('.*')\)", agreement)
        found = Record.from_json(ast.literal_eval(text[1]))
        marked = [node for node in graph.nodes if FQNS in node.meta]
        assert [one.fqns for one in found.issued] == [node.meta[FQNS] for node in marked]
        assert len(found.order) == 2 * len(marked)


class _SumOfWeights(nn.Module):
    """Two weights with one gradient, which one mesh all-reduces and the other reduce-scatters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.replicated, self.sharded = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.inner(x), self.replicated.weight + self.sharded.weight).square().sum()


def _code_of_sum_of_weights() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = _SumOfWeights()
    simple_fsdp(model.replicated, mesh["a"], mode="replicate")
    simple_fsdp(model, mesh["b"])
    torch._dynamo.reset()
    options: Any = {"plan": manual_plan(["replicated", "sharded", "inner"], prefetch=2)}
    compiled = torch.compile(model, backend="simplefsdp", options=options)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(lambda: compiled(torch.ones(4, 8)).backward())
    return codes[-1]


@pytest.mark.subprocess
@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_no_all_reduce_works_in_place_on_what_another_collective_reads():
    reductions = r"_c10d_functional\.(?:all_reduce_|reduce_scatter_tensor)\.default\((\w+)"
    inputs = re.findall(reductions, _code_of_sum_of_weights())
    assert len(inputs) == len(set(inputs)) == 3


@pytest.mark.subprocess
@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_a_kernel_that_overwrites_what_a_collective_reads_does_not_pass_it(monkeypatch):
    monkeypatch.setattr(compilation, "let_none_work_in_place_on_the_input_of_another", lambda _graph: None)
    with pytest.raises(Exception, match=r"PlanError: plan: the bucket of sharded.weight .* cannot be carried out"):
        _code_of_sum_of_weights()


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_a_gradient_that_two_members_of_a_bucket_share_counts_for_both():
    model = simple_fsdp(_SumOfWeights())
    plan = manual_plan([["replicated", "sharded"], "inner"])
    backward = capture(model, torch.ones(4, 8), plan=plan).backward
    (packed,) = (item for item in graph_items(backward)[1] if item.kind == "pack")
    assert [fqn for _, fqn in packed.gradients] == ["replicated.weight", "sharded.weight"]
    assert len({position for position, _ in packed.gradients}) == 1


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize("mode", ["fully_shard", "replicate"])
def test_only_an_all_reduce_whose_input_another_collective_reads_gets_a_copy(mode):
    model = simple_fsdp(_SumOfWeights() if mode == "fully_shard" else nn.Linear(8, 8), mode=mode)
    plan = manual_plan(["*"])
    if mode == "fully_shard":
        plan = manual_plan(["replicated", "sharded", "inner"])
    backward = capture(model, torch.ones(4, 8), plan=plan).backward
    assert not backward.find_nodes(op="call_function", target=aten.clone.default)


class Kernel:
    """A kernel of the scheduler, as far as ``order_kernels`` asks, which makes one buffer of its own name."""

    def __init__(self, name: str, *read: str, target: Any = aten.add.Tensor) -> None:
        self.name = name
        self.unmet_dependencies = [SimpleNamespace(name=each) for each in read]
        self.read_writes = SimpleNamespace(reads=self.unmet_dependencies)
        node = Graph().call_function(target)
        self.node = SimpleNamespace(origins=[node])

    def get_buffer_names(self) -> list[str]:
        return [self.name]

    def get_nodes(self) -> list["Kernel"]:
        return [self]


def test_rows_are_added_to_zeros_when_their_sum_is_needed() -> None:
    rows, scale, reduced = Kernel("rows", "x"), Kernel("scale", "rows"), Kernel("reduced", "scale")
    zeros = Kernel("zeros", target=aten.full.default)
    table = Kernel("table", "zeros", "rows", target=aten._unsafe_index_put.default)
    read = Kernel("read", "table")
    ordered = scheduler.order_kernels([zeros, rows, table, scale, reduced, read])
    assert ordered == [rows, scale, reduced, zeros, table, read]
    assert scheduler.order_kernels([zeros, rows, table, scale, reduced]) == [rows, scale, reduced, zeros, table]
    constants = Kernel("constants", target=aten.full.default)  # which nothing adds to
    assert scheduler.order_kernels([constants, rows, scale]) == [constants, rows, scale]
