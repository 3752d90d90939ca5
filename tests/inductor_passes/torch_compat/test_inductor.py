"""TorchInductor computes no shapes again that a trace has, and a thread asks what the CPU can do."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import compile_fx, cpu_vec_isa, fx_utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_leaves

from inductor_passes.torch_compat.inductor import find_vector_instructions, shapes_as_traced
from simplefsdp import simple_fsdp
from simplefsdp.models import llama


@pytest.mark.compile
@pytest.mark.skipif(not hasattr(fx_utils, "_is_fake_tensor_same"), reason="torch 2.11 compares otherwise")
@pytest.mark.usefixtures("one_of_four")
def test_shapes_behind_a_body_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    updated: list[int] = []
    update = fx_utils.FakeTensorUpdater.incremental_update

    def noted(updater: fx_utils.FakeTensorUpdater) -> int:
        updated.append(update(updater))
        return updated[-1]

    monkeypatch.setattr(fx_utils.FakeTensorUpdater, "incremental_update", noted)
    compare = fx_utils._is_fake_tensor_same
    model = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4))
    sharded = simple_fsdp(nn.Sequential(*model))
    with torch._inductor.config.patch(force_disable_caches=True):
        torch._dynamo.reset()
        torch.compile(sharded, backend="simplefsdp", options={"plan": "block"})(torch.ones(2, 8)).sum().backward()
    graphs = 2
    assert len(updated) > graphs  # of bodies too
    assert sum(updated) == graphs  # the operator with which ranks compare what they have compiled is new
    assert fx_utils._is_fake_tensor_same is compare


def _layouts(module: GraphModule) -> dict[str, list[Any]]:
    """Return what each node of a graph is said to be."""
    values = {node.name: tree_leaves(node.meta.get("val")) for node in module.graph.nodes if node.op != "output"}
    return {
        name: [(x.dtype, x.device, x.shape, x.stride(), x.storage_offset()) for x in leaves if isinstance(x, Tensor)]
        for name, leaves in values.items()
    }


def _mlp() -> tuple[nn.Module, list[Tensor]]:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))), [torch.ones(2, 8)]


def _attention() -> tuple[nn.Module, list[Tensor]]:
    model = llama.build("debug", layers=3, activation_checkpointing="selective")
    return model, [torch.zeros(1, 16, dtype=torch.long), torch.zeros(1, 16, dtype=torch.long)]


def _convolutions() -> tuple[nn.Module, list[Tensor]]:
    """Return convolutions, of which TorchInductor changes layouts, and a dropout."""
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Dropout(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 4 * 4, 2)), [torch.ones(2, 3, 8, 8)]


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize(
    ("model", "backward_is_as_traced"),
    [(_mlp, True), (_attention, True), (_convolutions, False)],  # whose saved results have another layout in code
)
def test_shapes_of_a_trace_are_those_that_inductor_would_compute(
    model: Callable[[], tuple[nn.Module, list[Tensor]]],
    backward_is_as_traced: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from inductor_passes.torch_compat import inductor

    found: list[bool] = []
    are_as_traced = inductor._are_as_traced

    def computed_beside(module: GraphModule, inputs: list[Any]) -> bool:
        assert isinstance(module, _LazyGraphModule)  # no code is generated of what nothing calls
        found.append(are_as_traced(module, inputs))
        if found[-1]:
            traced = _layouts(module)
            propagate(module, inputs)
            assert _layouts(module) == traced
        return found[-1]

    propagate = compile_fx.fake_tensor_prop
    monkeypatch.setattr(inductor, "_are_as_traced", computed_beside)
    module, inputs = model()
    sharded = simple_fsdp(module)
    with torch._inductor.config.patch(force_disable_caches=True):
        torch._dynamo.reset()
        torch.compile(sharded, backend="simplefsdp", options={"plan": "block"})(*inputs).sum().backward()
    assert found == [True, backward_is_as_traced]
    assert compile_fx.fake_tensor_prop is propagate


@pytest.mark.parametrize("change", ["nothing", "strides", "no value", "symbols"])
def test_shapes_that_a_trace_does_not_have_are_computed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        x = torch.empty(4, 6)
        other = torch.empty_strided((4, 6), (1, 4))
    if change == "symbols":
        x = mode.from_tensor(torch.empty(4, 6))
    module = make_fx(lambda x: x.t().sum(0))(x)
    if change == "no value":
        del next(iter(module.graph.find_nodes(op="call_function", target=torch.ops.aten.t.default))).meta["val"]
    computed: list[FakeTensorProp] = []
    run = FakeTensorProp.propagate_dont_convert_inputs

    def noted(prop: FakeTensorProp, *args: Any) -> Any:
        computed.append(prop)
        return run(prop, *args)

    monkeypatch.setattr(FakeTensorProp, "propagate_dont_convert_inputs", noted)
    with shapes_as_traced():
        assert compile_fx.fake_tensor_prop(module, [other if change == "strides" else x]) is mode
    assert len(computed) == (change != "nothing")
    assert all("val" in node.meta for node in module.graph.nodes if node.op != "output")


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_one_thread_finds_the_vector_instructions_of_a_cpu_while_graphs_are_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asking: list[str] = []
    pick = cpu_vec_isa.pick_vec_isa

    def noted() -> cpu_vec_isa.VecISA:
        asking.append(threading.current_thread().name)
        return pick()

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", noted)
    find_vector_instructions.cache_clear()
    sharded = simple_fsdp(nn.Sequential(nn.Linear(8, 8)))
    for size in (2, 4):
        torch._dynamo.reset()
        torch.compile(sharded, backend="simplefsdp", options={"plan": "block"})(torch.ones(size, 8))
    assert asking.count("vector instructions") == 1
