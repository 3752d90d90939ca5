"""Gradients that a kernel sums in fp32 are reduced as they are, where a compiler would round nothing anyway."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from inductor_passes.collectives import CASTS, before_cast_and_pad
from inductor_passes.ops.pack import PACK_GRADIENTS
from simplefsdp import simple_fsdp
from tests.graphs import REDUCE_SCATTER, capture, nodes

pytestmark = [pytest.mark.usefixtures("one_of_four"), pytest.mark.compile]

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Scaled(nn.Module):
    """A weight whose gradient is a sum in fp32, with ``rows`` rows, and one whose gradient is made in bf16."""

    def __init__(self, rows: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(rows))
        self.linear = nn.Parameter(torch.ones(rows, 4))

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.linear.T).float() * self.scale.float()).sum()


def reduced(rows: int = 8, plan: object = "none", *, round_gradients: bool) -> list[torch.fx.Node]:
    """The reductions of a backward graph."""
    model = simple_fsdp(Scaled(rows), mp_policy=POLICY)
    inputs = torch.ones(3, 4, dtype=torch.bfloat16)
    captured = capture(model, inputs, plan=plan, round_gradients=round_gradients)
    return nodes(captured.backward, REDUCE_SCATTER)


@pytest.mark.parametrize("rows", [8, 7])
def test_a_sum_in_fp32_is_reduced_without_having_been_rounded(rows: int) -> None:
    rounded, unrounded = (reduced(rows, round_gradients=each) for each in (True, False))
    assert [node.all_input_nodes[0].meta["val"].dtype for node in unrounded] == [torch.float32] * 2
    gradients = [[before_cast_and_pad(node.all_input_nodes[0]) for node in each] for each in (rounded, unrounded)]
    (cast,) = {*map(str, gradients[0])} - {*map(str, gradients[1])}
    dtypes = [sorted(str(node.meta["val"].dtype) for node in each) for each in gradients]
    assert dtypes == [["torch.bfloat16", "torch.bfloat16"], ["torch.bfloat16", "torch.float32"]]
    assert cast in [node.name for node in gradients[0] if node.target in CASTS]


def test_gradients_of_a_bucket_are_packed_in_one_dtype() -> None:
    (reduction,) = reduced(plan="block", round_gradients=False)
    (packed,) = reduction.all_input_nodes
    assert packed.target is PACK_GRADIENTS
    assert [node.meta["val"].dtype for node in packed.all_input_nodes] == [torch.bfloat16] * 2
