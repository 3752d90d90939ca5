"""One model trained along a ladder of systems, from a single process to fused kernels: where do numbers first differ?

Each rung adds one thing to the rung before. All train the same model from the same weights on the same batches; losses,
gradients, parameters and buffers of every step are compared with those of the rung before. Buffers are those of each
rank; a single process has none to compare, as its buffers have seen the batches of all ranks.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from inductor_passes.torch_compat.dtensor import local_tensor
from simplefsdp.api import simple_fsdp
from simplefsdp.plan.grouping import BLOCK
from simplefsdp.rehearsal.systems import SYSTEMS, Parallelism

Forward = Callable[..., Any]
Trajectory = Sequence[Mapping[str, Tensor | None]]
"""For each step what this rank has, by label: the loss, then shards of each gradient, and of each parameter after the
step, then each buffer."""


class Rung(NamedTuple):
    """A system, and what it adds to the rung before."""

    name: str
    wrap: Callable[[nn.Module, Parallelism], Forward] | None
    """Shards a model in place and returns what to call; ``None``: the model stays whole and sees every rank's batch."""
    exact: bool
    """Whether its bits are those of all exact rungs: on a CPU, one or two ranks, for parameters that are read once."""


class Training(NamedTuple):
    """A model, its batches and its settings, the same for all rungs."""

    model: nn.Module
    """The whole model on the device; each rung trains a copy."""
    inputs: Callable[[int, int], tuple[Any, ...]]
    """``inputs(step, rank)`` returns what ``loss`` is called with, behind ``forward``."""
    loss: Callable[..., Tensor]
    """``loss(forward, *inputs)`` returns the mean loss of a batch, 0-dim."""
    steps: int
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    mesh: DeviceMesh
    mp_policy: MixedPrecisionPolicy


class Difference(NamedTuple):
    """How far a tensor of one rung is from that of the rung before, over all ranks."""

    step: int
    label: str
    ulps: int
    """The largest ``distance`` of two elements; -1: only one of both rungs has such a tensor."""
    relative: float
    """The norm of the difference, divided by the norm of the tensor of the rung before."""


class Comparison(NamedTuple):
    """One rung against the rung before."""

    rung: str
    against: str
    keeps_bits: bool
    """Whether equal bits are promised."""
    first: Difference | None
    """The first tensor that differs; ``None``: all have the same bits."""
    largest: Difference | None
    """The tensor with the largest relative difference."""

    def passed(self, tolerance: float) -> bool:
        """Return whether the rung is as close to the rung before as promised: ``tolerance`` bounds a relative norm."""
        if self.largest is None:
            return True
        return not self.keeps_bits and self.largest.ulps >= 0 and self.largest.relative <= tolerance


def _compiled(**options: Any) -> Callable[[nn.Module, Parallelism], Forward]:
    def wrap(model: nn.Module, parallelism: Parallelism) -> Forward:
        return torch.compile(_eager(model, parallelism), backend="simplefsdp", options=options)

    return wrap


def _eager(model: nn.Module, parallelism: Parallelism) -> Any:
    return simple_fsdp(
        model,
        parallelism.mesh,
        mp_policy=parallelism.mp_policy,
        reshard_after_forward=parallelism.reshard_after_forward,
    )


LADDER = (
    Rung("single", None, exact=False),
    Rung("fsdp2", SYSTEMS["fsdp2"].wrap, exact=True),
    Rung("eager", _eager, exact=True),
    Rung("aot_eager", _compiled(plan="none", lower_with="aot_eager"), exact=True),
    Rung(
        "bucketed", _compiled(plan=replace(BLOCK, name="block, prefetch=0", prefetch=0), lower_with="aot_eager"), True
    ),
    Rung("ordered", _compiled(plan="block", lower_with="aot_eager"), exact=True),
    Rung("inductor", _compiled(plan="block"), exact=False),
)
"""The rungs, each compared with the one before.

``single``: the whole model, on the batches of all ranks. ``fsdp2``: FSDP2, eager. ``eager``: ``simple_fsdp``, not
compiled. ``aot_eager``: traced into graphs, no kernels fused. ``bucketed``: collectives of a block merged, and issued
where they are needed. ``ordered``: collectives issued ahead. ``inductor``: kernels fused by TorchInductor.
"""


def climb(training: Training, rungs: Sequence[Rung] = LADDER) -> Iterator[Comparison | tuple[str, str]]:
    """Train rung after rung, and yield each comparison as soon as it is there; all ranks call it.

    A rung that raises is left out: its name and error are yielded, and the next is compared with the last that ran.
    """
    read_once = _reads_each_parameter_once(training)
    repeatable = read_once and dist.get_world_size() <= 2 and training.mesh.device_type == "cpu"
    before: tuple[Rung, Trajectory] | None = None
    for rung in rungs:
        torch._dynamo.reset()
        try:
            trajectory = _train(training, rung)
        except Exception as error:  # of a system: say so, and go on
            yield rung.name, f"{type(error).__name__}: {error}"
            continue
        if before is not None:
            keeps_bits = repeatable and rung.exact and before[0].exact
            sharded = rung.wrap is not None and before[0].wrap is not None
            found = differences(trajectory, before[1], training.mesh, buffers=sharded)
            yield Comparison(rung.name, before[0].name, keeps_bits, *found)
        before = rung, trajectory


