"""An optimizer on sharded parameters does what it does in one process, to the bit."""

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from inductor_passes.runtime.agreement import forget_failures
from inductor_passes.torch_compat.dtensor import dtensor
from simplefsdp import Ranger21, clip_grad_norm_, distribute_optimizer, simple_fsdp
from simplefsdp.frontend.sharding import part_of
from simplefsdp.training.optimizers.claims import optimizer_of
from tests.compare import whole
from tests.ranks import Ranks, fake_group

optim = torch.optim
MATRICES: dict[str, Any] = {
    "Muon": functools.partial(optim.Muon, lr=0.1),
    "Adafactor": functools.partial(optim.Adafactor, lr=0.1),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 6)


class Model(nn.Module):
    """Rows that 2 and 4 ranks do not divide, fewer rows than ranks, a 0-dim, a tied, a frozen and a plain parameter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.few = nn.Parameter(torch.randn(1, 5))
        self.kernel = nn.Parameter(torch.randn(6, 2, 3, 3))
        self.scale = nn.Parameter(torch.randn(()))
        self.in_bf16 = nn.Parameter(torch.randn(5, 4).bfloat16())
        self.ignored = nn.Parameter(torch.randn(3, 3))
        self.layers[0].tied = self.few
        self.layers[2].down.weight.requires_grad_(False)
        with torch.no_grad():
            for param in self.parameters():
                param.normal_()


def one_dim(model: Model, mode: str = "fully_shard", **options: Any) -> nn.Module:
    return simple_fsdp(
        model, init_device_mesh("cpu", (dist.get_world_size(),)), mode=mode, ignored_params=[model.ignored], **options
    )


def tensor_parallel(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return simple_fsdp(model, mesh["dp"], ignored_params=[model.ignored])


def hybrid(model: Model) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return simple_fsdp(model, mesh, mode="hybrid_shard", ignored_params=[model.ignored])


MODES: dict[str, Callable[[Model], nn.Module]] = {
    "fully": one_dim,
    "replicate": functools.partial(one_dim, mode="replicate"),
    "columns": functools.partial(one_dim, shard_placement_fn=lambda param: Shard(1) if param.ndim == 2 else None),
    "offload": functools.partial(one_dim, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "hybrid": hybrid,
    "tensor parallel": tensor_parallel,
}


def trainable(model: nn.Module, kind: str) -> list[nn.Parameter]:
    params = list(model.parameters())
    return [p for p in params if p.ndim == 2] if kind == "Muon" else params


def set_gradients(plain: nn.Module, model: nn.Module, step: int) -> None:
    """Give both models the same whole gradients; in every third step, one parameter has none."""
    generator = torch.Generator().manual_seed(step)
    for i, (param, part) in enumerate(zip(plain.parameters(), model.parameters(), strict=True)):
        whole = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = part.grad = None
        if not param.requires_grad or (i == 1 and step % 3 == 0):
            continue
        param.grad = whole
        if isinstance(part, DTensor):
            mesh = part.device_mesh
            coordinate = [mesh.get_local_rank(i) for i in range(mesh.ndim)]
            local = whole[part_of(whole.shape, mesh.shape, coordinate, part.placements)].clone()
            part.grad = dtensor(local, mesh, part.placements, whole.shape)
        else:
            part.grad = whole.clone()


def assert_same_values(
    shard: Callable[[Model], nn.Module], plain: nn.Module, model: nn.Module, *, to_rounding: bool = False
) -> None:
    expected = Model(0)
    with torch.no_grad():
        for param, value in zip(expected.parameters(), plain.parameters(), strict=True):
            param.copy_(value)
    for (name, part), other in zip(model.named_parameters(), shard(expected).parameters(), strict=True):
        mine, theirs = (p.to_local() if isinstance(p, DTensor) else p for p in (part.detach(), other.detach()))
        assert torch.equal(mine, theirs) or (to_rounding and torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)), name


def compare_with_one_process(mode: str, kind: str, make: Callable[..., Any], steps: int, **options: Any) -> None:
    shard = MODES[mode]
    plain, model = Model(0), shard(Model(0))
    reference = make(trainable(plain, kind))
    optimizer = distribute_optimizer(make(trainable(model, kind)), **options)
    schedulers = [optim.lr_scheduler.LinearLR(each, total_iters=9) for each in (reference, optimizer)]
    for step in range(steps):
        set_gradients(plain, model, step)
        before = [p.grad for p in model.parameters()]
        for each in (reference, optimizer, *schedulers):
            each.step()
        assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))
    assert_same_values(shard, plain, model)
    owned = {id(each.param): each for each in optimizer.simple_fsdp_distribution.owned}
    for param, state in optimizer.state.items():
        if id(param) in owned and state:
            assert owned[id(param)].owner_rank == dist.get_rank(), "only the owner has state"


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("mode", MODES)
def test_parameters_stepped_by_owners_have_the_values_of_one_process(four_ranks: Ranks, mode: str, kind: str) -> None:
    four_ranks.run(functools.partial(compare_with_one_process, exchange_bytes=600), mode, kind, MATRICES[kind], 20)


class CountsCalls(optim.SGD):
    """An optimizer that keeps the number of its steps where no group of parameters has it."""

    calls = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / (param.grad.norm() + self.calls))


class CountsInGroups(optim.SGD):
    """An optimizer that keeps the number of its steps in its groups of parameters, as many do."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / (param.grad.norm() + group["step"]))


