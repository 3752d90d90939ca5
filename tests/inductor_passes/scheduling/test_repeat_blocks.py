"""A graph of many blocks, made of one of a few, is what torch makes of the model itself."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from inductor_passes.scheduling.cost_graph import CostGraph
from inductor_passes.scheduling.repeat_blocks import BlocksDifferError, repeat_blocks
from simplefsdp import simple_fsdp
from simplefsdp.compile.backend import trace_cost_graphs
from tests.models import PROFILE, batch, tiny_llama
from tests.ranks import fake_group

pytestmark = pytest.mark.compile


def traced(model: nn.Module, *inputs: Any, reshard: bool = True, lookup: str = "gather") -> tuple[CostGraph, CostGraph]:
    torch._dynamo.reset()
    with fake_group(4):
        simple_fsdp(model, reshard_after_forward=reshard, embedding_lookup=lookup)
        traced = trace_cost_graphs(model, inputs, PROFILE)
    assert traced is not None
    forward, backward = traced
    return forward, backward


def number(fqn: str) -> int | None:
    found = re.match(r"layers\.(\d+)\.", fqn)
    return int(found[1]) if found else None


def renamed(fqn: str, block: int) -> str:
    return re.sub(r"layers\.\d+\.", f"layers.{block}.", fqn)


@pytest.mark.parametrize(
    ("model", "reshard"),
    [
        ({"activation_checkpointing": "block"}, True),
        pytest.param({}, False, marks=pytest.mark.slow),
        pytest.param({"activation_checkpointing": "selective", "tie_embeddings": True}, True, marks=pytest.mark.slow),
    ],
)
def test_a_few_blocks_repeated_are_many(model: dict[str, Any], reshard: bool) -> None:
    few, many = (traced(tiny_llama(layers=layers, **model), *batch(0, 0), reshard=reshard) for layers in (5, 8))
    for graph, expected in zip(few, many, strict=True):
        assert repeat_blocks(graph, 8, number, renamed) == expected
        assert repeat_blocks(graph, 5, number, renamed) == graph
        with pytest.raises(ValueError, match="blocks: expected 5 or more, found 4"):
            repeat_blocks(graph, 4, number, renamed)


def test_exchanges_of_embeddings_stay_before_and_behind_the_blocks() -> None:
    few, many = (traced(tiny_llama(layers=layers), *batch(0, 0), lookup="exchange") for layers in (5, 6))
    for graph, expected, exchanges in zip(few, many, (2, 1), strict=True):
        assert len(graph.exchanges) == exchanges
        assert repeat_blocks(graph, 6, number, renamed) == expected


class _Blocks(nn.Module):
    def __init__(self, *widths: int, shared: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8)) for width in widths
        )
        self.shared = nn.Linear(8, 8) if shared else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.shared(layer(x)).relu()
        return x.sum()


@pytest.mark.parametrize(
    ("widths", "expected"), [((4, 8, 12, 16, 20), "of 5 blocks none is like"), ((8, 8), "of 2 bl")]
)
def test_blocks_that_are_not_alike_are_not_repeated(widths: tuple[int, ...], expected: str) -> None:
    for graph in traced(_Blocks(*widths), torch.ones(4, 8)):
        with pytest.raises(BlocksDifferError, match=expected):
            repeat_blocks(graph, 7, number, renamed)


def test_a_trace_with_one_more_block_shows_whether_blocks_repeat() -> None:
    few, more = (traced(_Blocks(*[8] * layers, shared=True), torch.ones(4, 8)) for layers in (5, 6))
    assert repeat_blocks(few[0], 6, number, renamed) == more[0]
    assert repeat_blocks(few[1], 6, number, renamed) != more[1]  # its gradient is added up


def test_blocks_that_run_in_another_order_are_not_repeated() -> None:
    class Shuffled(_Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in (0, 2, 1, 3, 4):
                x = self.layers[i](x)
            return x.sum()

    forward, _ = traced(Shuffled(*[8] * 5), torch.ones(4, 8))
    with pytest.raises(BlocksDifferError, match=r"blocks run in the order \[0, 2, 1, 3, 4\]"):
        repeat_blocks(forward, 8, number, renamed)
