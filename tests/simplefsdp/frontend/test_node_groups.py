"""Gradients in a wire format are reduced inside of nodes, then between them: the same bits eager and compiled."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from inductor_passes.collectives import ALL_TO_ALL
from inductor_passes.ops.encode import DECODE_SUMS, ENCODE_GRADIENTS, ENCODE_SUMS
from inductor_passes.runtime.agreement import forget_failures
from inductor_passes.torch_compat.distributed import group_ranks
from simplefsdp import WireFormat, simple_fsdp
from simplefsdp.frontend.node_groups import node_groups
from tests.compare import trained_to_the_bits_of_eager, whole
from tests.graphs import capture, nodes
from tests.models import batch, tiny_llama
from tests.ranks import Ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FORMATS: dict[str, Any] = {
    "none": WireFormat(reduce="int8-hadamard"),
    "block": WireFormat("int8", "int8", between_nodes="int4"),
    "auto": {"*": WireFormat(reduce="bf16-fp32sum"), "*norm*": WireFormat(reduce="int8", between_nodes="int4")},
}
"""Formats by the plan that they are compiled under."""


def _llama(wire: Any) -> nn.Module:
    return simple_fsdp(tiny_llama(ffn_dim=9), mp_policy=BF16, wire=wire, ranks_per_node=2)


@pytest.mark.slow
@pytest.mark.parametrize("plan", FORMATS)
def test_compiled_training_has_the_bits_of_eager(four_ranks: Ranks, plan: str) -> None:
    four_ranks.run(_bits, plan)


def _bits(plan: str) -> None:
    trained_to_the_bits_of_eager(lambda: _llama(FORMATS[plan]), plan=plan, profile="h100/h100-8-nodes")


@pytest.mark.parametrize(("between", "allowed"), [(None, 0.01), ("int4", 0.15)])
def test_gradients_are_near_to_those_of_full_precision(four_ranks: Ranks, between: str | None, allowed: float) -> None:
    four_ranks.run(_near, between, allowed)


def _near(between: str | None, allowed: float) -> None:
    gradients: list[torch.Tensor] = []
    for wire in (None, WireFormat(reduce="int8"), WireFormat(reduce="int8", between_nodes=between)):
        model = simple_fsdp(tiny_llama(), wire=wire, ranks_per_node=2 if len(gradients) == 2 else 4)
        tokens, targets = batch(0, dist.get_rank())
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        gradients.append(torch.cat([whole(param.grad).flatten() for param in model.parameters()]))
    exact, one_step, two_steps = gradients
    error, of_one_step = (float((found - exact).norm() / exact.norm()) for found in (two_steps, one_step))
    assert of_one_step < error < allowed


def test_groups_are_made_once_and_are_those_of_the_nodes(four_ranks: Ranks) -> None:
    four_ranks.run(_groups)


def _groups() -> None:
    world, rank = dist.group.WORLD, dist.get_rank()
    assert world is not None
    made = node_groups(world, 2)
    assert made is not None
    assert node_groups(world, 2) is made
    assert (made.ranks, made.nodes) == (2, 2)
    inside, between = group_ranks(made.inside), group_ranks(made.between)
    assert inside == ([0, 1] if rank < 2 else [2, 3])
    assert between == [rank % 2, rank % 2 + 2]
    # One node; a rank on each node; a part of the world with a rank on each node.
    assert node_groups(world, 4) is None
    assert node_groups(world, 1) is None
    assert node_groups(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"].get_group(), 2) is None


def test_ranks_with_other_nodes_are_told(four_ranks: Ranks) -> None:
    four_ranks.run(_other_nodes)


def _other_nodes() -> None:
    world = dist.group.WORLD
    assert world is not None
    node_groups(world, 2)
    # The ranks have agreed on a number before, for another process group of the same ranks.
    group = dist.new_group([0, 1, 2, 3])
    with pytest.raises(RuntimeError, match=r"same process groups for gradients.*on rank 3 'ranks per node: 2.0'"):
        node_groups(group, 2 if dist.get_rank() < 3 else 2.0)  # type: ignore[arg-type]
    dist.barrier()
    forget_failures()


@pytest.mark.usefixtures("one_of_four")
def test_torchruns_number_of_ranks_is_that_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    model = simple_fsdp(nn.Linear(8, 8), wire=WireFormat(reduce="int8", between_nodes="int4"))
    two_steps = model.weight.simple_fsdp_info.communication.two_steps
    assert (two_steps.ranks, two_steps.nodes, two_steps.between_format) == (2, 2, "int4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    model = simple_fsdp(nn.Linear(8, 8), wire=WireFormat(reduce="int8"))
    assert model.weight.simple_fsdp_info.communication.two_steps is None


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_a_bucket_is_exchanged_inside_a_node_then_between_nodes() -> None:
    captured = capture(_llama(WireFormat(reduce="int8", between_nodes="int4")), batch(0, 0)[0], plan="block")
    (encoded, *_), (again, *_) = nodes(captured.backward, ENCODE_GRADIENTS), nodes(captured.backward, ENCODE_SUMS)
    inside, between = nodes(captured.backward, ALL_TO_ALL)[:2]
    assert encoded.args[5] == 2
    assert inside.args[0] is encoded
    assert between.args[0] is again
    assert again.args[1:3] == (2, 2)
    assert again.args[4:] == ("int8", "int4")
    # One of two ranks of a node sends on what both have sent, in half of the bits.
    sent, sent_on = (node.args[0].meta["val"].numel() for node in (inside, between))
    assert 3.8 < sent / sent_on < 4
    decoded = nodes(captured.backward, DECODE_SUMS)
    assert all(node.args[1] == 2 and node.args[3] == "int4" and node.args[5] == 4.0 for node in decoded)
    assert (
        len(nodes(captured.backward, ALL_TO_ALL)) == 2 * len(decoded) == 2 * len(nodes(captured.backward, ENCODE_SUMS))
    )


@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize(
    ("given", "local", "error", "message"),
    [
        (3, None, ValueError, "ranks_per_node: 4 ranks are not whole nodes of 3"),
        (0, None, ValueError, "ranks_per_node: 4 ranks are not whole nodes of 0"),
        (2.0, None, TypeError, "ranks_per_node: expected a number of ranks, found 2.0"),
        (True, None, TypeError, "ranks_per_node: expected a number of ranks, found True"),
        (None, "3", ValueError, "LOCAL_WORLD_SIZE: 4 ranks are not whole nodes of 3"),
    ],
)
def test_bad_numbers_are_refused(
    monkeypatch: pytest.MonkeyPatch, given: Any, local: str | None, error: type[Exception], message: str
) -> None:
    if local:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    with pytest.raises(error) as raised:
        simple_fsdp(nn.Linear(4, 4), wire=WireFormat(reduce="int8"), ranks_per_node=given)
    assert str(raised.value) == message


def test_a_format_between_nodes_needs_one_inside() -> None:
    with pytest.raises(ValueError, match="WireFormat: between_nodes: 'int4' needs a format of reduce, found None"):
        WireFormat(between_nodes="int4")
    with pytest.raises(ValueError, match="WireFormat: between_nodes: unknown format 'int3'"):
        WireFormat(reduce="int8", between_nodes="int3")