class GlobalNorm(optim.SGD):
    """An optimizer that divides by the norm over the whole model."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = sum((param.grad.norm() for param in params), torch.zeros(()))
        for param in params:
            param.sub_(param.grad / (norm + 1.0))


class RowNorm(optim.SGD):
    """An optimizer in which the values of a row depend on each other."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"]):
            if param.grad is not None:
                norm = param.grad.norm(dim=-1, keepdim=True) if param.ndim > 1 else param.grad.abs()
                param.sub_(param.grad / (norm + 1.0))


OWN: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "elementwise, on shards": ("tensor parallel", optim.AdamW, {}),
    "elementwise, with an index": ("fully", optim.Rprop, {}),
    "elementwise, on owners": ("tensor parallel", optim.AdamW, {"on": "owners"}),
    "counts its calls": ("fully", CountsCalls, {}),
    "counts in its groups": ("hybrid", CountsInGroups, {"exchange_bytes": 600}),
    "rows": ("fully", RowNorm, {}),
    "rows of which ranks have parts": ("columns", RowNorm, {}),
}


@pytest.mark.parametrize("case", OWN)
def test_other_optimizers_have_the_values_of_one_process(four_ranks: Ranks, case: str) -> None:
    mode, kind, options = OWN[case]
    four_ranks.run(functools.partial(compare_with_one_process, **options), mode, "", functools.partial(kind, lr=0.1), 6)


def test_one_rank_can_step_the_whole_model(two_ranks: Ranks) -> None:
    two_ranks.run(_whole_model)


def _whole_model() -> None:
    build = functools.partial(GlobalNorm, lr=0.1)
    shard = MODES["fully"]
    plain, model = Model(0), shard(Model(0))
    params = [[p for p in m.parameters() if p.dtype == torch.float32 and p.shape != (3, 3)] for m in (plain, model)]
    with pytest.raises(TypeError, match=r"GlobalNorm cannot be distributed, .* depends on other parameters"):
        distribute_optimizer(build(params[1]))
    with pytest.raises(TypeError, match="whole_model: expected all parameters sharded over one mesh, of one dtype"):
        distribute_optimizer(build(model.parameters()), whole_model=True)
    reference, optimizer = build(params[0]), distribute_optimizer(build(params[1]), whole_model=True)
    for step in range(3):
        set_gradients(plain, model, step)
        for each in (reference, optimizer):
            each.step()
    assert_same_values(shard, plain, model)


def test_groups_of_parameters_may_be_stepped_by_different_ways(two_ranks: Ranks) -> None:
    two_ranks.run(_ways)


