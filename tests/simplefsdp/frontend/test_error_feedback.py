"""In hybrid shard, replicas add what they lost by rounding their sums of gradients to their next sums."""

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from inductor_passes.ops.encode import ENCODE_SUMS
from inductor_passes.runtime.agreement import forget_failures
from simplefsdp import ErrorFeedback, WireFormat, simple_fsdp
from simplefsdp.analysis.optimizer_costs import state_of_parameters
from simplefsdp.training.checkpoint import StrictLoadPlanner
from tests.compare import vectors, whole
from tests.graphs import capture, nodes
from tests.models import batch, tiny_llama, train
from tests.ranks import Ranks

FED_BACK = WireFormat(reduce="int8", between_nodes="int4", error_feedback=True)


def _mesh(replicas: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, 4 // replicas), mesh_dim_names=("replicate", "shard"))


def _errors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {fqn: value.to_local().clone() for fqn, value in ErrorFeedback(model).state_dict().items()}


def _columns_of_matrices_of(columns: int) -> Callable[[nn.Parameter], Shard | None]:
    return lambda param: Shard(1) if param.ndim == 2 and param.shape[1] == columns else None


def test_the_mean_gradient_of_many_steps_is_that_of_full_precision(four_ranks: Ranks) -> None:
    four_ranks.run(_mean)


def _mean() -> None:
    found: dict[str, list[torch.Tensor]] = {}
    wires: dict[str, Any] = {
        "exact": None,
        "rounded": WireFormat(reduce="bf16-fp32sum", between_nodes="int4"),
        "fed back": WireFormat(reduce="bf16-fp32sum", between_nodes="int4", error_feedback=True),
    }
    for name, wire in wires.items():
        torch.manual_seed(0)
        # Rows that ranks share unevenly, and columns of which they hold some.
        model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 400, bias=False))
        simple_fsdp(model, _mesh(), wire=wire, shard_placement_fn=_columns_of_matrices_of(7))
        for _ in range(20):  # gradients are added up in ``grad``
            model(vectors(0, dist.get_rank())).square().mean().backward()
        found[name] = [whole(param.grad) for param in model.parameters()]
    for exact, rounded, fed_back in zip(*found.values(), strict=True):
        assert 0 < (fed_back - exact).norm() < (rounded - exact).norm() / 5


@pytest.mark.parametrize("plan", ["block", pytest.param("none", marks=pytest.mark.slow)])
def test_compiled_code_feeds_back_the_errors_of_eager_mode(four_ranks: Ranks, plan: str) -> None:
    four_ranks.run(_compiled, plan)


def _compiled(plan: str) -> None:
    models = [simple_fsdp(tiny_llama(ffn_dim=9), _mesh(), wire=FED_BACK) for _ in range(3)]
    options: list[Any] = [{"lower_with": "aot_eager", "plan": plan}, {"plan": plan}]
    forwards: list[Any] = [
        models[0],
        *(torch.compile(each, backend="simplefsdp", options=of) for each, of in zip(models[1:], options, strict=True)),
    ]
    trained = [train(model, forward, 3, dist.get_rank()) for model, forward in zip(models, forwards, strict=True)]
    eager, compiled, fused = map(_errors, models)
    torch.testing.assert_close(trained[1], trained[0], rtol=0, atol=0)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0)
    assert all(errors.any() for errors in eager.values() if errors.numel() > 128)
    for fqn, errors in fused.items():
        assert eager[fqn].norm() / 2 <= errors.norm() <= 2 * eager[fqn].norm()
    replicas = [torch.empty_like(errors := eager["output.weight"]) for _ in range(2)]
    dist.all_gather(replicas, errors, _mesh().get_group("replicate"))
    assert not torch.equal(*replicas)


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_each_member_of_a_bucket_has_the_errors_of_its_shard() -> None:
    wire: Any = {"layers.*": FED_BACK, "output*": WireFormat(reduce="int8")}
    model = simple_fsdp(tiny_llama(layers=2), _mesh(), wire=wire)
    captured = capture(model, batch(0, 0)[0], plan="block")
    found = nodes(captured.backward, ENCODE_SUMS)
    assert [len(node.args) for node in found] == [6, 7, 7]
    for node in found[1:]:
        shards: Any = node.args[6]
        assert all(shard.op == "placeholder" for shard in shards)
        assert [shard.meta["val"].numel() for shard in shards] == node.args[3]
        assert len({*shards}) == len(shards) == 9


def test_errors_are_saved_and_loaded_with_a_model(four_ranks: Ranks, tmp_path: Path) -> None:
    four_ranks.run(_saved, tmp_path)


