"""Blocks of Dynamo's graph that are alike are traced once; the graphs that passes see stay as they are."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx import Graph, Node

from inductor_passes.bodies import INVOKE
from inductor_passes.compile_once import Bodies
from inductor_passes.ops import call as calls
from inductor_passes.runtime.record import is_step, record_graph
from inductor_passes.torch_compat.version import VERSION
from inductor_passes.trace_once import TracedOnce, call_block, trace_once
from simplefsdp import simple_fsdp
from simplefsdp.compile import passes as compilation
from tests.graphs import Captured, capture
from tests.models import batch, tiny_llama
from tests.ranks import fake_group

pytestmark = pytest.mark.compile

BLOCKS = 4
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[TracedOnce]:
    """Reports of the models that a test compiles."""
    made: list[TracedOnce] = []

    def noted(*args: Any) -> TracedOnce:
        made.append(trace_once(*args))
        return made[-1]

    monkeypatch.setattr(compilation, "trace_once", noted)
    monkeypatch.setattr(compilation, "compile_once", lambda _graph: Bodies((), 0, ()))  # which calls bodies as well
    return made


def flat(monkeypatch: pytest.MonkeyPatch, model: nn.Module, *inputs: Any, **options: Any) -> Captured:
    """The graphs of a model of which each block, each gather and each reduction is traced where it is."""
    with monkeypatch.context() as patched:
        patched.setattr(compilation, "trace_once", lambda *_: TracedOnce((), ()))
        patched.setattr(compilation, "take_gathers_out", lambda *_: None)
        patched.setattr(calls, "call", lambda function, _key, *operands: function(*operands))
        patched.setattr("simplefsdp.frontend.unshard.call", calls.call)
        return capture(model, *inputs, **options)


def nodes_of(graph: Graph) -> Counter[Any]:
    """Each node of a graph: what it calls, with which constants, on which nodes and inputs, for which shape; and what
    the graph returns, in any order."""
    known: dict[Node, int] = {}
    for i, node in enumerate(graph.nodes):
        read: Any = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: known[n])
        if node.op == "output":
            read = sorted(map(str, read[0][0]))
        about = shape_of(node), getattr(node.meta.get("val"), "dtype", None)
        known[node] = hash((i if node.op == "placeholder" else str(node.target), str(read), str(about)))
    return Counter(known.values())


def steps(graph: Graph) -> tuple[Any, Any]:
    """Return the collectives and the waits of a graph, each in order."""
    record = record_graph("forward", (), (), filter(is_step, graph.nodes))
    return record.issued, record.order


def operators(graph: Graph) -> Counter[Any]:
    return Counter((n.op if n.op == "placeholder" else str(n.target), shape_of(n)) for n in graph.nodes)


def shape_of(node: Node) -> tuple[int | None, ...] | None:
    """Return the shape of a value; ``None`` for a size that is a symbol, each compilation's own."""
    value = node.meta.get("val")
    return tuple(n if isinstance(n, int) else None for n in value.shape) if isinstance(value, Tensor) else None


def hybrid() -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}


