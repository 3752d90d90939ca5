"""Weights are gathered in the dtype in which they are read: graphs, and bits on real ranks."""

from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.fx import Graph, Node
from torch.nn import functional as F

from inductor_passes.cast_before_gather import cast_before_gather
from inductor_passes.collectives import ALL_GATHER, ALL_REDUCE, FQNS, WAIT
from inductor_passes.ops.gather_shards import GATHER_SHARDS
from inductor_passes.torch_compat.fx import insert_call
from simplefsdp import WireFormat, simple_fsdp
from tests.compare import whole
from tests.graphs import GATHERS, Captured, capture, nodes
from tests.models import PROFILE
from tests.ranks import Ranks

LARGEST = 448.0
"""The largest number of float8 e4m3."""
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def in_float8(weight: Tensor, scale: Tensor) -> Tensor:
    """``weight``, rounded to float8 with a scale and read in float32, as an emulated matmul of torchao reads it."""
    scaled = (weight.float() * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return scaled.float() / scale


def scale_of(weight: Tensor) -> Tensor:
    return (LARGEST / weight.abs().max().double().clamp(min=1e-12)).float()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ in_float8(weight.t(), scale_of(weight.t()))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ in_float8(weight, scale_of(weight)), (grad.t() @ x).to(weight.dtype)


class Float8(nn.Linear):
    """A linear layer whose weight is read in float8, with one scale, as torchao's ``Float8Linear`` does it."""

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x.float(), self.weight)


