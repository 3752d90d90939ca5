"""Errors of ``simple_fsdp``, word for word. A refused call changes nothing."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import parametrizations, prune

from simplefsdp import simple_fsdp
from tests.models import tiny_llama


def said(call: Callable[[], Any]) -> str:
    """Type and text of the error that ``call`` raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def linear() -> nn.Linear:
    return nn.Linear(2, 8)


def refuse(model: Any = None, *args: Any, **kwargs: Any) -> str:
    """Return the error of ``simple_fsdp``, and check that the call has changed nothing."""
    model = linear() if model is None else model
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    before = [(type(m), dict(m._parameters)) for m in modules]
    text = said(lambda: simple_fsdp(model, *args, **kwargs))
    assert [(type(m), dict(m._parameters)) for m in modules] == before
    return text


class Holder(nn.Module):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = weight


@pytest.mark.usefixtures("one_of_four")
class TestArguments(expecttest.TestCase):
    def test_arguments_of_other_types_are_refused(self) -> None:
        texts = [
            said(lambda: simple_fsdp(None)),  # type: ignore[type-var]
            said(lambda: simple_fsdp(nn.Linear)),  # type: ignore[type-var]
            refuse(nn.ModuleList([linear()])),
            refuse(nn.ParameterDict({"a": torch.ones(2)})),
            refuse(mesh="cpu"),
            refuse(mp_policy=torch.bfloat16),
            refuse(reshard_after_forward=2),
            refuse(reshard_after_forward="yes"),
            refuse(reshard_after_forward={"bias": 1}),
            refuse(gradient_divide_factor="2"),
            refuse(ignored_params=["weight"]),
        ]
        self.assertExpectedInline(
            "\n".join(texts),
            """\
TypeError: model: expected a torch.nn.Module, found NoneType
TypeError: model: expected a torch.nn.Module, found type
TypeError: model: ModuleList has no forward of its own; pass the module that calls its members
TypeError: model: ParameterDict has no forward of its own; pass the module that calls its members
TypeError: mesh: expected a DeviceMesh or None, found str
TypeError: mp_policy: expected torch.distributed.fsdp.MixedPrecisionPolicy, found dtype
TypeError: reshard_after_forward: expected True, False, 'auto' or {glob: one of them}, found 2; gathering again from a smaller group is not supported. Use hybrid_shard on a mesh whose last dimension has that size
TypeError: reshard_after_forward: expected True, False, 'auto' or {glob: one of them}, found 'yes'
TypeError: reshard_after_forward: expected {glob: True, False or 'auto'}, found {'bias': 1}
TypeError: gradient_divide_factor: expected a number, found '2'
TypeError: ignored_params: expected parameters, found str""",
        )

    def test_values_that_are_not_valid_are_refused(self) -> None:
        texts = [
            refuse(mode="fuly_shard"),
            refuse(mode="hybrid_shard"),
            refuse(reshard_after_forward={"wieght": False}),
            refuse(gradient_divide_factor=-1.0),
            refuse(gradient_divide_factor=float("nan")),
            refuse(ignored_params=[nn.Parameter(torch.ones(3))]),
        ]
        self.assertExpectedInline(
            "\n".join(texts),
            """\
ValueError: unknown mode 'fuly_shard'; did you mean 'fully_shard'? (valid: 'fully_shard', 'hybrid_shard', 'replicate')
ValueError: mode 'hybrid_shard' needs a mesh of 2 dimensions, (replicate, shard), as in init_device_mesh('cuda', (nodes, gpus), mesh_dim_names=('replicate', 'shard'))
ValueError: reshard_after_forward: unknown pattern 'wieght'; did you mean 'weight'? (valid: 'weight', 'bias')
ValueError: gradient_divide_factor: expected a positive number, found -1.0
ValueError: gradient_divide_factor: expected a positive number, found nan
ValueError: ignored_params: a parameter of shape (3,) is not one of the model's""",
        )

    def test_placements_that_are_not_valid_are_refused(self) -> None:
        texts = [
            refuse(shard_placement_fn=lambda _param: Shard(1)),
            refuse(shard_placement_fn=lambda _param: Shard(-3)),
            refuse(shard_placement_fn=lambda _param: Replicate()),
            refuse(shard_placement_fn=lambda _param: 0),
        ]
        self.assertExpectedInline(
            "\n".join(texts),
            """\
ValueError: shard_placement_fn: found Shard(dim=1) for bias, which has 1 dims (shape (8,))
ValueError: shard_placement_fn: found Shard(dim=-3) for weight, which has 2 dims (shape (8, 2))
TypeError: shard_placement_fn: expected a Shard or None for weight, found Replicate()
TypeError: shard_placement_fn: expected a Shard or None for weight, found 0""",
        )

    def test_meshes_that_do_not_fit_the_mode_are_refused(self) -> None:
        other_device = init_device_mesh("cpu", (4,))
        other_device._device_type = "cuda"
        names = ("a", "b", "c")
        texts = [
            refuse(mesh=init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=names)),
            refuse(mesh=init_device_mesh("cpu", (2, 2)), mode="fully_shard"),
            refuse(mesh=init_device_mesh("cpu", (2, 2)), mode="replicate"),
            refuse(mesh=init_device_mesh("cpu", (4,)), mode="hybrid_shard"),
            refuse(mesh=other_device),
            refuse(mesh=DeviceMesh("cpu", [1, 2, 3])),
        ]
        self.assertExpectedInline(
            "\n".join(texts),
            """\
ValueError: mesh: found 3 dimensions, expected 1 (fully_shard) or 2 (hybrid_shard); pass the data-parallel sub-mesh, as in mesh['dp']
ValueError: mesh: found 2 dimensions, mode 'fully_shard' needs 1
ValueError: mesh: found 2 dimensions, mode 'replicate' needs 1
ValueError: mesh: found 1 dimensions, mode 'hybrid_shard' needs 2
ValueError: weight: found on device 'cpu', but mesh is on 'cuda'; move the model there first (model.to('cuda')) or pass a mesh of its own device
ValueError: mesh: rank 0 is not part of DeviceMesh((3,), 'cpu', stride=(1,)); call simple_fsdp only on its ranks""",
        )

    def test_a_missing_process_group_is_refused(self) -> None:
        torch.distributed.destroy_process_group()
        text = said(lambda: simple_fsdp(linear()))
        torch.distributed.init_process_group("fake", store=torch.distributed.HashStore(), rank=0, world_size=4)
        self.assertExpectedInline(
            text,
            """RuntimeError: simple_fsdp() found no process group; call torch.distributed.init_process_group() first (torchrun sets the environment that it reads)""",
        )


