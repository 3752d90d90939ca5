"""A parameter as a shard: what is known about it, and the collectives that it causes.

::

    shard - [to device] - [pad] - cast - all_gather - wait - [slice] -> full weight     (forward, and again in backward)
    full gradient - [add_up] - cast - [pad] - reduce_scatter - wait - [all_reduce - wait] - [slice] - cast - [to host]
                  -> gradient

Of a tensor-parallel parameter (a ``DTensor``) the local tensor is sharded, and what was gathered is put into a
``DTensor`` again. A shard along another dim than 0 is moved to dim 0 and back. A replicated parameter is not gathered,
and its gradient is all-reduced. In a wire format others travel encoded (``encoded_collectives.py``). The order of
casts, reductions and divisions is FSDP2's (``foreach_all_gather`` and ``foreach_reduce`` in
``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py``): both train to the same bits.
"""

import functools
import math
import weakref
from ast import literal_eval
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.utils._pytree import tree_leaves

from inductor_passes.collectives import TwoSteps
from inductor_passes.ops.offload import TO_DEVICE, TO_HOST
from inductor_passes.torch_compat.dtensor import (
    REDUCES_IN_OWN_DTYPE,
    DTensorSpec,
    StridedShard,
    concatenate_meshes,
    dtensor,
)
from simplefsdp.frontend import encoded_collectives
from simplefsdp.frontend.encoded_collectives import encodes_here
from simplefsdp.frontend.gather_hooks import gather_with_hooks, has_hooks, part_of_subclass

_c10d = torch.ops._c10d_functional


class Group(NamedTuple):
    """A process group, as functional collectives name it."""

    name: str
    ranks: int


Reshard = bool | Literal["auto"]


class Communication(NamedTuple):
    """Facts that a parameter's collectives depend on; the same on every rank."""

    shape: tuple[int, ...]
    """Shape of what is sharded: the whole parameter, or this rank's part of a tensor-parallel one."""
    dim: int | None
    """Dim of the shards; ``None``: every rank holds the whole."""
    shard_group: Group | None
    """Ranks that hold different shards; gradients are reduced over them first (all-reduced if ``dim`` is ``None``).
    ``None``: this rank holds the whole."""
    replica_group: Group | None
    """Ranks that hold the same shard; gradients are then all-reduced over them. ``None``: there is no other."""
    param_dtype: torch.dtype | None = None
    """Dtype of the gathered weight; ``None``: that of the shard."""
    reduce_dtype: torch.dtype | None = None
    """Dtype of the gradient reduction; ``None``: as ``reduction_dtype`` says."""
    two_steps: TwoSteps | None = None
    """How a gradient with a wire format is reduced over several nodes; ``None``: in one step."""
    divide_factor: float | None = None
    """The divisor of the sum of all ranks' gradients; ``None``: the number of ranks."""
    reshard_after_forward: Reshard = True
    """Whether the full weight is dropped after forward and gathered again in backward; ``"auto"``: unless a planner
    keeps it."""
    device: str | None = None
    """Type of the device where it is gathered and its gradient reduced, if its shard is offloaded: kept on CPU."""
    pinned: bool = False
    """Whether an offloaded shard and its gradient are in pinned memory."""
    gather_format: str | None = None
    """Wire format of the gathered weight; ``None``: ``param_dtype``."""
    reduce_format: str | None = None
    """Wire format of the gradient on its way to the rank that owns the shard; ``None``: ``reduce_dtype``."""
    is_exchanged: bool = False
    """Whether tokens and embeddings travel in place of the weight and its gradient (``embedding_lookup.py``)."""
    hooks_group: Group | None = None
    """Ranks that hold different shards, of a parameter that says itself what is gathered (``gather_hooks.py``)."""

    @property
    def feeds_back(self) -> bool:
        """Whether rounding errors of the gradient are kept and added to the next one."""
        return self.two_steps is not None and self.two_steps.feeds_back

    @property
    def groups(self) -> list[Group]:
        """Process groups that gradients are reduced over, in this order."""
        return [group for group in (self.shard_group, self.replica_group) if group is not None]

    def encode(self) -> str:
        """Return the communication as text, which ``decode`` reads.

        Of all kinds of values, Dynamo treats only strings as constants for good, and one comparison guards all fields.
        """
        return repr(tuple(str(value) if isinstance(value, torch.dtype) else value for value in _plain(self)))


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