class MuonAndSGD(optim.Optimizer):
    """An optimizer whose groups say by which algorithm they are stepped."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"muon": False})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / (1 + param.grad.norm()) if group["muon"] else param.grad)


def _ways() -> None:
    shard = MODES["fully"]
    plain, model = Model(0), shard(Model(0))

    def build(of: nn.Module) -> Any:
        params = list(of.parameters())
        wide = [p for p in params if p.ndim == 2 and p.shape[0] >= p.shape[1] and p.dtype == torch.float32]
        rest = [p for p in params if not any(p is other for other in wide)]
        return MuonAndSGD([{"params": wide, "muon": True}, {"params": rest}])

    reference, optimizer = build(plain), distribute_optimizer(build(model))
    assert optimizer.simple_fsdp_distribution.ways == ["owners", "shards"]
    for step in range(3):
        set_gradients(plain, model, step)
        for each in (reference, optimizer):
            each.step()
    assert_same_values(shard, plain, model)
    # A new group is dealt at the next step, and those that were dealt keep their owners.
    before = [(each.param, each.owner) for each in optimizer.simple_fsdp_distribution.owned]
    for each, of in ((reference, plain), (optimizer, model)):
        frozen = of.layers[2].down.weight.requires_grad_()
        for group in each.param_groups:
            group["params"] = [param for param in group["params"] if param is not frozen]
        each.add_param_group({"params": [frozen], "muon": True})
    for step in range(3):
        set_gradients(plain, model, step)
        for each in (reference, optimizer):
            each.step()
    assert_same_values(shard, plain, model)
    after = {id(each.param): each.owner for each in optimizer.simple_fsdp_distribution.owned}
    assert len(after) == len(before) + 1
    assert all(after[id(param)] == owner for param, owner in before)


def test_every_exchange_but_the_first_is_begun_before_the_step_that_it_hides_under() -> None:
    seen: list[str] = []

    class Watched(optim.Muon):
        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                param.add_(param.grad.norm())
                seen.append("step")

    class Collectives(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "alltoall" in str(func):
                seen.append("exchange")
            return func(*args, **(kwargs or {}))

    with fake_group(4):
        model = simple_fsdp(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(12))))
        optimizer = Watched(model.parameters())
        optimizer = distribute_optimizer(optimizer, "owners", exchange_bytes=1)
        assert [len(each.owned) for each in optimizer.simple_fsdp_distribution.exchanges] == [4, 4, 4]
        for param in model.parameters():
            param.grad = param.detach().clone()
        seen.clear()  # of the probe
        with Collectives():
            optimizer.step()
    forth_and_back = ["exchange", "step", "exchange"]
    assert seen == ["exchange", *forth_and_back, *forth_and_back, "step", "exchange"]


def test_a_model_whose_optimizer_is_distributed_can_be_converted() -> None:
    with fake_group(4):
        model = simple_fsdp(nn.Linear(8, 8))
        optimizer = distribute_optimizer(optim.AdamW(model.parameters()))
        model.double()
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert all(state["exp_avg"].dtype == torch.float64 for state in optimizer.state.values())


def test_a_copy_of_a_model_may_have_an_optimizer_of_its_own() -> None:
    with fake_group(4):
        model = simple_fsdp(nn.Linear(8, 8))
        optimizer = distribute_optimizer(optim.AdamW(model.parameters()))
        twin = copy.deepcopy(model)
        assert [optimizer_of(each.weight) for each in (model, twin)] == [optimizer, None]
        of_twin = distribute_optimizer(optim.AdamW(twin.parameters()))
        assert [optimizer_of(each.weight) for each in (model, twin)] == [optimizer, of_twin]


def test_a_step_that_fails_on_one_rank_leaves_the_others_waiting_for_nothing(two_ranks: Ranks) -> None:
    two_ranks.run(_failing)


class FailsOnRank1(RowNorm):
    failing = False

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        if self.failing and dist.get_rank() == 1:
            raise FloatingPointError("no")
        super().step()


def _failing() -> None:
    model = MODES["columns"](Model(0))
    optimizer = distribute_optimizer(FailsOnRank1(model.parameters(), lr=0.1), exchange_bytes=1)
    set_gradients(Model(0), model, 1)
    optimizer.step()
    optimizer.failing = True
    params, mine = (
        optimizer.param_groups[0]["params"],
        [each.param for each in optimizer.simple_fsdp_distribution.owned if each.owner == 1],
    )
    before = [param.detach().to_local().clone() for param in mine]
    if dist.get_rank() == 1:
        with pytest.raises(FloatingPointError):
            optimizer.step()
    else:
        optimizer.step()
    assert optimizer.param_groups[0]["params"] is params
    assert all(torch.equal(param.to_local(), value) for param, value in zip(mine, before, strict=True))
    optimizer.failing = False
    optimizer.step()


def test_ranks_with_different_optimizers_are_told(two_ranks: Ranks) -> None:
    two_ranks.run(_different)


def _different() -> None:
    model = MODES["fully"](Model(0))
    params = [param for param in model.parameters() if param.ndim == 2]
    if dist.get_rank() == 1:
        params.reverse()
    with pytest.raises(RuntimeError, match=r"ranks . and . have distributed different optimizers(?s:.*)Build the"):
        distribute_optimizer(optim.Muon(params))
    forget_failures()
    dist.barrier()
    optimizer = distribute_optimizer(optim.Muon([model.layers[0].up.weight]))
    optimizer.add_param_group({"params": [model.layers[1 + dist.get_rank()].up.weight]})
    with pytest.raises(RuntimeError, match=r"ranks . and . have distributed different optimizers"):
        optimizer.step()
    forget_failures()


@pytest.mark.usefixtures("one_of_four")
def test_what_cannot_be_distributed_is_refused_by_name() -> None:
    model = simple_fsdp(nn.Linear(8, 8))
    params = list(model.parameters())
    refused: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (model, {}, TypeError, "optimizer: expected a torch.optim.Optimizer, found Linear"),
        (optim.LBFGS(params), {}, TypeError, "LBFGS cannot be distributed, its step needs a closure"),
        (optim.SparseAdam(params), {}, TypeError, "SparseAdam cannot be distributed, it needs sparse gradients"),
        (Ranger21(params, 10), {}, TypeError, "Ranger21 cannot be distributed, it steps shards by itself"),
        (optim.SGD(params), {"on": "gpu"}, ValueError, "on: expected 'auto', 'shards' or 'owners', found 'gpu'"),
        (optim.SGD(params), {"exchange_bytes": 0}, ValueError, "exchange_bytes: expected a positive number, found 0"),
        (optim.SGD(params), {"exchange_bytes": 1.5}, TypeError, "exchange_bytes: expected a number of bytes"),
        (optim.SGD(params), {"whole_model": 1}, TypeError, "whole_model: expected True or False, found 1"),
        (optim.SGD(params), {"whole_model": True, "on": "shards"}, ValueError, "whole_model: a whole model has an"),
        (optim.Adafactor(params), {"on": "shards"}, TypeError, "on: what Adafactor does .*; expected 'auto' or 'own"),
    ]
    for optimizer, options, kind, message in refused:
        with pytest.raises(kind, match=message):
            distribute_optimizer(optimizer, **options)
    optimizer = distribute_optimizer(optim.Adafactor(params))
    with pytest.raises(ValueError, match="optimizer: it is distributed already"):
        distribute_optimizer(optimizer)
    with pytest.raises(ValueError, match=r"optimizer: weight belongs to another distributed optimizer \(Adafactor\)"):
        distribute_optimizer(optim.AdamW(params))
    del optimizer
    distribute_optimizer(optim.AdamW(params))
    early = nn.Linear(8, 8)
    optimizer = optim.Adafactor(early.parameters())
    simple_fsdp(early)
    with pytest.raises(RuntimeError, match=r"weight: this is the parameter as it was before simple_fsdp\(\)"):
        distribute_optimizer(optimizer)


@pytest.mark.usefixtures("one_of_four")
def test_an_optimizer_says_how_it_is_distributed(caplog: pytest.LogCaptureFixture) -> None:
    model = simple_fsdp(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    with caplog.at_level(logging.INFO, "simplefsdp"):
        optimizer = distribute_optimizer(optim.Adafactor(model.parameters()))
    text = "Adafactor steps 4 on owners; of 4 owners the busiest has 1.97 times the mean cost; 1 exchanges each way"
    assert str(optimizer.simple_fsdp_distribution).startswith(text)
    assert text in caplog.text


def test_clipping_a_scaler_and_zero_grad_work(two_ranks: Ranks) -> None:
    two_ranks.run(_around)


def _around() -> None:
    results = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(6, 7, bias=False), nn.Tanh(), nn.Linear(7, 6, bias=False))
        if sharded:
            simple_fsdp(model)
        optimizer: Any = optim.Muon(model.parameters(), lr=0.1)
        if sharded:
            distribute_optimizer(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
        for step in range(4):
            x = torch.full((2, 6), 0.1 * (step + 1)) if step != 2 else torch.full((2, 6), torch.inf)
            scaler.scale(model(x).square().mean()).backward()
            scaler.unscale_(optimizer)
            (clip_grad_norm_ if sharded else nn.utils.clip_grad_norm_)(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        results.append((scaler.get_scale(), [whole(param) for param in model.parameters()]))
    (scale, expected), (found_scale, found) = results
    assert found_scale == scale
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
