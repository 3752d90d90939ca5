"""Each rank makes the rows that it has of a tensor-parallel embedding's gradient."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes.own_rows import make_own_rows
from simplefsdp import rehearsal, simple_fsdp
from tests.graphs import capture
from tests.models import PROFILE, batch
from tests.simplefsdp.frontend.test_tensor_parallel import mesh_of, parallel_llama

COLUMNS = 3


def traced(function: Callable[..., object], *inputs: Tensor) -> GraphModule:
    """The graph of ``function`` with TorchInductor's decompositions."""
    module = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    module.graph.eliminate_dead_code()
    return module


def largest_rows(graph: Graph) -> int:
    """The largest number of rows that any sum by index of a graph has."""
    aten = torch.ops.aten
    targets = aten._unsafe_masked_index_put_accumulate.default, aten.index_put.default
    return max(len(node.meta["val"]) for node in graph.nodes if node.target in targets)


def gradient(values: Tensor, tokens: Tensor, rows: int, padding_idx: int = -1) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(values, tokens, rows, padding_idx, False)


def rows_of(rank: int, size: int, rows: int, padding_idx: int, values: Tensor, tokens: Tensor) -> Tensor:
    return gradient(values, tokens, rows, padding_idx).split(size)[rank].float()


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(2, 12),
    ranks=st.integers(2, 4),
    tokens=st.lists(st.integers(0, 11), min_size=1, max_size=20),
    padding_idx=st.integers(-1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    not_a_number=st.booleans(),
)
def test_the_rows_of_each_rank_have_the_bits_of_the_whole_gradient(
    rows: int, ranks: int, tokens: list[int], padding_idx: int, dtype: torch.dtype, not_a_number: bool
) -> None:
    index = torch.tensor(tokens).remainder(rows).view(1, -1)
    values = torch.randn(1, len(tokens), COLUMNS).to(dtype)
    if not_a_number:
        values[0, 0] = torch.nan
    size = -(-rows // ranks)
    for rank in range(-(-rows // size)):
        module = traced(partial(rows_of, rank, size, rows, padding_idx), values, index)
        expected = module(values, index)
        make_own_rows(module.graph)
        module.recompile()
        assert largest_rows(module.graph) == len(expected) < rows
        torch.testing.assert_close(module(values, index), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("accumulate", [True, False])
def test_rows_that_torch_2_11_adds_are_made_by_their_rank(accumulate: bool) -> None:
    def put(values: Tensor, index: Tensor) -> Tensor:
        zeros = torch.ops.aten.full.default([8, COLUMNS], 0.0)
        return torch.ops.aten.index_put.default(zeros, [index], values, accumulate).split(4)[1]

    inputs = torch.randn(1, 6, COLUMNS), torch.tensor([[7, 0, 5, 7, 3, 4]])
    module = make_fx(put, tracing_mode="fake")(*inputs)
    module.graph.eliminate_dead_code()
    expected = module(*inputs)
    make_own_rows(module.graph)
    module.recompile()
    assert largest_rows(module.graph) == (4 if accumulate else 8)
    assert torch.equal(module(*inputs), expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda values, index: gradient(values, index, 8),
        lambda values, index: sum(gradient(values, index, 8).split(4)),
        lambda values, index: (whole := gradient(values, index, 8), whole.split(4)[0])[0:2],
        lambda values, index: gradient(values, index, 8).split(1, dim=1)[0],
        lambda values, index: torch.ops.aten._unsafe_masked_index_put_accumulate(
            values[0], torch.ones_like(index, dtype=torch.bool).unsqueeze(-1), [index], values
        ).split(4)[0],
    ],
    ids=["all rows", "two parts", "a part and the whole", "columns", "a sum with what was there"],
)
def test_other_sums_stay_whole(function: Callable[..., object]) -> None:
    module = traced(function, torch.randn(1, 8, COLUMNS), torch.arange(8).view(1, 8))
    before = str(module.graph)
    make_own_rows(module.graph)
    assert str(module.graph) == before
    assert largest_rows(module.graph) == 8


@pytest.mark.compile
def test_no_rank_of_a_tensor_parallel_llama_makes_all_rows() -> None:
    with rehearsal.world(8, PROFILE.network):
        mesh = mesh_of(4, 2)
        model = simple_fsdp(parallel_llama(mesh["tp"]), mesh["dp"])
        backward = capture(model, *batch(0, 0), decompositions=select_decomp_table()).backward
        vocabulary = model.tok_embeddings.weight.shape[0]
    assert largest_rows(backward) == vocabulary // 2