@functools.cache
def decode(text: str) -> Communication:
    fields = literal_eval(text)
    shape, dim, shard_group, replica_group, param_dtype, reduce_dtype, two_steps, *rest, hooks_group = fields
    return Communication(
        shape,
        dim,
        shard_group and Group(*shard_group),
        replica_group and Group(*replica_group),
        param_dtype and getattr(torch, param_dtype.removeprefix("torch.")),
        reduce_dtype and getattr(torch, reduce_dtype.removeprefix("torch.")),
        two_steps and TwoSteps(*two_steps),
        *rest,
    )._replace(hooks_group=hooks_group and Group(*hooks_group))


class Uncompared(NamedTuple):
    """Facts about a parameter that all ranks of some groups must have in common."""

    sharding: str
    """How the parameter communicates."""
    digest: str | None
    """Digest of the values before they were sharded; ``None``: values are not compared."""
    groups: tuple[Group, ...]


@dataclass(frozen=True, eq=False)
class ShardedModel:
    """A model given to ``simple_fsdp``, or a deep copy."""

    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """FQN and whole shape of each parameter, in registration order."""
    uncompared: dict[str, "Uncompared"] = field(default_factory=dict)
    """Facts about each parameter, by FQN; empty once the ranks have compared them."""
    on_meta: set[str] = field(default_factory=set)
    """FQNs of parameters that were sharded on ``meta``; empty once a call has found values in all."""
    errors: dict[str, Tensor] = field(default_factory=dict)
    """Rounding errors of sums of gradients that are fed back, (numel of the shard,), float32, by FQN."""
    holders: dict[str, tuple[weakref.ref[nn.Module], str]] = field(default_factory=dict)
    """A module that holds the parameter, and the name that the parameter has there, by FQN."""

    def live_parameters(self) -> list[Any]:
        """Return the sharded parameters that the model's modules hold."""
        held = [(module(), name) for module, name in self.holders.values()]
        params = (module._parameters.get(name) for module, name in held if module is not None)
        return [param for param in params if param is not None]


@dataclass(frozen=True, eq=False)
class ShardedParameter:
    """A sharded parameter: its name, its model and how it communicates."""

    fqn: str
    """Name in the model given to ``simple_fsdp``; the first one for a tied parameter."""
    model: ShardedModel
    communication: Communication
    placements: tuple[Placement, ...]
    """Placements on the dimensions of the parameter's mesh."""
    tensor_parallel: DTensorSpec | None = None
    """Spec of the ``DTensor`` that the parameter was before sharding; ``None``: it was a plain tensor."""
    key: str = field(init=False)
    """``communication`` as text."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.communication.encode())

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.communication.shape if self.tensor_parallel is None else tuple(self.tensor_parallel.shape)

    def as_it_was(self, full: Tensor) -> Tensor:
        """Return the weight that the module expects, made from the gathered tensor."""
        spec = self.tensor_parallel
        if spec is None:
            return full
        return DTensor.from_local(
            full, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )


WITHOUT_VALUES = (
    "{}: on meta, without values. Before the first call of the model: model.to_empty(device=...), and then load a "
    "checkpoint, or initialise inside of sharded_init()"
)


class ReplacedByShard(Tensor):
    """The former self of a sharded parameter, for code that still holds it: an optimizer that was built before, a plain
    list, a closure. That code would never see a gradient, so every use is an error."""

    __slots__ = ()
    replaced_by: Any

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__repr__:
            return super().__torch_function__(func, types, args, kwargs)
        fqn = next(arg.replaced_by.simple_fsdp_info.fqn for arg in tree_leaves((args, kwargs)) if isinstance(arg, cls))
        raise RuntimeError(
            f"{fqn}: this is the parameter as it was before simple_fsdp(), which replaced it by a shard. Build "
            "optimizers afterwards, on model.parameters(), and read parameters as attributes of their modules, not "
            "from lists made before"
        )


class ReplacedParameter(ReplacedByShard, nn.Parameter):
    __slots__ = ()


class ReplacedDTensor(ReplacedByShard, DTensor):
    __slots__ = ()


def replace_parameter(param: nn.Parameter, local: DTensor, info: ShardedParameter) -> nn.Parameter:
    """Return ``local`` as the parameter in ``param``'s place, with the Python attributes that were set on ``param``."""
    sharded = nn.Parameter(local, requires_grad=param.requires_grad)
    sharded.__dict__.update(param.__dict__)
    sharded.simple_fsdp_info = info  # type: ignore[attr-defined]
    refuse_uses(param, sharded)
    return sharded


