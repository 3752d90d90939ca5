"""Modes, placements, divide factors and parts with their own settings, on four ranks, against FSDP2."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from inductor_passes.runtime.record import is_collective
from inductor_passes.torch_compat.dtensor import REDUCES_IN_OWN_DTYPE
from simplefsdp import WireFormat, simple_fsdp
from simplefsdp.frontend.sharding import Communication, Group, all_gather, shard
from tests import graphs, zoo
from tests.compare import lowered, same_steps
from tests.models import batch, fsdp2, tiny_llama, train
from tests.ranks import Ranks, fake_group
from tests.watch import Collectives

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
FP32 = MixedPrecisionPolicy()
one_of_four = pytest.mark.usefixtures("one_of_four")


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def set_factor(model: nn.Module, factor: float | None) -> None:
    """Set FSDP2's divide factor; FSDP2 then sums where it would use an operator that gloo lacks."""
    for module in model.modules():
        if factor is not None and hasattr(module, "set_gradient_divide_factor"):
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(factor)


def same_bits_as_fsdp2(
    ours: Callable[[], nn.Module],
    theirs: Callable[[], nn.Module],
    lowering: str,
    steps: int = 5,
    tolerance: float = 0,
) -> None:
    fsdp, model = theirs(), ours()
    expected = train(fsdp, fsdp, steps, dist.get_rank())
    forward = lowered(model, lowering, fullgraph=True)
    found = train(model, forward, steps, dist.get_rank())
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("policy", "factor"),
    [
        (FP32, 2.0),
        pytest.param(BF16, None, marks=pytest.mark.slow),
        pytest.param(FP16, None, marks=pytest.mark.slow),
        pytest.param(BF16, 3.0, marks=pytest.mark.slow),
    ],
)
def test_hybrid_shard_is_bitwise_fsdp2(
    four_ranks: Ranks, lowering: str, policy: MixedPrecisionPolicy, factor: float | None
) -> None:
    four_ranks.run(_hybrid, lowering, policy, factor)


def _hybrid(lowering: str, policy: MixedPrecisionPolicy, factor: float | None) -> None:
    def theirs() -> nn.Module:
        model = fsdp2(tiny_llama(ffn_dim=9), policy, mesh=two_by_two())
        set_factor(model, factor)
        return model

    def ours() -> nn.Module:
        return simple_fsdp(tiny_llama(ffn_dim=9), two_by_two(), mp_policy=policy, gradient_divide_factor=factor)

    same_bits_as_fsdp2(ours, theirs, lowering)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [FP32, BF16])
def test_replicate_with_block_buckets_is_bitwise_fsdp2_of_one_shard(
    four_ranks: Ranks, policy: MixedPrecisionPolicy
) -> None:
    four_ranks.run(_replicate, policy)


def _replicate(policy: MixedPrecisionPolicy) -> None:
    same_bits_as_fsdp2(
        lambda: simple_fsdp(tiny_llama(), mode="replicate", mp_policy=policy),
        lambda: fsdp2(tiny_llama(), policy, mesh=init_device_mesh("cpu", (4, 1), mesh_dim_names=("r", "s"))),
        "aot_eager",
    )


@pytest.mark.parametrize(
    ("mode", "lowering"),
    [
        ("hybrid_shard", "eager"),
        ("hybrid_shard", "aot_eager"),
        ("hybrid_shard", "inductor"),
        ("replicate", "eager"),
        ("replicate", "aot_eager"),
    ],
)
def test_every_kind_of_parameter_trains_in_other_modes(four_ranks: Ranks, mode: str, lowering: str) -> None:
    four_ranks.run(_kinds, mode, lowering)


