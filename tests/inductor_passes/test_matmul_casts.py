"""Matmuls on GPUs make gradients in the dtype of their reduction; graphs of tensors on devices that are not there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from inductor_passes.collectives import FQNS, WIRE_FORMAT, Collective, before_cast_and_pad, reductions
from inductor_passes.fusion import can_be_reduced_in_place
from inductor_passes.matmul_casts import cast_in_matmuls, cast_what_is_encoded
from tests.graphs import ALL_REDUCE, REDUCE_SCATTER, WAIT, nodes

_aten = torch.ops.aten
RANKS = 4


def yes(_: Collective) -> bool:
    return True


def gradient(
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    reduce_dtype: torch.dtype = torch.float32,
    read_twice: bool = False,
    all_reduce: bool = False,
    make: Any = _aten.mm.default,
) -> Graph:
    """The gradient of a weight (16, 8), made by ``make``, turned around twice, cast and reduced."""
    graph = Graph()
    with FakeTensorMode():

        def call(target: Callable[..., Any], *args: Any) -> Node:
            node = graph.call_function(target, args)
            node.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, Node) else arg for arg in args))
            return node

        one, other = graph.placeholder("one"), graph.placeholder("other")
        one.meta["val"] = torch.empty(16, 32, dtype=dtype, device=device)
        other.meta["val"] = torch.empty(32, 8, dtype=dtype, device=device)
        made = call(_aten.t.default, call(_aten.t.default, call(make, one, other)))
        results = [call(_aten.neg.default, made)] if read_twice else []
        cast = graph.call_function(_aten._to_copy.default, (made,), {"dtype": reduce_dtype})
        cast.meta["val"] = made.meta["val"].to(reduce_dtype)
        reduced = call(REDUCE_SCATTER, cast, "sum", RANKS, "0")
        reduced.meta[FQNS] = ("weight",)
        reduced = call(WAIT, reduced)
        if all_reduce:
            reduced = call(ALL_REDUCE, reduced, "sum", "1")
            reduced.meta[FQNS] = ("weight",)
            reduced = call(WAIT, reduced)
        graph.output((reduced, *results))
    return graph


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("one_of_four")
def test_the_cast_goes_into_the_matmul_and_the_gradient_is_reduced_where_it_lies(dtype: torch.dtype) -> None:
    graph = gradient(dtype=dtype)
    assert not can_be_reduced_in_place(reductions(graph)[0])
    assert cast_in_matmuls(graph, yes) == ["weight"]
    (matmul,) = nodes(graph, _aten.mm.dtype)
    assert matmul.args[2] is torch.float32
    assert {node.meta["val"].dtype for node in graph.nodes if node.op == "call_function"} == {torch.float32}
    assert not nodes(graph, _aten.mm.default) + nodes(graph, _aten._to_copy.default)
    assert can_be_reduced_in_place(reductions(graph)[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float32},
        {"reduce_dtype": torch.float64},
        {"read_twice": True},
        {"all_reduce": True},
        {"make": lambda one, other: (one.float() @ other.float()).to(one.dtype)},
    ],
)
@pytest.mark.usefixtures("one_of_four")
def test_any_other_gradient_stays_as_it_is(changes: dict[str, Any]) -> None:
    graph = gradient(**changes)
    before = str(graph)
    assert cast_in_matmuls(graph, yes) == []
    assert str(graph) == before


@pytest.mark.usefixtures("one_of_four")
def test_a_gradient_that_is_encoded_after_all_is_cast_behind_its_matmul_again() -> None:
    graph = gradient()
    cast_in_matmuls(graph, yes)
    assert cast_what_is_encoded(graph) == []
    assert nodes(graph, _aten.mm.dtype)
    (issued,) = nodes(graph, REDUCE_SCATTER)
    issued.meta[WIRE_FORMAT] = "int8"
    assert cast_what_is_encoded(graph) == ["weight"]
    (matmul,) = nodes(graph, _aten.mm.default)
    assert not nodes(graph, _aten.mm.dtype)
    (cast,) = nodes(graph, torch.ops.prims.convert_element_type.default)
    assert issued.args[0] is cast
    assert cast.meta["val"].dtype is torch.float32
    assert before_cast_and_pad(cast) is cast.args[0]
    assert {node.meta["val"].dtype for node in (matmul, *nodes(graph, _aten.t.default))} == {torch.bfloat16}


@pytest.mark.usefixtures("one_of_four")
def test_a_cast_that_is_not_allowed_stays() -> None:
    graph = gradient()
    asked = []

    def no(reduction: Collective) -> bool:
        asked.append(reduction.fqns)
        return False

    assert cast_in_matmuls(graph, no) == []
    assert asked == [("weight",)]
    assert len(nodes(graph, _aten.mm.default)) == 1