class FrozenFloat8(nn.Linear):
    """A frozen weight in float8, which backward reads as forward has read it."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(inner, outer, bias=False)
        self.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ in_float8(self.weight.t(), scale_of(self.weight.t()))


class Autocast(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def float8(*widths: int) -> nn.Module:
    return nn.Sequential(*(Float8(a, b, bias=False) for a, b in pairwise(widths)))


def autocast(*widths: int) -> nn.Module:
    return Autocast(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def captured(model: nn.Module, width: int = 8, plan: Any = "block", **options: Any) -> Captured:
    return capture(model, torch.randn(4, width), plan=plan, **options)


def travels(graph: Graph) -> dict[str, torch.dtype]:
    """The dtype in which each weight of a graph is gathered."""
    found: dict[str, torch.dtype] = {}
    for node in nodes(graph, *GATHERS):
        dtypes: Any = node.args[2] if node.target is GATHER_SHARDS else [node.meta["val"].dtype]
        found.update(zip(node.meta[FQNS], dtypes, strict=True))
    return found


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
class TestGraphs:
    def test_under_autocast_weights_and_biases_travel_in_bfloat16_also_where_rows_do_not_divide(self) -> None:
        for moves, dtype in ((True, torch.bfloat16), (False, torch.float32)):
            graphs = captured(simple_fsdp(autocast(8, 6, 5)), cast_before_gather=moves)
            assert travels(graphs.forward) == dict.fromkeys(("0.weight", "0.bias", "1.weight", "1.bias"), dtype)
            assert travels(graphs.backward) == {"1.weight": dtype}

    def test_a_weight_in_float8_travels_as_bytes_and_one_all_reduce_has_all_maxima(self) -> None:
        graphs = captured(simple_fsdp(float8(8, 6, 8), mp_policy=BF16))
        for graph in (graphs.forward, graphs.backward):
            assert set(travels(graph).values()) == {torch.uint8}
            (all_reduce,) = [node for node in nodes(graph, ALL_REDUCE) if FQNS not in node.meta]
            assert all_reduce.args[1] == "max"
            assert all_reduce.meta["val"].dtype is torch.bfloat16
            assert all(all_reduce < gather for gather in nodes(graph, *GATHERS))
        assert nodes(graphs.forward, ALL_REDUCE)[0].meta["val"].numel() == 2
        assert not [node for node in graphs.forward.nodes if _is_whole_in(node, torch.bfloat16)]

    def test_a_matmul_reads_the_bytes_with_the_strides_that_the_cast_had(self) -> None:
        graph = captured(simple_fsdp(float8(8, 6), mp_policy=BF16)).forward
        (product_of,) = nodes(graph, torch.ops.aten.mm.default)
        assert product_of.args[1].meta["val"].stride() == (1, 8)

    def test_shards_of_another_dim(self) -> None:
        model = simple_fsdp(float8(8, 8), mp_policy=BF16, shard_placement_fn=lambda _: Shard(1))
        assert travels(captured(model).forward) == {"0.weight": torch.uint8}

    def test_a_weight_that_is_rounded_to_integers_travels_as_such(self) -> None:
        class Rounded(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                scale = self.weight.abs().max() / 127
                return F.linear(x, (self.weight / scale).round().to(torch.int8).float() * scale)

        model = simple_fsdp(Rounded(8, 6, bias=False)).requires_grad_(False)
        assert travels(captured(model).forward) == {"weight": torch.int8}

    def test_an_inference_graph(self) -> None:
        model = simple_fsdp(autocast(8, 6)).requires_grad_(False)
        assert set(travels(captured(model).forward).values()) == {torch.bfloat16}

    @pytest.mark.parametrize(
        ("read", "sharding", "options"),
        [
            (lambda x, w: x @ w.bfloat16().float() + x @ w, {}, {}),
            (lambda x, w: x.double() @ w.double(), {}, {}),
            (lambda x, w: x @ (w * x.mean()).bfloat16().float(), {}, {}),
            (lambda x, w: x @ (w / w.abs().mean()).bfloat16().float(), {}, {}),
            (lambda x, w: x @ (w / w.max()).bfloat16().float(), {}, {}),
            (lambda x, w: x @ (w / w.abs().amax(0)).bfloat16().float(), {}, {}),
            (lambda x, w: x @ w.softmax(0).bfloat16().float(), {}, {}),
            (lambda x, w: x @ (w > 0).float(), {}, {}),
            (lambda x, w: x @ F.dropout(w).bfloat16().float(), {}, {}),
            (lambda x, w: x @ w.bfloat16().float() + w.abs().sum(), {}, {}),
            (lambda x, w: x @ in_float8(w, scale_of(w)), {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {}),
            (lambda x, w: x @ w.bfloat16().float(), {"wire": WireFormat(gather="int8")}, {}),
            (lambda x, w: x @ w.bfloat16().float(), {}, {"plan": "none"}),
            (lambda x, w: x @ w.bfloat16().float(), {}, {"cast_before_gather": False}),
        ],
    )
    def test_anything_else_travels_as_it_is(self, read: Any, sharding: dict[str, Any], options: dict[str, Any]) -> None:
        class Reads(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)

            def forward(self, x: Tensor) -> Tensor:
                return read(x, self.weight)

        graph = captured(simple_fsdp(Reads(), **sharding), **options).forward
        assert not [node for node in nodes(graph, ALL_REDUCE) if FQNS not in node.meta]
        assert travels(graph) == {"weight": torch.uint8 if "wire" in sharding else torch.float32}

    @pytest.mark.parametrize(("second", "dtype"), [("autocast", torch.bfloat16), ("frozen", torch.float8_e4m3fn)])
    def test_a_weight_is_kept_as_it_has_travelled(self, second: str, dtype: torch.dtype) -> None:
        model = autocast(8, 6, 5) if second == "autocast" else nn.Sequential(nn.Linear(8, 6), FrozenFloat8(6, 5))
        graphs = captured(simple_fsdp(model, reshard_after_forward=False))
        saved = [node for node in graphs.forward.output_node().all_input_nodes if _elements(node) == 30]
        assert [node.meta["val"].dtype for node in saved] == [dtype], "backward reads the second weight alone"
        assert not nodes(graphs.backward, *GATHERS)
        assert not [node for node in nodes(graphs.backward, ALL_REDUCE) if FQNS not in node.meta]

    def test_a_kept_weight_that_backward_casts_once_more_travels_as_it_is(self) -> None:
        graphs = captured(simple_fsdp(float8(8, 6, 5), reshard_after_forward=False))
        assert travels(graphs.forward) == {"0.weight": torch.uint8, "1.weight": torch.float32}
        assert not nodes(graphs.backward, *GATHERS)


@pytest.mark.parametrize(("device", "dtype"), [("cuda", torch.float8_e4m3fn), ("cpu", torch.uint8)])
def test_float8_travels_as_bytes_where_the_backend_cannot_gather_it(device: str, dtype: torch.dtype) -> None:
    graph = Graph()
    shard, weight = graph.placeholder("shard"), torch.float8_e4m3fn
    with FakeTensorMode():
        shard.meta["val"] = torch.empty(4, 8, device=device)
        gather = insert_call(ALL_GATHER, shard, 4, "0")
        gather.meta[FQNS] = ("weight",)
        graph.output(insert_call(torch.ops.prims.convert_element_type.default, insert_call(WAIT, gather), weight))
        assert cast_before_gather(graph) == {"weight": weight}
    assert travels(graph) == {"weight": dtype}
    (result,) = graph.output_node().all_input_nodes
    assert (result.meta["val"].dtype, result.meta["val"].shape) == (weight, (16, 8))


def _elements(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) and node.op == "call_function" else 0


def _is_whole_in(node: Node, dtype: torch.dtype) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype is dtype and value.numel() == 48


MODELS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any]]] = {
    "float8": (float8, {"mp_policy": BF16}),
    "float8 of float32": (float8, {}),
    "autocast": (autocast, {}),
}


def trained(
    model: nn.Module,
    options: dict[str, Any] | None = None,
    batch: tuple[int, int] = (4, 8),
    after_step: Callable[[nn.Module], None] = lambda _: None,
) -> dict[str, Tensor]:
    """Parameters after three steps on batches of this shape; compiled with ``options``, or eager."""
    step = torch.compile(model, backend="simplefsdp", fullgraph=True, options=options) if options else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        step(torch.randn(*batch, generator=generator)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after_step(model)
    return {fqn: whole(param) for fqn, param in model.named_parameters()}


def _same_bits(name: str, sharding: dict[str, Any], shape: tuple[int, ...] | None, options: dict[str, Any]) -> None:
    build, policy = MODELS[name]
    if shape is not None:
        sharding = {**sharding, "mesh": init_device_mesh("cpu", shape)}

    def model() -> nn.Module:
        torch.manual_seed(0)
        return build(8, 7, 5, 8)

    found = {}
    for moves in (True, False):
        torch._dynamo.reset()
        found[moves] = trained(simple_fsdp(model(), **policy, **sharding), {**options, "cast_before_gather": moves})
    found["eager"] = trained(simple_fsdp(model(), **policy, **sharding)) if "lower_with" in options else found[False]
    for fqn, value in found[True].items():
        assert torch.equal(value, found[False][fqn]), f"{fqn}: the cast before the gather is another one"
        assert torch.equal(value, found["eager"][fqn]), f"{fqn}: not as in eager mode"


def last_dim(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


EAGER = {"plan": "block", "lower_with": "aot_eager"}


@pytest.mark.compile
@pytest.mark.parametrize(
    ("name", "sharding"),
    [
        *product(MODELS, [{}]),
        ("autocast", {"reshard_after_forward": False}),
        ("autocast", {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
        ("autocast", {"shard_placement_fn": last_dim}),
    ],
)
def test_two_ranks_train_to_the_same_bits(two_ranks: Ranks, name: str, sharding: dict[str, Any]) -> None:
    two_ranks.run(_same_bits, name, sharding, None, EAGER)


@pytest.mark.compile
@pytest.mark.parametrize("name", ["float8", "autocast"])
def test_inductor_trains_to_the_same_bits(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(_same_bits, name, {}, None, {"plan": "auto", "profile": PROFILE})


@pytest.mark.compile
@pytest.mark.parametrize(("name", "shape"), [*product(["float8", "autocast"], [None, (2, 2)])])
def test_four_ranks_train_to_the_same_bits_with_replicas_and_uneven_shards(
    four_ranks: Ranks, name: str, shape: tuple[int, ...] | None
) -> None:
    four_ranks.run(_same_bits, name, {} if shape is None else {"mode": "hybrid_shard"}, shape, EAGER)
