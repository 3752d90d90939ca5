"""Memory of operators besides their results."""

import pytest
import torch
from torch.fx import Graph

from inductor_passes.scheduling.memory import live_bytes


@pytest.mark.parametrize(("heads", "more"), [(8, 0), (2, 2 * 2)])
def test_the_backward_of_attention_has_a_sum_in_float32_and_gradients_for_each_head(heads: int, more: int) -> None:
    graph = Graph()
    shapes = {"gradient": 8, "query": 8, "key": heads, "value": heads}
    inputs = []
    for name, count in shapes.items():
        inputs.append(graph.placeholder(name))
        inputs[-1].meta["val"] = torch.empty(1, count, 16, 4, dtype=torch.bfloat16)
    attention = graph.call_function(torch.ops.aten._scaled_dot_product_flash_attention_backward.default, (*inputs,))
    after = graph.call_function(torch.ops.aten.neg.default, (attention,))
    memory = live_bytes([attention, after], {attention: 1000}, {}, lambda node: [*node.users])
    assert memory.during == [1000 + (4 + more) * 8 * 16 * 4, 1000]
    assert memory.before == [0, 1000, 0]