class Norm(nn.Module):
    """A norm as models write it themselves, whose first operators read no weight."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Residual(nn.Module):
    """Residual blocks with norms, and with ``dropout`` and checkpoints where a test asks for them."""

    def __init__(self, dropout: float = 0.0, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(Norm(8), nn.Linear(8, 16), nn.GELU(), nn.Dropout(dropout), nn.Linear(16, 8))
            for _ in range(BLOCKS)
        )
        self.norm = Norm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            if self.checkpointed:
                x = x + torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                x = x + layer(x)
        return self.norm(x).square().mean()


def residual(**options: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Residual(**options), (torch.randn(4, 8),)


def llama(**options: Any) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return tiny_llama(layers=BLOCKS, **options), batch(0, 0)


SHARED: dict[str, tuple[Any, Any, int]] = {
    # model, how it is sharded, calls of the body
    "llama": (llama, dict, BLOCKS),
    "bfloat16": (llama, lambda: {"mp_policy": BF16}, BLOCKS - 1),  # the first reads float32
    "tied weights": (lambda: llama(tie_embeddings=True), dict, BLOCKS),
    "hybrid shards": (llama, hybrid, BLOCKS),
    "unsharded weights": (llama, lambda: {"reshard_after_forward": False}, BLOCKS),
    # A norm that models write themselves begins in the block before it, whose residual nobody reads behind the last.
    "norms whose first operators read no weight": (residual, dict, BLOCKS - 1),
    "dropout": (lambda: residual(dropout=0.1), dict, BLOCKS - 1),
    "dropout in checkpoints": (lambda: residual(dropout=0.1, checkpointed=True), dict, BLOCKS - 1),
    "checkpointed blocks": (lambda: llama(activation_checkpointing="block"), dict, BLOCKS),
    "selective checkpointing": (lambda: llama(activation_checkpointing="selective"), dict, BLOCKS),
}
FAST = ("bfloat16", "norms whose first operators read no weight", "dropout in checkpoints")


@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SHARED]
)
def test_graphs_are_those_of_blocks_that_are_traced_one_by_one(name, found, monkeypatch):
    build, options_of, number_of_calls = SHARED[name]
    options = options_of()
    graphs = []
    for take in (capture, lambda *args, **given: flat(monkeypatch, *args, **given)):
        torch.manual_seed(0)
        model, inputs = build()
        graphs.append(take(simple_fsdp(model, **options), *inputs, plan="block", compile_once=True))
    once, each = graphs
    assert [number for _, number in found[0].bodies] == [number_of_calls]
    assert nodes_of(once.forward) == nodes_of(each.forward)
    for direction in ("forward", "backward"):
        assert operators(getattr(once, direction)) == operators(getattr(each, direction))
        assert steps(getattr(once, direction)) == steps(getattr(each, direction))
    assert operators(once.joint) == operators(each.joint)


@pytest.mark.usefixtures("one_of_four")
def test_gathers_and_reductions_are_traced_once_for_each_kind(monkeypatch):
    traced: list[int] = []

    def count(function: Any, operands: Any) -> Any:
        traced[-1] += 1
        return trace(function, operands)

    trace = calls.trace
    monkeypatch.setattr(calls, "trace", count)
    for layers in (1, BLOCKS):
        traced.append(0)
        capture(simple_fsdp(tiny_llama(layers=layers)), *batch(0, 0), plan="block")
    assert 0 < traced[0] == traced[1]


@pytest.mark.usefixtures("one_of_four")
def test_without_gradients_blocks_are_traced_once_as_well(found):
    with torch.no_grad():
        captured = capture(simple_fsdp(tiny_llama(layers=BLOCKS)), *batch(0, 0), plan="block", compile_once=True)
    assert [number for _, number in found[0].bodies] == [BLOCKS]
    assert not captured.forward.find_nodes(op="call_function", target=calls.CALL)


class Blocks(nn.Module):
    """Blocks that read the model's input and what the block before them has made."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(BLOCKS))
        self.register_buffer("table", torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        start = x = self.first(x)
        for layer in self.layers:
            x = self.block(layer, x, start)
        return x.sum()

    def block(self, layer: nn.Module, x: Tensor, start: Tensor) -> Tensor:
        raise NotImplementedError


class ReadTwice(Blocks):
    def block(self, layer, x, start):
        return (layer(x) * start).tanh() + start.sin()


class Written(Blocks):
    def block(self, layer, x, _start):
        self.table.add_(1)
        return (layer(x) + self.table).tanh().sin()


class View(Blocks):
    def block(self, layer, x, start):
        return (layer(x) + start).t().sin().t().cos()


class Autocast(Blocks):
    def block(self, layer, x, start):
        with torch.autocast("cpu", torch.bfloat16):
            return (layer(x) + start).float().sin().cos()


class Numbers(Blocks):
    def block(self, layer, x, start):
        return (layer(x) + start * x.shape[0]).sin().cos()


class Checkpointed(Blocks):
    def block(self, layer, x, _start):
        return torch.utils.checkpoint.checkpoint(self.checkpointed, layer, x, use_reentrant=False)

    def checkpointed(self, layer, x):
        return layer(x).sin().cos() * x


class AutocastInCheckpoint(Checkpointed):
    def checkpointed(self, layer, x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x).float().sin() * x


class CheckpointInCheckpoint(Checkpointed):
    def checkpointed(self, layer, x):
        inner = torch.utils.checkpoint.checkpoint(lambda x: layer(x).sin().cos(), x, use_reentrant=False)
        return inner * x


ALONE = {
    "gradients that are added up in another order": (ReadTwice, None),
    "a buffer that is written to": (Written, "results that share memory, or changes in place"),
    "contexts": (Autocast, "contexts that the graph enters"),
    "symbolic sizes": (Numbers, "symbolic sizes"),
    "contexts in checkpoints": (AutocastInCheckpoint, "contexts that the graph enters"),
    "checkpoints in checkpoints": (CheckpointInCheckpoint, "values that are no tensors in checkpoints"),
}


@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize("name", ALONE)
def test_what_cannot_be_traced_by_itself_is_traced_where_it_is(name, found, monkeypatch):
    build, reason = ALONE[name]
    graphs = []
    for take in (capture, lambda *args, **options: flat(monkeypatch, *args, **options)):
        torch.manual_seed(0)
        x = torch.randn(6, 8)
        if build is Numbers:
            torch._dynamo.mark_dynamic(x, 0)
        graphs.append(take(simple_fsdp(build()), x, plan="block", compile_once=True))
    assert found[0].bodies == ()
    assert reason is None or f"with {reason}" in str(found[0])
    assert operators(graphs[0].backward) == operators(graphs[1].backward)


def save_matmuls():
    return torch.utils.checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


def save_sines():
    return torch.utils.checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.sin.default])