def refuse_uses(former: nn.Parameter, sharded: nn.Parameter) -> None:
    """Let every use of a parameter that a shard has replaced raise."""
    kind: Any = {nn.Parameter: ReplacedParameter, DTensor: ReplacedDTensor}.get(type(former))
    if kind is None:
        kind = type("ReplacedSubclass", (ReplacedByShard, type(former)), {"__slots__": ()})
    former.__class__ = kind
    former.replaced_by = sharded  # type: ignore[attr-defined]


def shard(whole: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """This rank's part of ``whole``, as a ``DTensor`` of the same global shape.

    Rows are dealt as ``torch.chunk`` does it: ``ceil(rows / ranks)`` to each rank, the last ones may hold
    fewer or none. No communication: every rank must hold the same full values (as with FSDP2).
    """
    return dtensor(_part(whole, mesh, placements), mesh, placements, whole.shape)


def shard_further(param: DTensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """Return a tensor-parallel parameter's part on this rank, sharded over another mesh."""
    spec = param._spec
    on_both = [
        StridedShard(placement.dim, split_factor=split)
        if isinstance(placement, Shard) and (split := _splits(spec, placement.dim)) > 1
        else placement
        for placement in placements
    ]
    local = _part(param._local_tensor, mesh, placements)
    return dtensor(local, concatenate_meshes(mesh, spec.mesh), (*on_both, *spec.placements), param.shape)


def to_offload_device(local: DTensor, pinned: bool) -> DTensor:
    """Return the shard on CPU, unless it is on ``meta``."""
    if local.is_meta:
        return local
    on_cpu = local._local_tensor.cpu()
    return dtensor(on_cpu.pin_memory() if pinned else on_cpu, local.device_mesh, local.placements, local.shape)


def _splits(spec: DTensorSpec, dim: int) -> int:
    """Return the number of parts of ``dim``."""
    sizes = zip(spec.placements, spec.mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if isinstance(placement, Shard) and placement.dim == dim)


def part_of(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> tuple[slice, ...]:
    """Return what the rank at ``coordinate`` of a mesh holds of each dim of a tensor of this shape."""
    ranges = [(0, size) for size in shape]
    # What is strided is dealt last, of what its rank of the other dimensions has.
    for i in sorted(range(len(placements)), key=lambda i: isinstance(placements[i], StridedShard)):
        if isinstance(placement := placements[i], Shard | StridedShard):
            first, last = ranges[placement.dim]
            rows = -(-(last - first) // mesh_shape[i])
            start = min(first + coordinate[i] * rows, last)
            ranges[placement.dim] = start, min(start + rows, last)
    return tuple(slice(*each) for each in ranges)


def _part(whole: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Tensor:
    coordinate = [mesh.get_local_rank(i) for i in range(mesh.ndim)]
    if has_hooks(type(whole)):
        on, by = next((i, each) for i, each in enumerate(placements) if isinstance(each, Shard))
        return part_of_subclass(whole, mesh.size(on), coordinate[on], by.dim)
    part = whole.detach()[part_of(whole.shape, mesh.shape, coordinate, placements)]
    # A copy: a view would keep the full weight's storage alive.
    return part.clone(memory_format=torch.contiguous_format)


def all_gather(local: Tensor, comm: Communication) -> Tensor:
    """Return the full weight, in ``param_dtype``, from this rank's shard. Not differentiable.

    float8 and bool are gathered as bytes: gloo has no float8, and TorchInductor makes int64 of bool before a gather.
    """
    if comm.hooks_group is not None:
        policy = MixedPrecisionPolicy(param_dtype=comm.param_dtype, reduce_dtype=comm.reduce_dtype)
        return gather_with_hooks(
            local, comm.hooks_group.name, comm.shape, policy, lambda tensor: _all_gather_as_it_is(tensor, comm)
        )
    if 0 in comm.shape:
        return local.new_empty(comm.shape, dtype=comm.param_dtype, device=comm.device)
    if comm.device is not None:
        local = TO_DEVICE(local, comm.device)
    if comm.dim is None or comm.shard_group is None:
        return local.view_as(local) if comm.param_dtype is None else local.to(comm.param_dtype)
    if is_float8(local.dtype) and comm.param_dtype in (None, local.dtype):
        return all_gather(local.view(torch.uint8), comm._replace(param_dtype=None)).view(local.dtype)
    if local.dtype is torch.bool:
        return all_gather(local.to(torch.uint8), comm).to(torch.bool)
    ranks, rows = comm.shard_group.ranks, comm.shape[comm.dim]
    local = local.movedim(comm.dim, 0) if comm.dim else local
    padded = -(-rows // ranks)
    if comm.gather_format is not None and encodes_here():
        numel, dtype = padded * local.shape[1:].numel(), comm.param_dtype or local.dtype
        flat = encoded_collectives.all_gather(local, numel, *comm.shard_group[::-1], comm.gather_format, dtype)
        full = flat.view(ranks * padded, *local.shape[1:])
    else:
        local = _pad_rows(local, padded)
        if comm.param_dtype is not None:
            local = local.to(comm.param_dtype)
        parts = _as_real(local.contiguous())
        full = _c10d.wait_tensor(_c10d.all_gather_into_tensor(parts, ranks, comm.shard_group.name))
        full = torch.view_as_complex(full) if local.is_complex() else full
    full = full if full.shape[0] == rows else full[:rows]
    return full.movedim(0, comm.dim).contiguous() if comm.dim else full


def _all_gather_as_it_is(tensor: Tensor, comm: Communication) -> Tensor:
    ranks = comm.shard_group.ranks if comm.shard_group else 1
    shape = ranks * tensor.shape[0], *tensor.shape[1:]
    return all_gather(tensor, Communication(shape, 0, comm.shard_group, None))


def reduction_dtype(comm: Communication, own: torch.dtype) -> torch.dtype | None:
    """Return the dtype of the reduction for a parameter of dtype ``own``; ``None``: that of the gradient."""
    if comm.reduce_dtype is None and comm.reduce_format is not None:
        return torch.float32
    return comm.reduce_dtype or (own if REDUCES_IN_OWN_DTYPE else None)


def sum_dtype(comm: Communication, own: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of a parameter of dtype ``own`` are added up before they are reduced."""
    return reduction_dtype(comm, own) or comm.param_dtype or own


def reduce(grad: Tensor, comm: Communication, local: Tensor) -> Tensor:
    """Return the gradient of the shard ``local``, averaged over the ranks, from a full gradient. Not differentiable."""
    if 0 in comm.shape:
        return torch.zeros_like(local)
    rows, operators, postdivide = _rows(grad, comm, local)
    steps = list(zip(comm.groups, operators, strict=True))
    if comm.reduce_format is not None and comm.shard_group is not None and encodes_here():
        encoded = len(steps) if comm.two_steps and comm.two_steps.to_replicas else 1
        divisor = math.prod([float(group.ranks) for group, operator in steps[:encoded] if operator == "avg"])
        name, ranks = comm.shard_group
        formats = comm.reduce_format, comm.two_steps
        rows = encoded_collectives.reduce_scatter(rows, divisor, ranks, name, *formats, local)
        steps = steps[encoded:]
    for group, operator in steps:
        if group is comm.replica_group or comm.dim is None:
            rows = _c10d.wait_tensor(_c10d.all_reduce(rows, operator, group.name))
        else:
            rows = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(rows, operator, group.ranks, group.name))
    return _gradient(rows, postdivide, comm, local)


def reduce_coalesced(full: list[tuple[Tensor, Communication, Tensor]]) -> list[Tensor]:
    """Reduce each (full gradient, communication, shard): the bits of ``reduce``, by one collective for each kind.

    What travels in a wire format has a collective of its own.
    """
    results: list[Any] = [None if 0 not in comm.shape else torch.zeros_like(local) for _, comm, local in full]
    ways: dict[Any, list[tuple[int, Tensor, float]]] = {}
    for i, (grad, comm, local) in enumerate(full):
        if results[i] is None and comm.reduce_format is not None and encodes_here():
            results[i] = reduce(grad, comm, local)
        elif results[i] is None:
            rows, operators, postdivide = _rows(grad, comm, local)
            way = comm.dim is None, tuple(zip(comm.groups, operators, strict=True)), rows.dtype
            ways.setdefault(way, []).append((i, rows, postdivide))
    for (whole, steps, _), members in ways.items():
        parts = [rows for _, rows, _ in members]
        for i, (group, operator) in enumerate(steps):
            if i == 0 and not whole:
                parts = _c10d.reduce_scatter_tensor_coalesced(parts, operator, group.ranks, group.name)
            else:
                parts = _c10d.all_reduce_coalesced(parts, operator, group.name)
            parts = [_c10d.wait_tensor(part) for part in parts]
        for (i, _, postdivide), part in zip(members, parts, strict=True):
            _, comm, local = full[i]
            results[i] = _gradient(part, postdivide, comm, local)
    return results


def _rows(grad: Tensor, comm: Communication, local: Tensor) -> tuple[Tensor, list[str], float]:
    """Return the input of the first collective, the operator of each collective, and the divisor after the last."""
    if (dtype := reduction_dtype(comm, local.dtype)) is not None and not grad.is_complex():
        grad = grad.to(dtype)
    if (dim := comm.dim) is not None:
        ranks = comm.groups[0].ranks
        grad = _pad_rows(grad.movedim(dim, 0) if dim else grad, -(-grad.shape[dim] // ranks) * ranks)
    rows = _as_real(grad.contiguous())
    operators, predivide, postdivide = _division(rows.dtype, [group.ranks for group in comm.groups], comm.divide_factor)
    return rows if predivide == 1 else rows / predivide, operators, postdivide


def _gradient(rows: Tensor, postdivide: float, comm: Communication, local: Tensor) -> Tensor:
    """Return the gradient of the shard ``local`` from the result of the last collective."""
    if postdivide != 1:
        rows = rows / postdivide
    rows = torch.view_as_complex(rows) if local.is_complex() else rows
    if (dim := comm.dim) is not None:
        rows = rows if rows.shape[0] == local.shape[dim] else rows[: local.shape[dim]]
        rows = rows.movedim(0, dim).contiguous() if dim else rows
    rows = rows.to(local.dtype)
    return rows if comm.device is None else TO_HOST(rows, comm.pinned)


def all_reduce_max(x: Tensor, group: Group) -> Tensor:
    return _c10d.wait_tensor(_c10d.all_reduce(x, "max", group.name))


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows:
        return x
    return nn.functional.pad(x, [0, 0] * (x.ndim - 1) + [0, rows - x.shape[0]])


def is_float8(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def _as_real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _division(dtype: torch.dtype, ranks: list[int], factor: float | None) -> tuple[list[str], float, float]:
    """Reduction operators and what to divide by before and after them (FSDP2's ``_get_gradient_divide_factors``).

    float32 and bfloat16 leave the division to the collectives where these divide by the number of ranks. Other types
    (float16: against overflow and underflow) are divided by about sqrt(ranks) on each side of a sum.
    """
    total = math.prod(ranks)
    if dtype in (torch.float32, torch.bfloat16):
        if factor is None:  # NCCL's average may be wrong on one rank
            return ["avg" if total > 1 else "sum"] * len(ranks), 1, 1
        if total > 1 and factor == ranks[0]:
            return ["avg", "sum"][: len(ranks)], 1, 1
        return ["sum"] * len(ranks), 1, factor
    factor = total if factor is None else factor
    before = 1
    while factor % before == 0 and factor / before > before:
        before *= 2
    return ["sum"] * len(ranks), before, factor / before