@pytest.mark.compile
@pytest.mark.parametrize(("mode", "shape"), [("fully_shard", (1,)), ("replicate", (1,)), ("hybrid_shard", (1, 1))])
def test_a_rank_alone_trains_without_collectives(mode: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(9, 6), zoo.Residual(nn.Linear(6, 6), zoo.Scalar(torch.tensor(1.5))))
    tokens = torch.randint(9, (4, 6))
    settings: dict[str, Any] = {"mode": mode, "gradient_divide_factor": 2.0}
    if mode != "replicate":
        settings["wire"] = WireFormat(gather="int8", reduce="int4")
    if mode == "fully_shard":
        settings["embedding_lookup"] = "exchange"
    with fake_group(1):
        mesh = init_device_mesh("cpu", shape)
        eager, compiled = (simple_fsdp(copy.deepcopy(plain), mesh, **settings) for _ in range(2))
        with Collectives() as watch:
            eager(tokens).square().mean().backward()
        captured = graphs.capture(compiled, tokens, plan="block")
        lowered(compiled, "aot_eager", fullgraph=True)(tokens).square().mean().backward()
    assert watch.seen == []
    assert not [node for graph in (captured.forward, captured.backward) for node in graph.nodes if is_collective(node)]
    plain(tokens).square().mean().div(2).backward()
    for model in (eager, compiled):
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad.to_local(), expected.grad)


def _kinds(mode: str, lowering: str) -> None:
    def build() -> nn.Module:
        kinds = ["fewer rows than ranks", "0-dim", "zero-size", zoo.ODD_COMPLEX, "integer", "bool", "float8", "tied"]
        return zoo.Residual(*[zoo.PARAMETERS[kind]() for kind in (*kinds, "LoRA")])

    mesh = two_by_two() if mode == "hybrid_shard" else None
    # Inductor, which takes long, also sees shards along other dims here.
    wrap = functools.partial(
        simple_fsdp, mesh=mesh, mode=mode, shard_placement_fn=_last_dim if lowering == "inductor" else None
    )
    model = same_steps(build, lowering, wrap=wrap, fullgraph=True)
    for param in model.parameters():
        assert isinstance(param, DTensor)
        assert mode == "hybrid_shard" or param.placements == (Replicate(),)


@pytest.mark.compile
@one_of_four
@pytest.mark.parametrize("mode", ["hybrid_shard", "replicate"])
def test_reductions_of_other_modes_are_bucketed_too(mode: str) -> None:
    mesh = two_by_two() if mode == "hybrid_shard" else None
    model = simple_fsdp(tiny_llama(), mesh, mode=mode, mp_policy=BF16)
    captured = graphs.capture(model, *batch(0, 0), plan="block")
    scattered = graphs.fqns(captured.backward, graphs.REDUCE_SCATTER)
    reduced = graphs.fqns(captured.backward, graphs.ALL_REDUCE)
    assert [len(names) for names in reduced] == [2, 9, 9, 9, 1]
    if mode == "replicate":
        assert scattered == []
        return
    assert scattered == reduced
    # The all-reduce takes what the reduce-scatter gives, as it is.
    for node in graphs.nodes(captured.backward, graphs.ALL_REDUCE):
        wait = node.all_input_nodes[0]
        assert (wait.target, wait.all_input_nodes[0].target) == (graphs.WAIT, graphs.REDUCE_SCATTER)


@pytest.mark.slow
def test_shards_along_any_dim_train_as_along_the_first(four_ranks: Ranks) -> None:
    four_ranks.run(_placements)


def _last_dim(param: nn.Parameter) -> Shard | None:
    return Shard(-1) if param.ndim > 1 else None


