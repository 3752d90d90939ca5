"""In hybrid shard, gradients in a wire format are summed among shards, then gathered and summed among replicas."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from inductor_passes.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, gathers, gathers_sums, reductions
from inductor_passes.ops.encode import DECODE_SUMS, ENCODE_GRADIENTS, ENCODE_SUMS
from inductor_passes.runtime.agreement import forget_failures
from inductor_passes.torch_compat.distributed import group_ranks
from simplefsdp import WireFormat, simple_fsdp
from simplefsdp.frontend.wire_format import sends_less_to_replicas
from tests.compare import trained_to_the_bits_of_eager, whole
from tests.graphs import capture, nodes
from tests.models import batch, tiny_llama
from tests.ranks import Ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FORMATS: dict[str, Any] = {
    "none": WireFormat(reduce="int8-hadamard-stochastic"),
    "block": WireFormat("int8", "int8", between_nodes="int4"),
    "auto": {"*": WireFormat(reduce="bf16-fp32sum"), "*norm*": WireFormat(reduce="int8", between_nodes="int4")},
}
"""Formats by the plan that they are compiled under."""


def _mesh(replicas: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replicate", "shard"))


def _llama(wire: Any) -> nn.Module:
    return simple_fsdp(tiny_llama(ffn_dim=9), _mesh(), mp_policy=BF16, wire=wire)


@pytest.mark.parametrize(
    "plan", ["block", *(pytest.param(plan, marks=pytest.mark.slow) for plan in FORMATS if plan != "block")]
)
def test_compiled_training_has_the_bits_of_eager(four_ranks: Ranks, plan: str) -> None:
    four_ranks.run(_bits, plan)


def _bits(plan: str) -> None:
    trained_to_the_bits_of_eager(lambda: _llama(FORMATS[plan]), plan=plan, profile="h100/h100-8-nodes")


@pytest.mark.parametrize(
    ("policy", "divide_factor"),
    [
        (BF16, None),
        (BF16, 2.0),
        (BF16, 3.0),
        (MixedPrecisionPolicy(torch.float16, torch.float16), None),
        (MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16), 2.0),
    ],
)
def test_gradients_are_near_to_those_of_full_precision_and_the_same_on_all_replicas(
    four_ranks: Ranks, policy: MixedPrecisionPolicy, divide_factor: float | None
) -> None:
    four_ranks.run(_near, policy, divide_factor)


def _near(policy: MixedPrecisionPolicy, divide_factor: float | None) -> None:
    mesh, gradients = _mesh(), list[torch.Tensor]()
    for wire in (None, WireFormat(reduce="int8"), WireFormat(reduce="int8", between_nodes="int4")):
        model = simple_fsdp(
            tiny_llama(ffn_dim=9), mesh, mp_policy=policy, wire=wire, gradient_divide_factor=divide_factor
        )
        tokens, targets = batch(0, dist.get_rank())
        nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten()).backward()
        for param in model.parameters():
            local = param.grad.to_local()
            others = [torch.empty_like(local) for _ in range(2)]
            dist.all_gather(others, local.contiguous(), mesh.get_group("replicate"))
            assert torch.equal(*others)
        gradients.append(torch.cat([whole(param.grad).flatten() for param in model.parameters()]))
    exact, eight_bits, four_bits = gradients
    of_eight, of_four = (float((found - exact).norm() / exact.norm()) for found in (eight_bits, four_bits))
    assert 0 < of_eight < 0.02
    assert 2 * of_eight < of_four < 0.15


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_a_bucket_is_exchanged_among_shards_and_gathered_from_replicas() -> None:
    captured = capture(_llama(WireFormat(reduce="int8", between_nodes="int4")), batch(0, 0)[0], plan="block")
    graph = captured.backward
    exchanged, gathered = nodes(graph, ALL_TO_ALL), [node for node in nodes(graph, ALL_GATHER) if gathers_sums(node)]
    assert len(exchanged) == len(gathered) == len(nodes(graph, DECODE_SUMS)) == len(reductions(graph))
    assert not nodes(graph, ALL_REDUCE)
    assert not {*gathered} & {gather.node for gather in gathers(graph)}
    (sent, *_), (again, *_) = nodes(graph, ENCODE_GRADIENTS), nodes(graph, ENCODE_SUMS)
    assert exchanged[0].args[0] is sent
    assert gathered[0].args[0] is again
    assert sent.args[5] == 1
    assert again.args[1:3] == (2, 1)
    assert again.args[4:] == ("int8", "int4")
    assert group_ranks(str(exchanged[0].args[-1])) == [0, 1]
    assert group_ranks(str(gathered[0].args[-1])) == [0, 2]
    assert all(
        node.args[1] == 2 and node.args[3] == "int4" and node.args[5] == 4.0 for node in nodes(graph, DECODE_SUMS)
    )
    # Each reduction is one collective with a second step, in one bucket.
    for reduction in reductions(graph):
        assert len(reduction.steps) == 2
        assert reduction.steps[1] in gathered


def test_ranks_with_other_formats_between_nodes_are_told_before_they_exchange(four_ranks: Ranks) -> None:
    four_ranks.run(_told)


def _told() -> None:
    wire = WireFormat(reduce="int8", between_nodes="int4" if dist.get_rank() == 2 else "int8")
    for options in ({"mesh": _mesh()}, {"ranks_per_node": 2}):
        torch.manual_seed(0)
        model = simple_fsdp(nn.Linear(8, 8), wire=wire, **options)
        with pytest.raises(RuntimeError, match=r"sharded different models(.|\n)*between_nodes=int4"):
            model(torch.ones(2, 8))
        dist.barrier()
        forget_failures()


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize(("factor", "divisor"), [(2.0, 2.0), (3.0, 1.0), (None, 4.0)])
def test_sums_are_divided_by_what_the_collectives_would_have_divided_by(factor: float | None, divisor: float) -> None:
    model = simple_fsdp(
        tiny_llama(), _mesh(), gradient_divide_factor=factor, wire=WireFormat(reduce="int8", between_nodes="int4")
    )
    decoded = nodes(capture(model, batch(0, 0)[0], plan="block").backward, DECODE_SUMS)
    assert {node.args[5] for node in decoded} == {divisor}


def test_what_sends_fewer_bytes_depends_on_replicas_and_the_dtype_of_the_reduction() -> None:
    fewer = {
        (name, dtype): max((n for n in range(1, 40) if sends_less_to_replicas(name, n, dtype)), default=0)
        for name in ("bf16-fp32sum", "int8", "int4-hadamard")
        for dtype in (None, torch.bfloat16)
    }
    assert fewer == {
        ("bf16-fp32sum", None): 3,
        ("bf16-fp32sum", torch.bfloat16): 1,
        ("int8", None): 7,
        ("int8", torch.bfloat16): 3,
        ("int4-hadamard", None): 15,
        ("int4-hadamard", torch.bfloat16): 7,
    }


@pytest.mark.usefixtures("one_of_four")
def test_a_format_that_sends_no_less_to_replicas_is_refused_or_left_out() -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="wire: weight: between_nodes=") as raised:
        simple_fsdp(
            nn.Linear(8, 8), _mesh(4), mp_policy=policy, wire=WireFormat(reduce="int4", between_nodes="bf16-fp32sum")
        )
    assert str(raised.value) == (
        "wire: weight: between_nodes='bf16-fp32sum' sends no less among 4 replicas than their all-reduce in "
        "torch.bfloat16; what does: 'int4', 'int4-hadamard', 'int4-stochastic', 'int4-hadamard-stochastic'"
    )
    model = simple_fsdp(nn.Linear(8, 8), _mesh(4), mp_policy=policy, wire=WireFormat(reduce="int8"))
    assert model.weight.simple_fsdp_info.communication.two_steps is None
    one = simple_fsdp(nn.Linear(8, 8), _mesh(1), wire=WireFormat(reduce="int8", between_nodes="int4"))
    assert one.weight.simple_fsdp_info.communication.two_steps is None
    model = simple_fsdp(nn.Linear(8, 8), _mesh(4), mp_policy=policy, wire=WireFormat(reduce="int4"))
    two_steps = model.weight.simple_fsdp_info.communication.two_steps
    assert (two_steps.ranks, two_steps.nodes, two_steps.parts, two_steps.to_replicas) == (1, 4, 1, True)