@pytest.mark.usefixtures("one_of_four")
def test_caches_tell_bodies_apart_by_what_their_checkpoints_save(monkeypatch):
    class Selective(Blocks):
        def __init__(self, contexts):
            super().__init__()
            self.contexts = contexts

        def block(self, layer, x, _start):
            checkpointed = torch.utils.checkpoint.checkpoint
            return checkpointed(lambda x: layer(x).sin().cos() * x, x, use_reentrant=False, context_fn=self.contexts)

    names = []

    def noted(module, *args):
        found = trace_once(module, *args)
        (name,) = {node.args[0] for node in module.graph.find_nodes(op="call_function", target=call_block)}
        names.append(name)
        return found

    monkeypatch.setattr(compilation, "trace_once", noted)
    for contexts in (save_matmuls, save_sines, save_matmuls):
        capture(simple_fsdp(Selective(contexts)), torch.randn(6, 8), plan="block", compile_once=True)
    assert names[0] == names[2] != names[1]


@pytest.mark.usefixtures("one_of_four")
def test_views_of_a_result_inside_of_the_block_do_not_matter(found):
    capture(simple_fsdp(View()), torch.randn(6, 8), plan="block", compile_once=True)
    assert [number for _, number in found[0].bodies] == [BLOCKS - 2]  # of the first both are one, the last is summed up