def _saved(folder: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 7), nn.Linear(7, 6, bias=False))
        return simple_fsdp(model, _mesh(), wire=FED_BACK, shard_placement_fn=_columns_of_matrices_of(7))

    def steps(model: nn.Module, first: int) -> dict[str, torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(first, first + 3):
            model(vectors(step, dist.get_rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {fqn: value.to_local().clone() for fqn, value in model.state_dict().items()} | {
            f"error of {fqn}": error for fqn, error in _errors(model).items()
        }

    model, resumed, forgetful = build(), build(), build()
    steps(model, 0)
    state: dict[str, Any] = {"model": model.state_dict(), "error_feedback": ErrorFeedback(model)}
    dcp.save(state, checkpoint_id=folder)
    expected = steps(model, 3)
    state = {"model": resumed.state_dict(), "error_feedback": ErrorFeedback(resumed)}
    dcp.load(state, checkpoint_id=folder, planner=StrictLoadPlanner())
    torch.testing.assert_close(steps(resumed, 3), expected, rtol=0, atol=0)
    dcp.load({"model": forgetful.state_dict()}, checkpoint_id=folder)
    found = steps(forgetful, 3)
    assert any(not torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.usefixtures("one_of_four")
def test_errors_are_those_of_the_layout_of_a_tensor_parallel_parameter() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = parallelize_module(nn.Linear(4, 6, bias=False), mesh["tp"], ColwiseParallel())
    simple_fsdp(model, mesh["replicate", "shard"], wire=FED_BACK)
    (errors,) = ErrorFeedback(model).state_dict().values()
    assert errors.shape == (2, 6, 4)
    assert errors.to_local().shape == (1, 3, 4)
    assert [placement.dim for placement in errors.placements] == [0, 1, 1]
    assert errors.placements[1].split_factor == model.weight.placements[1].split_factor == 2


@pytest.mark.usefixtures("one_of_four")
def test_errors_follow_their_model() -> None:
    with torch.device("meta"):
        model = simple_fsdp(nn.Linear(4, 6), _mesh(), wire=FED_BACK)
    with pytest.raises(ValueError, match="weight is on meta and has no errors yet"):
        ErrorFeedback(model)
    model.to_empty(device="cpu")
    state = ErrorFeedback(model).state_dict()
    assert {fqn: value.dtype for fqn, value in state.items()} == dict.fromkeys(["weight", "bias"], torch.float32)
    state["weight"].to_local().fill_(3)
    twin = copy.deepcopy(model)
    model.bfloat16()
    for each in (model, twin):
        assert (_errors(each)["weight"] == 3).all()
        assert not _errors(each)["bias"].any()
    ErrorFeedback(twin).state_dict()["weight"].to_local().zero_()
    assert (_errors(model)["weight"] == 3).all()
    ErrorFeedback(twin).load_state_dict(ErrorFeedback(model).state_dict())
    assert (_errors(twin)["weight"] == 3).all()
    plain = simple_fsdp(nn.Linear(4, 6), _mesh())
    more = [state_of_parameters(each.parameters()).resident_bytes for each in (twin, plain)]
    assert more[0] - more[1] == 4 * (6 * 4 + 6) // 2
    both = nn.ModuleList([model, twin])
    assert [*ErrorFeedback(both).state_dict()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    del both
    left = weakref.ref(ErrorFeedback(twin).state_dict()["weight"].to_local().untyped_storage())
    del twin, each
    gc.collect()
    assert left() is None


@pytest.mark.usefixtures("one_of_four")
def test_what_cannot_be_fed_back_is_refused() -> None:
    with pytest.raises(TypeError, match="error_feedback: expected True or False, found 'yes'"):
        WireFormat(reduce="int8", error_feedback="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="error_feedback: needs a format of reduce"):
        WireFormat(gather="fp8", error_feedback=True)
    with pytest.raises(ValueError, match="wire: weight: error_feedback needs mode 'hybrid_shard'"):
        simple_fsdp(nn.Linear(4, 6), wire=FED_BACK)
    with pytest.raises(ValueError, match="wire: weight: reduce='bf16-fp32sum' sends no less among 4 replicas"):
        simple_fsdp(nn.Linear(4, 6), _mesh(4), wire=WireFormat(reduce="bf16-fp32sum", error_feedback=True))
    with pytest.raises(TypeError, match="found int"):
        ErrorFeedback(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no parameter feeds errors back"):
        ErrorFeedback(simple_fsdp(nn.Linear(4, 6), _mesh()))
    feedback = ErrorFeedback(simple_fsdp(nn.Linear(4, 6, bias=False), _mesh(), wire=FED_BACK))
    with pytest.raises(ValueError, match=r"weight: errors of shape None were given, \(2, 6, 4\) are here"):
        feedback.load_state_dict({})
    for given in ({"weight": torch.ones(4, 6, 4)}, feedback.state_dict() | {"bias": torch.ones(2, 6)}):
        with pytest.raises(ValueError, match=r"errors of shape \((4, 6, 4|2, 6)\) were given"):
            feedback.load_state_dict(given)
    with pytest.raises(TypeError, match="weight: expected a DTensor, found Tensor"):
        feedback.load_state_dict({"weight": torch.ones(2, 6, 4)})


def test_ranks_of_which_one_feeds_errors_back_are_told(four_ranks: Ranks) -> None:
    four_ranks.run(_told)


def _told() -> None:
    torch.manual_seed(0)
    wire = WireFormat(reduce="int8", error_feedback=dist.get_rank() == 2)
    model = simple_fsdp(nn.Linear(8, 8), _mesh(), wire=wire)
    with pytest.raises(RuntimeError, match=r"sharded different models(.|\n)*error_feedback=True"):
        model(torch.ones(2, 8))
    dist.barrier()
    forget_failures()