def _placements() -> None:
    def build() -> nn.Module:
        return zoo.Residual(*[zoo.PARAMETERS[kind]() for kind in ("three dims", "tied", "convolution")])

    for lowering in ("eager", "aot_eager"):
        wrap = functools.partial(simple_fsdp, shard_placement_fn=_last_dim)
        model = same_steps(build, lowering, wrap=wrap, fullgraph=True)
        assert {(p.ndim, p.placements[0].dim) for p in model.parameters()} == {(1, 0), (2, 1), (3, 2)}
    # 36 and 8 divide by the ranks, which FSDP2 needs.
    same_bits_as_fsdp2(
        lambda: simple_fsdp(tiny_llama(ffn_dim=8), mp_policy=BF16, shard_placement_fn=_last_dim),
        lambda: fsdp2(tiny_llama(ffn_dim=8), BF16, shard_placement_fn=_last_dim),
        "aot_eager",
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_gather_puts_the_shards_of_any_dim_together(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3), label="shape"))
    dim = data.draw(st.integers(0, len(shape) - 1), label="dim")
    ranks = data.draw(st.integers(1, 5), label="ranks")
    dtype = data.draw(st.sampled_from([torch.float32, torch.complex64, torch.int64]), label="dtype")
    torch.manual_seed(0)
    full = torch.randn(shape).mul(9).to(dtype)
    sent, locals_ = [], []
    for rank in range(ranks):
        with fake_group(ranks, rank), graphs.recorded_gathers() as recorded:
            mesh = init_device_mesh("cpu", (ranks,))
            local = shard(full, mesh, (Shard(dim),)).to_local()
            comm = Communication(shape, dim, Group(mesh.get_group().group_name, ranks), None)
            assert all_gather(local, comm).shape == shape
        sent += recorded
        locals_.append(local)
    assert len({part.shape for part in sent}) == 1, "every rank must send as much"
    with fake_group(ranks), graphs.recorded_gathers(torch.cat(sent)):
        mesh = init_device_mesh("cpu", (ranks,))
        found = all_gather(locals_[0], comm._replace(shard_group=Group(mesh.get_group().group_name, ranks)))
    torch.testing.assert_close(found, full, rtol=0, atol=0)
    assert found.is_contiguous()


@pytest.mark.parametrize("lowering", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_divide_factor_may_be_changed_between_steps(two_ranks: Ranks, lowering: str) -> None:
    two_ranks.run(_factor, lowering)


def _factor(lowering: str) -> None:
    torch._dynamo.utils.counters.clear()
    model = simple_fsdp(zoo.build("tied"))
    forward = lowered(model, lowering)
    gradients = []
    for factor in (None, 1.0, 5, 2, 5):
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        model.zero_grad()
        forward(torch.ones(2, 6)).sum().backward()
        gradients.append((factor or 2) * model[1].up.weight.grad.to_local())
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])
    if lowering != "eager":
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


@pytest.mark.parametrize("lowering", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_parts_sharded_first_keep_their_own_policy_and_mesh(four_ranks: Ranks, lowering: str) -> None:
    four_ranks.run(_bottom_up, lowering)


def _bottom_up(lowering: str) -> None:
    everyone, mesh = init_device_mesh("cpu", (4,)), two_by_two()
    fp32_outputs = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)

    def apply(call: Callable[..., Any]) -> nn.Module:
        model = tiny_llama()
        call(model.tok_embeddings, mesh=everyone, mp_policy=FP32)
        call(model.layers[0], mesh=mesh, mp_policy=BF16)
        call(model.layers[1], mesh=everyone, mp_policy=fp32_outputs, reshard_after_forward=False)
        call(model.layers[2], mesh=everyone, mp_policy=BF16)
        call(model.norm, mesh=everyone, mp_policy=FP32)
        call(model.output, mesh=everyone, mp_policy=BF16)
        call(model, mesh=everyone, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float32))
        return model

    # From torch 2.15 on, gradients of a bf16 norm stay fp32. Their sum over four ranks depends on the place in a
    # bucket, and eager has none.
    tolerance = 1e-6 if REDUCES_IN_OWN_DTYPE and lowering == "eager" else 0
    same_bits_as_fsdp2(lambda: apply(simple_fsdp), lambda: apply(fully_shard), lowering, tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.compile
@one_of_four
def test_bottom_up_gives_names_and_buckets_of_the_whole() -> None:
    model = tiny_llama(tie_embeddings=True)
    simple_fsdp(model.tok_embeddings)
    for layer in model.layers:
        simple_fsdp(layer, reshard_after_forward=False)
    simple_fsdp(model)
    assert model.output.weight is model.tok_embeddings.weight, "sharded with the embedding, held by the output too"
    assert [p.simple_fsdp_info.fqn for p in model.parameters()] == [name for name, _ in model.named_parameters()]
    assert {p.simple_fsdp_info.communication.reshard_after_forward for p in model.layers.parameters()} == {False}
    captured = graphs.capture(model, *batch(0, 0), plan="block")
    assert [len(names) for names in graphs.fqns(captured.forward, *graphs.GATHERS)] == [1, 9, 9, 9, 1]