@pytest.mark.usefixtures("one_of_four")
def test_blocks_that_differ_in_a_constant_or_a_shape_are_bodies_of_their_own(found):
    class Differs(Blocks):
        def forward(self, x):
            x = self.first(x)
            for i, layer in enumerate(self.layers):
                x = layer(x).sin().cos().tanh() * (1 + i // 2)
            return self.first(x).sum()

    capture(simple_fsdp(Differs()), torch.randn(6, 8), plan="block", compile_once=True)
    assert [number for _, number in found[0].bodies] == [2, 2]


class Slices(Blocks):
    """The gradients of what blocks make are parts of one tensor, and not contiguous."""

    def forward(self, x):
        return torch.cat([layer(x).sin().cos().tanh() for layer in self.layers] + [self.first(x)], 1).square().mean()


class Choices(Blocks):
    """A block makes numbers as well, which have no gradient, and what the loss does not depend on."""

    def forward(self, x):
        x, rows, unread = self.first(x), 0, []
        for layer in self.layers:
            y = layer(x).sin()
            rows, x = rows + y.argmax(1), (y * x).cos()
            unread.append(x.exp())
        return self.first(x).gather(1, rows[:, None] % 8).sum() + 0 * sum(y.detach().sum() for y in unread)


@pytest.mark.parametrize("build", [Residual, Slices, Choices, View, ReadTwice, Checkpointed])
def test_values_and_gradients_are_those_of_eager_mode(build, found):
    torch.manual_seed(0)
    model, x = build(), torch.randn(6, 8)
    twin = copy.deepcopy(model)
    twin(x).backward()
    with fake_group(1, 0):  # nothing travels, so that values are right
        sharded = simple_fsdp(model)
        torch._dynamo.reset()
        compiled = torch.compile(
            sharded, backend="simplefsdp", options={"plan": "block", "lower_with": "aot_eager"}, fullgraph=True
        )
        loss = compiled(x)
        loss.backward()
        gradients = {name: param.grad.to_local() for name, param in sharded.named_parameters()}
    torch.testing.assert_close(loss, twin(x), rtol=0, atol=0)
    for name, param in twin.named_parameters():
        torch.testing.assert_close(gradients[name], param.grad, rtol=0, atol=0)
    assert bool(found[0].bodies) == (build is not ReadTwice)


class Region(nn.Module):
    """A block that is a region, with a checkpoint and a branch of ``torch.cond`` in it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        middle = torch.utils.checkpoint.checkpoint(lambda x: self.up(x).sin(), x, use_reentrant=False)
        middle = torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (middle,))
        return x + self.down(middle).tanh()


class Regions(Blocks):
    def __init__(self, block: Any = Region) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(BLOCKS))

    def block(self, layer, x, _start):
        return layer(x)


class Plain(Region):
    forward = Region.forward.__marked_compile_region_fn__


@pytest.mark.usefixtures("one_of_four")
def test_regions_are_part_of_the_graph_around_them():
    kinds = {"layers.2.*": False, "*": True}
    graphs = []
    for block in (Region, Plain):
        torch.manual_seed(0)
        model = simple_fsdp(Regions(block), reshard_after_forward=kinds)
        graphs.append(capture(model, torch.randn(6, 8), plan="block"))
    region, plain = graphs
    for direction in ("joint", "forward", "backward"):
        assert operators(getattr(region, direction)) == operators(getattr(plain, direction))
    for direction in ("forward", "backward"):
        assert steps(getattr(region, direction)) == steps(getattr(plain, direction))
    assert not region.joint.find_nodes(op="call_function", target=INVOKE)


class Switch(nn.Module):
    """A region whose result depends on its ``training``."""

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return x.sin() if self.training else x.cos()


@pytest.mark.parametrize("block", [0, 1])
def test_torch_does_not_see_what_is_changed_on_a_later_region(block: int) -> None:
    """If this fails for the second block, torch checks attributes of all regions, and regions could be marked for users
    (docs/debugging.md)."""
    model = nn.Sequential(Switch(), Switch())
    compiled, x = torch.compile(model, backend="eager"), torch.randn(3)
    torch.testing.assert_close(compiled(x), x.sin().sin())
    model[block].eval()
    seen = torch.equal(compiled(x), model(x))
    assert seen == (block == 0 or VERSION < (2, 13))  # 2.11 traces each block