@pytest.mark.usefixtures("one_of_four")
class TestParameters(expecttest.TestCase):
    def test_parameters_that_cannot_be_sharded_are_refused(self) -> None:
        class Quantized(nn.Parameter):
            """A subclass of ``Parameter``, as quantized weights of bitsandbytes and torchao are."""

        hooked = nn.Parameter(torch.ones(4))
        hooked.register_hook(lambda grad: grad)
        accumulates = nn.Parameter(torch.ones(4))
        accumulates.register_post_accumulate_grad_hook(lambda _param: None)
        trained = nn.Parameter(torch.ones(4))
        trained.grad = torch.ones(4)
        sparse = torch.eye(4).to_sparse()
        packed = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
        weights = [
            nn.UninitializedParameter(),
            Quantized(torch.ones(4)),
            nn.Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)),
            nn.Parameter(sparse),
            nn.Parameter(packed, requires_grad=False),
            hooked,
            accumulates,
            trained,
        ]
        self.assertExpectedInline(
            "\n".join(refuse(Holder(weight)) for weight in weights),
            """\
ValueError: inner.weight: has no shape yet; run the lazy module once before simple_fsdp()
ValueError: inner.weight: found a Quantized, expected a plain torch.nn.Parameter, or a subclass of torch.Tensor with fsdp_pre_all_gather and fsdp_post_all_gather. Put it into ignored_params, or replace it before simple_fsdp()
ValueError: inner.weight: found a NestedTensor, expected a plain torch.nn.Parameter, or a subclass of torch.Tensor with fsdp_pre_all_gather and fsdp_post_all_gather. Put it into ignored_params, or replace it before simple_fsdp()
ValueError: inner.weight: found torch.sparse_coo, expected a dense tensor; put it into ignored_params
ValueError: inner.weight: found torch.qint8, expected a dense tensor; put it into ignored_params
ValueError: inner.weight: has gradient hooks, which its shard would lose; register them after simple_fsdp()
ValueError: inner.weight: has gradient hooks, which its shard would lose; register them after simple_fsdp()
ValueError: inner.weight: has a gradient, which its shard would lose; zero_grad(set_to_none=True) first""",
        )

    def test_integers_that_require_gradients_are_refused_by_torch_itself(self) -> None:
        text = said(lambda: nn.Parameter(torch.ones(4, dtype=torch.int64), requires_grad=True))
        self.assertExpectedInline(
            text, """RuntimeError: Only Tensors of floating point and complex dtype can require gradients"""
        )

    def test_dtensors_of_somebody_else(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        split = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh["tp"], [Shard(0)]))
        both = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Replicate(), Shard(0)]))
        flat = init_device_mesh("cpu", (4,))
        unnamed = nn.Parameter(DTensor.from_local(torch.ones(2, 2), flat, [Shard(0)]))
        texts = [
            refuse(Holder(split), mesh["tp"]),
            refuse(Holder(both), mesh["dp"]),
            refuse(Holder(unnamed), flat),
            refuse(Holder(unnamed), mesh["dp"]),
        ]
        self.assertExpectedInline(
            "\n".join(texts),
            """\
ValueError: inner.weight: is a DTensor over dimension 'tp' that simple_fsdp is to shard over (its mesh: DeviceMesh((tp=2), 'cpu', stride=(1,)), simple_fsdp's: DeviceMesh((tp=2), 'cpu', stride=(1,))); pass the data-parallel part of the mesh
ValueError: inner.weight: is a DTensor over dimension 'dp' that simple_fsdp is to shard over (its mesh: DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1)), simple_fsdp's: DeviceMesh((dp=2), 'cpu', stride=(2,))); pass the data-parallel part of the mesh
ValueError: inner.weight: is a DTensor over the mesh that simple_fsdp is to shard over (its mesh: DeviceMesh((4,), 'cpu', stride=(1,)), simple_fsdp's: DeviceMesh((4,), 'cpu', stride=(1,))); pass the data-parallel part of the mesh
ValueError: inner.weight: is a DTensor over DeviceMesh((4,), 'cpu', stride=(1,)), which is no sibling of simple_fsdp's mesh, DeviceMesh((dp=2), 'cpu', stride=(2,)); make one mesh with named dimensions and use parts of it, as in mesh = init_device_mesh(device, (dp, tp), mesh_dim_names=('dp', 'tp')), mesh['dp'] and mesh['tp']""",
        )

    def test_meta_is_no_device_of_its_own(self) -> None:
        model = nn.Sequential(linear(), linear())
        model[1].weight = nn.Parameter(torch.empty(8, 2, device="meta"))
        assert simple_fsdp(model)[1].weight.is_meta


class KeepsAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.transposed = self.inner.weight.t()


@pytest.mark.usefixtures("one_of_four")
class TestModules(expecttest.TestCase):
    @pytest.mark.compile
    def test_modules_that_cannot_be_sharded_are_refused(self) -> None:
        modules: list[Any] = [
            torch.jit.script(nn.Linear(2, 8)),
            torch.compile(linear(), backend="eager"),
            nn.parallel.DistributedDataParallel(linear()),
            fully_shard(linear()),
            nn.Embedding(8, 2, max_norm=1.0),
            nn.EmbeddingBag(8, 2, sparse=True),
            KeepsAView(),
        ]
        texts = [refuse(nn.Sequential(linear(), module)) for module in modules]
        self.assertExpectedInline(
            "\n".join(texts),
            """\
ValueError: 1 (RecursiveScriptModule): TorchScript modules cannot read gathered weights; pass the original module
ValueError: 1 (OptimizedModule): is compiled already; shard first, then compile
ValueError: 1 (DistributedDataParallel): is data parallel already; pass the module inside, or leave it out
ValueError: 1 (FSDPLinear): is data parallel already; pass the module inside, or leave it out
ValueError: 1 (Embedding): max_norm changes the weight in forward, where it is a gathered copy; renormalise in the loop instead
ValueError: 1 (EmbeddingBag): sparse=True makes sparse gradients, which cannot be reduced; use sparse=False
ValueError: 1 (KeepsAView): 'transposed' is a view of a parameter, which would not see its gradient; make it in forward""",
        )

    def test_a_model_that_is_sharded_already_is_refused(self) -> None:
        model = simple_fsdp(tiny_llama(layers=1))
        texts = [refuse(model), refuse(model.layers[0]), refuse(model.norm, ignored_params=[model.norm.weight])]
        whole = nn.Sequential(simple_fsdp(linear()), linear())
        texts.append(refuse(whole, ignored_params=[whole[0].weight]))
        self.assertExpectedInline(
            "\n".join(texts),
            """\
ValueError: model: this Llama is sharded by simple_fsdp already, by itself or as a part; call it once per module, and on parts before the whole
ValueError: model: this Block is sharded by simple_fsdp already, by itself or as a part; call it once per module, and on parts before the whole
ValueError: model: this RMSNorm is sharded by simple_fsdp already, by itself or as a part; call it once per module, and on parts before the whole
ValueError: ignored_params: weight is sharded already""",
        )