def _reads_each_parameter_once(training: Training) -> bool:
    """Return whether no two modules share a parameter, and none with parameters runs twice in a forward."""
    model = copy.deepcopy(training.model)
    named = list(model.named_parameters(remove_duplicate=False))
    calls: dict[nn.Module, int] = {}

    def count(module: nn.Module, _args: Any) -> None:
        calls[module] = calls.get(module, 0) + 1

    owners = [module for module in model.modules() if any(p is not None for p in module._parameters.values())]
    for module in owners:
        module.register_forward_pre_hook(count)
    with torch.no_grad():
        training.loss(model, *training.inputs(0, 0))
    return len(named) == len({id(param) for _, param in named}) and all(number == 1 for number in calls.values())


def _train(training: Training, rung: Rung) -> Trajectory:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = copy.deepcopy(training.model)
    if rung.wrap is None:
        batches, forward = range(ranks), _whole(model, training.mp_policy)
    else:
        batches = range(rank, rank + 1)
        forward = rung.wrap(model, Parallelism(training.mesh, training.mp_policy, reshard_after_forward=True))
    optimizer = training.optimizer([param for param in model.parameters() if param.requires_grad])
    trajectory: list[dict[str, Tensor | None]] = []
    for step in range(training.steps):
        tensors: dict[str, Tensor | None] = {}
        for batch in batches:
            torch.manual_seed(step * ranks + batch)  # dropout is that of the batch
            loss = training.loss(forward, *training.inputs(step, batch))
            (loss / len(batches)).backward()
            if batch == rank:
                tensors["the loss"] = loss.detach().cpu()
        for name, param in model.named_parameters():
            tensors[f"the gradient of {name}"] = _shard(param.grad, rank, ranks)
        optimizer.step()
        optimizer.zero_grad()
        for name, param in model.named_parameters():
            tensors[name] = _shard(param, rank, ranks)
        for name, buffer in model.named_buffers():
            tensors[f"{_BUFFER}{name}"] = local_tensor(buffer).detach().cpu().clone()
        trajectory.append(tensors)
    return trajectory


def _whole(model: nn.Module, mp_policy: MixedPrecisionPolicy) -> Forward:
    """Return ``model`` as a function that reads its parameters in ``param_dtype``."""
    dtype = mp_policy.param_dtype
    if dtype is None:
        return model

    def forward(*inputs: Any) -> Any:
        cast = {name: p.to(dtype) if p.is_floating_point() else p for name, p in model.named_parameters()}
        args = tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)
        return torch.func.functional_call(model, cast, args)

    return forward


def _shard(tensor: Tensor | None, rank: int, ranks: int) -> Tensor | None:
    """Return a copy of this rank's shard on the CPU: the rank's chunk of the first dimension of a whole tensor."""
    if tensor is None:
        return None
    if isinstance(tensor, DTensor):
        return tensor.to_local().detach().cpu().clone()
    if tensor.ndim == 0:
        return tensor.detach().cpu().clone()
    chunks = tensor.detach().chunk(ranks)
    return (chunks[rank] if rank < len(chunks) else tensor[:0].detach()).cpu().clone()


def differences(
    found: Trajectory, expected: Trajectory, mesh: DeviceMesh, *, buffers: bool
) -> tuple[Difference | None, Difference | None]:
    """Return the first difference of two trajectories and the largest one; the same on all ranks, which all call it."""
    labels = [(step, label) for step, tensors in enumerate(expected) for label in tensors]
    places = [(step, label) for step, label in labels if buffers or not label.startswith(_BUFFER)]
    ulps = torch.zeros(len(places), dtype=torch.int64)
    norms = torch.zeros(len(places), 2, dtype=torch.float64)
    for i, (step, label) in enumerate(places):
        one, other = found[step][label], expected[step][label]
        if one is None or other is None:
            ulps[i] = _LACKING if one is not other else 0
            continue
        one, other = one.to(other.dtype), other
        ulps[i] = distance(one, other).max() if one.numel() else 0
        norms[i, 0] = (one.double() - other.double()).square().sum()
        norms[i, 1] = other.double().square().sum()
    if dist.get_world_size() > 1:
        ulps, norms = ulps.to(mesh.device_type), norms.to(mesh.device_type)
        dist.all_reduce(ulps, dist.ReduceOp.MAX)
        dist.all_reduce(norms)
        ulps, norms = ulps.cpu(), norms.cpu()
    relative = (norms[:, 0] / norms[:, 1].clamp_min(torch.finfo(torch.float64).tiny)).sqrt().nan_to_num(nan=torch.inf)
    unequal = [
        Difference(*place, -1 if count == _LACKING else count, torch.inf if count == _LACKING else far)
        for place, count, far in zip(places, ulps.tolist(), relative.tolist(), strict=True)
        if count
    ]
    return (unequal[0] if unequal else None), max(unequal, key=lambda one: one.relative, default=None)


_BUFFER = "the buffer "
_LACKING = torch.iinfo(torch.int64).max
"""In place of a distance in ulps: only one of both rungs has such a tensor."""
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def distance(one: Tensor, other: Tensor) -> Tensor:
    """Return how many representable numbers lie between two elements, int64, of tensors of one dtype and shape.

    +0.0 and -0.0 are 0 apart, numbers with the same bits too; a NaN is far from each number.
    """
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if not one.is_floating_point():
        return (one.long() - other.long()).abs()
    lines = []
    for tensor in (one, other):
        bits = tensor.contiguous().view(_BITS[tensor.dtype.itemsize]).long()
        negative = torch.iinfo(_BITS[tensor.dtype.itemsize]).min - bits  # a negative number's bits grow as it falls
        lines.append(torch.where(bits < 0, negative, bits))
    return (lines[0] - lines[1]).abs()
