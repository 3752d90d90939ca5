"""Memory of a step outside of a graph, as the graph's plan counts it."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inductor_passes.runtime.agreement import held_bytes
from simplefsdp import muon, simple_fsdp
from simplefsdp.analysis.optimizer_costs import state_of_parameters
from simplefsdp.analysis.prediction import collected_predictions
from simplefsdp.compile.context import compilation_context
from simplefsdp.compile.options import Options
from tests.models import tiny_llama
from tests.ranks import fake_group


def test_a_plan_counts_the_state_of_the_optimizer_that_its_model_has() -> None:
    with fake_group(4):
        model = simple_fsdp(tiny_llama(layers=2))
        params, options = [*model.parameters()], Options(plan="block")
        without = compilation_context(params, options)
        optimizer = muon(model)
        with_muon = compilation_context(params, options)
        assert with_muon.state == state_of_parameters(params)
        assert with_muon.state.resident_bytes < without.state.resident_bytes
        assert with_muon.key != without.key
        del optimizer
        gc.collect()
        assert compilation_context(params, options).key == without.key


class Layer(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x))


@pytest.mark.compile
def test_a_graph_behind_a_graph_break_counts_the_model_and_what_graphs_before_it_hold() -> None:
    options: dict[str, Any] = {"plan": "block", "profile": "h100/h100-1-node", "lower_with": "aot_eager"}
    with fake_group(4), collected_predictions() as found:
        model = simple_fsdp(nn.Sequential(Layer(8, 32), Layer(32, 16)))
        state = state_of_parameters(model.parameters())
        of_first, of_second = (state_of_parameters(layer.parameters()) for layer in model)
        for layer in model:
            layer.compile(backend="simplefsdp", options=options)
        x = torch.ones(64, 8, requires_grad=True)
        hidden = model[0](x)
        by_first = held_bytes()
        assert by_first >= hidden.nbytes
        loss = model[1](hidden).sum()
        assert held_bytes() > by_first
        loss.backward()
        assert held_bytes() == 0
        first, second = found
        assert first.resident_bytes == state.resident_bytes + of_second.gradient_bytes
        assert second.resident_bytes == state.resident_bytes + of_first.gradient_bytes + by_first
        model(x)  # its backward never runs
        assert held_bytes() > 0
        torch.optim.SGD(model.parameters()).step()
        assert held_bytes() == 0
