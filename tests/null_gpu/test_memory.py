"""Memory that operators take while they run, as torch's allocator sees it."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from inductor_passes.scheduling.memory import temporary_bytes
from inductor_passes.torch_compat.cuda import matmul_workspace_bytes
from inductor_passes.torch_compat.version import VERSION

_MM, _BMM = torch.ops.aten.mm.out, torch.ops.aten.bmm.out


@pytest.mark.parametrize(("operator", "shape"), [(_MM, (1024, 1024)), (_BMM, (4, 256, 256))])
def test_a_matmul_takes_the_workspace_that_it_is_predicted_to_take(operator, shape):
    factors = [torch.ones(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    product = torch.empty_like(factors[0])
    graph = Graph()
    node = graph.call_function(operator, tuple(map(graph.placeholder, "ab")))
    node.meta["val"] = product
    found = _temporary(lambda: operator(*factors, out=product))
    assert found == temporary_bytes(node)
    assert (found == 0) == (VERSION < (2, 15))


def test_no_workspace_is_predicted_where_torch_keeps_it(monkeypatch):
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    assert matmul_workspace_bytes() == 0


def _temporary(function: Callable[[], Tensor | Sequence[Tensor]]) -> int:
    """Return how many bytes a function takes while it runs, when it runs a second time."""
    function()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before