@pytest.mark.usefixtures("one_of_four")
class TestAfterwards(expecttest.TestCase):
    """Changes to a sharded module that would leave the ranks with different weights."""

    def test_changes_after_sharding_are_refused(self) -> None:
        model = simple_fsdp(nn.Sequential(linear(), nn.Linear(8, 2, bias=False)))
        changes: list[Callable[[], Any]] = [
            functools.partial(setattr, model[0], "weight", nn.Parameter(torch.zeros(8, 2))),
            functools.partial(setattr, model[0], "scale", nn.Parameter(torch.zeros(8))),
            functools.partial(setattr, model[1], "bias", nn.Parameter(torch.zeros(2))),
            functools.partial(setattr, model[1], "bias", model[0].bias),
            functools.partial(delattr, model[0], "weight"),
            lambda: parametrizations.weight_norm(model[0]),
            lambda: prune.l1_unstructured(model[0], "weight", amount=1),
            lambda: model.append(linear()) and model(torch.ones(1, 2)),
        ]
        self.assertExpectedInline(
            "\n".join(map(said, changes)),
            """\
RuntimeError: 0.weight: a Parameter of shape (8, 2) was assigned where simple_fsdp() had put a DTensor of shape (8, 2) placed as (Shard(dim=0),). Copy the values into the shard (load_state_dict does), or assign before simple_fsdp()
RuntimeError: scale: a parameter added to a sharded Linear would not be sharded, nor its gradient reduced; add it before simple_fsdp()
RuntimeError: bias: a parameter added to a sharded Linear would not be sharded, nor its gradient reduced; add it before simple_fsdp()
RuntimeError: bias: a parameter added to a sharded Linear would not be sharded, nor its gradient reduced; add it before simple_fsdp()
RuntimeError: 0.weight: cannot be deleted after simple_fsdp() (does something register a parametrization, or prune?); do it before, or assign None to be rid of the parameter
RuntimeError: 0.weight: cannot be deleted after simple_fsdp() (does something register a parametrization, or prune?); do it before, or assign None to be rid of the parameter
RuntimeError: weight_orig: a parameter added to a sharded Linear would not be sharded, nor its gradient reduced; add it before simple_fsdp()
RuntimeError: 2.weight: a module added to a sharded Sequential is not sharded, nor are its gradients reduced; add it before simple_fsdp()""",
        )

    def test_tools_that_would_make_it_data_parallel_again_are_refused(self) -> None:
        model = simple_fsdp(nn.Sequential(linear()))
        tools: list[Callable[[nn.Module], Any]] = [nn.parallel.DistributedDataParallel, fully_shard, replicate]
        texts = [said(functools.partial(tool, module)) for tool in tools for module in (model, model[0])]
        self.assertExpectedInline(
            "\n".join(texts),
            """\
ValueError: DistributedDataParallel: its model is data parallel by simple_fsdp already; train it as it is. mode='replicate' and mode='hybrid_shard' of simple_fsdp() make replicas
ValueError: DistributedDataParallel: its model is data parallel by simple_fsdp already; train it as it is. mode='replicate' and mode='hybrid_shard' of simple_fsdp() make replicas
ValueError: fully_shard: its model is data parallel by simple_fsdp already; train it as it is. mode='replicate' and mode='hybrid_shard' of simple_fsdp() make replicas
ValueError: fully_shard: its model is data parallel by simple_fsdp already; train it as it is. mode='replicate' and mode='hybrid_shard' of simple_fsdp() make replicas
ValueError: replicate: its model is data parallel by simple_fsdp already; train it as it is. mode='replicate' and mode='hybrid_shard' of simple_fsdp() make replicas
ValueError: replicate: its model is data parallel by simple_fsdp already; train it as it is. mode='replicate' and mode='hybrid_shard' of simple_fsdp() make replicas""",
        )
        assert copy.deepcopy(model)(torch.ones(1, 2)).shape == (1, 8)
        get_model_state_dict(model)  # looks for modules that others have made data parallel

    def test_a_parameter_may_be_removed(self) -> None:
        model = simple_fsdp(linear())
        setattr(model, "bias", None)  # noqa: B010
        assert model(torch.ones(1, 2)).shape == (1, 8)

    def test_a_tie_may_be_made_afterwards(self) -> None:
        model = simple_fsdp(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        model[1].weight = model[0].weight
        model(torch.ones(1, 4)).sum().backward()
        assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.bias"]
        assert model[1].weight.grad is not None

    def test_an_error_while_reading_a_weight_is_not_swallowed(self) -> None:
        model = simple_fsdp(linear())

        def fails(*_args: Any) -> Tensor:
            raise AttributeError("planted")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("simplefsdp.frontend.eager_resharding.read", fails)
            text = said(lambda: model(torch.zeros(1, 2)))
        self.assertExpectedInline(text, """RuntimeError: reading 'weight' failed: planted""")
