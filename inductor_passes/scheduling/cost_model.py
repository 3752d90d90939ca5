"""How long each compute node of a graph takes, and which values it puts into memory: estimated, never run.

Matmuls, convolutions and attention take their operations (``torch.utils.flop_counter``) over the rate that the profile
has for a call of that size, or the time that their bytes take, if that is more. Pointwise operators and reductions are
fused as Inductor would: neighbours between which there is no matmul are one *region*, a kernel that reads what comes
from outside of it and writes what is used outside of it. Anything else reads and writes all that it has. Collectives of
the model's own, but coalesced ones, take their time where they are issued, as if nothing hid them.
"""

import math
import statistics
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from inductor_passes.collectives import (
    EXCHANGED,
    REDUCE_SCATTER,
    Collective,
    TwoSteps,
    before_cast_and_pad,
    gathers,
    is_deterministic,
    reductions,
)
from inductor_passes.fusion import (
    can_be_reduced_in_place,
    computes,
    fused_regions,
    is_view,
    mixes_dtypes,
    nbytes_of,
    own_collective,
    shard_before_cast_and_pad,
    sources_of,
    storage_of,
    tensors_of,
)
from inductor_passes.ops.accumulate import ACCUMULATE, ADD_UP
from inductor_passes.ops.offload import TO_DEVICE, TO_HOST
from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction, joint_contention
from inductor_passes.scheduling.memory import live_bytes, most_in_use
from inductor_passes.scheduling.order_items import compute_positions, graph_items
from inductor_passes.torch_compat.aot_autograd import held_inputs
from inductor_passes.torch_compat.distributed import group_ranks, issues_groups
from inductor_passes.torch_compat.fx import size_hint

_aten = torch.ops.aten


class DeviceProfile(Protocol):
    """Interface of a device's profile (``simplefsdp.HardwareProfile``)."""

    @property
    def launch_s(self) -> float:
        """Seconds of launching a kernel, whatever it does."""

    @property
    def collective_launch_s(self) -> float:
        """Seconds of compute that issuing and awaiting a collective takes."""

    def contention_of(self, kind: str = "", elements: float = 0) -> float:
        """Return the part of its speed that a kernel loses while a collective is under way.

        Args:
            kind: ``"matmul"``, ``"attention"``, or an empty string for another kernel.
            elements: of the product, if it is a matmul.
        """

    @property
    def collective_s_per_byte(self) -> float:
        """Seconds of compute that are lost, besides, for each byte of a collective's tensor."""

    def compute_s(self, kind: str, dtype: torch.dtype, flops: float) -> float:
        """Return the seconds of one ``"matmul"`` or ``"attention"`` with so many operations."""

    @property
    def member_s(self) -> float | None:
        """Seconds that each member of a group of collectives takes beyond the first; ``None``: not known."""

    def memory_s(self, nbytes: float) -> float:
        """Return the seconds of a kernel that reads and writes so many bytes."""

    def collective_s(self, kind: str, ranks: Sequence[int], nbytes: int) -> float:
        """Return the seconds of a collective over these ranks.

        Args:
            kind: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"all_to_all"`` or ``"broadcast"``.
            ranks: of the whole world.
            nbytes: bytes of the whole tensor.
        """


class NodeCosts(NamedTuple):
    """Costs of a graph's compute nodes; a node without an entry costs nothing."""

    seconds: dict[Node, float]
    """Seconds of a kernel; a region's are the entry of its last node."""
    stored: dict[Node, int]
    """Bytes that a node puts into memory."""
    runs: dict[Node, Node]
    """For each node of a region, the region's last node: there the region runs."""
    contention: dict[Node, float]
    """The part of its speed that a kernel loses while a collective is under way; without an entry, none."""


def node_costs(graph: Graph, profile: DeviceProfile) -> NodeCosts:
    """Return the costs of a forward or backward graph's nodes, without the collectives of parameters."""
    regions = fused_regions(graph)
    seconds: dict[Node, float] = {}
    stored: dict[Node, int] = {}
    runs: dict[Node, Node] = {}
    contention: dict[Node, float] = {}
    members: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        if node in regions:
            members.setdefault(regions[node], []).append(node)
        elif computes(node):
            seconds[node], contention[node] = _kernel(node, profile)
            stored[node] = nbytes_of(node)
        elif node.target is TO_DEVICE:
            stored[node] = nbytes_of(node)
        elif kind := own_collective(node):
            nbytes = max(map(nbytes_of, (node, node.all_input_nodes[0])))
            seconds[node] = profile.collective_launch_s + profile.collective_s(kind, group_ranks(node.args[-1]), nbytes)
            stored[node] = nbytes_of(node)
    for nodes in members.values():
        inside = set(nodes)
        written = [node for node in nodes if any(user not in inside for user in _users(node))]
        changed = {node: source for node in nodes if (source := _changed_in_place(node))}
        not_read = inside.union(changed.values())
        read = {source: _read(node, source) for node in nodes for source in sources_of(node) if source not in not_read}
        filled = inside.intersection(changed.values())  # by a kernel of its own
        stored |= {node: nbytes_of(node) for node in (*written, *filled)}
        moved = sum(read.values()) + sum(stored[node] for node in written if node not in changed)
        moved += sum(2 * nbytes_of(source) for node in changed for source in node.all_input_nodes[1:])
        moved += sum(stored[node] for node in filled)
        seconds[nodes[-1]] = profile.launch_s + profile.memory_s(moved)
        contention[nodes[-1]] = profile.contention_of()
        runs |= dict.fromkeys(nodes, nodes[-1])
    return NodeCosts(seconds, stored, runs, contention)


def _changed_in_place(node: Node) -> Node | None:
    """Return the value whose memory ``node``'s result takes over, which Inductor lets it change; or ``None``."""
    if getattr(node.target, "_overloadpacket", None) not in _CHANGES_PART:
        return None
    source = storage_of(node.all_input_nodes[0])
    return source if source.op != "placeholder" and [*_users(source)] == [node] else None


def _kernel(node: Node, profile: DeviceProfile) -> tuple[float, float]:
    """Return the seconds and the contention of a node that is a kernel of its own."""
    moved = nbytes_of(node) + sum(_read(node, source) for source in sources_of(node))
    if changed := _changed_in_place(node):
        written = sum(_read(node, source) for source in sources_of(node) if source is not changed)
        moved = 3 * written  # the new values are read, and what they are added to is read and written
    flops, kind = _flops(node)
    seconds = profile.memory_s(moved)
    if flops:
        factors = [tensor for source in node.all_input_nodes for tensor in tensors_of(source)]
        seconds = max(seconds, profile.compute_s(kind, factors[0].dtype, flops))  # a product may be of another dtype
    elements = max((size_hint(tensor.numel()) for tensor in tensors_of(node)), default=0)
    return profile.launch_s + seconds, profile.contention_of(kind, elements)


def _flops(node: Node) -> tuple[float, str]:
    """Return the operations of a matmul, a convolution or attention, and the name of the profile's curve for them."""
    name = node.target._overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else ""
    if name.startswith("_scaled_dot_product"):
        shapes = [_shape(tensor) for arg in node.args if isinstance(arg, Node) for tensor in tensors_of(arg)]
        backward = "backward" in name
        query, key, value = shapes[1:4] if backward else shapes[:3]  # the output's gradient comes first
        # Scores and values; backward has the scores once more, and the gradients of all three and of the scores.
        widths = 3 * query[-1] + 2 * value[-1] if backward else query[-1] + value[-1]
        return 2.0 * math.prod(query[:-1]) * key[-2] * widths, "attention"
    if "attention" in name:
        return 0.0, ""
    formula = flop_registry.get(getattr(node.target, "_overloadpacket", None))
    if formula is None:
        return 0.0, ""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: tree_map(_shape, n.meta["val"]))
    return size_hint(formula(*args, **kwargs, out_val=tree_map(_shape, node.meta["val"]))), "matmul"


_PICKS = (_aten.embedding, _aten.index, _aten.gather)
"""Operators that read no more of their first input than they return."""


_CHANGES_PART = (
    _aten._unsafe_index_put,
    _aten._unsafe_masked_index_put_accumulate,
    _aten.index_add,
    _aten.index_put,
    _aten.scatter,
    _aten.scatter_add,
    _aten.scatter_reduce,
)
"""Operators that return their first input with some elements changed."""


def _users(node: Node) -> Iterator[Node]:
    """Yield the nodes that read a node's memory, also through views."""
    for user in node.users:
        if is_view(user):
            yield from _users(user)
        else:
            yield user


def _read(node: Node, source: Node) -> int:
    """Return the bytes of ``source`` that ``node`` reads."""
    inputs = node.all_input_nodes
    if getattr(node.target, "_overloadpacket", None) in _PICKS and storage_of(inputs[0]) is source:
        return min(nbytes_of(node), nbytes_of(source))
    return min(nbytes_of(source), sum(nbytes_of(value) for value in inputs if storage_of(value) is source))


def _shape(value: Any) -> Any:
    """Return the shape of a tensor with hints in place of symbolic sizes: computing with symbols would set guards."""
    return tuple(map(size_hint, value.shape)) if isinstance(value, Tensor) else value


EquivalentGroups = Mapping[tuple[int, ...], Sequence[Sequence[int]]]
"""For the ranks of a process group, the ranks of all groups of its mesh dimension."""
_NONE: EquivalentGroups = MappingProxyType({})

_LARGE = 1 << 30
_LARGE_WEIGHT = 4
"""How many times as large as the median of a graph's weights a large one is."""
_COPIED = 16 << 20
"""Bytes of a typical bucket: the speed of memory depends on the size of a copy."""


def cost_graph_of(
    graph: Graph,
    profile: DeviceProfile,
    given: Collection[str] = (),
    equivalent: EquivalentGroups = _NONE,
    besides: int = 0,
) -> CostGraph:
    """Return a forward or backward graph as its schedule sees it, before its collectives are merged.

    Args:
        graph: collectives of parameters are marked by ``identify``.
        profile: costs of compute and collectives.
        given: names of inputs that the caller holds, such as parameters; other inputs are freed when they are read.
        equivalent: for each process group, all groups of its mesh dimension. One group may be spread over more nodes
            than another; every group counts as the slowest, as all ranks must make the same plan.
        besides: bytes that are in use all the time, such as accumulated gradients.
    """
    kinds = _Kinds(profile, equivalent)
    nodes, items = graph_items(graph)
    at = compute_positions(items)
    cost = node_costs(graph, profile)
    compute = [nodes[i] for i in at.main]
    runs_at = {node: i for i, node in enumerate(compute)}

    def runs(index: int) -> int:
        """Return the number of the compute node in whose place compute node ``index`` runs."""
        return max(index, runs_at.get(cost.runs.get(compute[index], compute[index]), index))

    def place_of(source: Node) -> int:
        """Return the number of the compute node in whose place what makes ``source`` runs; 0 for an input."""
        return runs_at.get(cost.runs.get(source, source), 0)

    ready = {fqn: made and runs(made - 1) + 1 for fqn, made in at.ready_slot.items()}

    def last_read(fqn: str) -> int:
        """Return where the last compute node that reads a weight runs: where its region does, if it is fused."""
        last = at.last_use_slot.get(fqn, at.first_use_slot[fqn])
        return last if last == len(compute) else runs(last)  # the former if nothing reads it

    exchanges = [i for i, node in enumerate(compute) if EXCHANGED in node.meta]
    behind = [i + 1 for i in exchanges]
    free = [min(last_read(fqn) + 1, len(compute)) for fqn in _large_weights(graph)]
    marks = sorted({0, len(compute), *exchanges, *behind, *free, *at.first_use_slot.values(), *ready.values()})
    slot = {mark: i for i, mark in enumerate(marks)}
    seconds = [cost.seconds.get(node, 0.0) for node in compute]
    contention = [cost.contention.get(node, 0.0) for node in compute]
    inputs = {node: nbytes_of(node) for node in graph.find_nodes(op="placeholder") if node.name not in given}
    stored = {**inputs, **cost.stored}
    copied_from: dict[Node, int] = {}
    computed: dict[Node, int] = {}
    for reduction in reductions(graph):
        gradient = before_cast_and_pad(reduction.input)
        if gradient is not reduction.input:
            computed[reduction.node] = place_of(storage_of(gradient))
            whole = max(nbytes_of(gradient), cost.stored.get(storage_of(gradient), 0))
            copied_from[reduction.node] = 0 if _is_read_otherwise(gradient, reduction.input) else whole
        source = storage_of(reduction.input)
        if source in stored:  # of several results of one operator, the others stay
            stored[source] = max(0, stored[source] - nbytes_of(reduction.input)) if len(tensors_of(source)) > 1 else 0
    changed_by = {changed: node for node in stored if (changed := _changed_in_place(node))}
    stored |= dict.fromkeys(changed_by.values(), 0)

    def readers(node: Node) -> list[Node]:
        return [*_users(node), *(_users(changed_by[node]) if node in changed_by else ())]

    memory = live_bytes(compute, stored, cost.runs, readers, held_inputs(graph))
    position = {node: i for i, node in enumerate(nodes)}
    outputs = [node for output in graph.find_nodes(op="output") for node in output.all_input_nodes]  # of an empty graph
    outlives = {fqn for node in outputs if node in position for fqn in at.weights[position[node]]}
    steps = list(pairwise(marks))

    def step_of(index: int) -> int:
        return bisect_right(marks, index) - 1

    reduced = [
        Reduction(
            reduction.fqns[0],
            kinds.of_reduction(reduction),
            nbytes_of(reduction.input),
            slot[ready[reduction.fqns[0]]],
            0 if _leaves_the_device(reduction.result) else nbytes_of(reduction.node),
            copied_from.get(reduction.node),
            bool(_changed_in_place(storage_of(reduction.input))),
            can_be_reduced_in_place(reduction),
            max(0, slot[ready[reduction.fqns[0]]] - 1 - step_of(computed[reduction.node]))
            if reduction.node in computed
            else 0,
        )
        for reduction in reductions(graph)
    ]
    made: list[list[tuple[int, int]]] = [[] for _ in steps]
    for reduction, priced in zip(reductions(graph), reduced, strict=True):
        if priced.is_made_in_step:
            made[priced.ready_slot - 1].append((place_of(storage_of(reduction.input)), priced.nbytes))
    freed: list[list[tuple[int, int]]] = [[] for _ in steps]
    gathered: dict[str, Gather] = {}
    for gather in gathers(graph):
        (fqn,) = gather.fqns
        nbytes = nbytes_of(gather.node) + (gathered[fqn].nbytes if fqn in gathered else 0)  # gathered in two ways
        last = len(steps) if fqn in outlives else step_of(last_read(fqn))
        # Where rows do not divide, only some ranks pad theirs, but all must agree.
        uneven = any(user.target is _aten.slice.Tensor for user in gather.wait.users)
        prepared = nbytes_of(gather.input) if uneven or storage_of(gather.input).op != "placeholder" else 0
        sent_from = storage_of(shard_before_cast_and_pad(gather))
        size = size_hint(gather.input.meta["val"].numel())  # padded, and so the same on every rank
        held = 0 if sent_from.op == "placeholder" else size * tensors_of(sent_from)[0].element_size()
        dtype = str(gather.input.meta["val"].dtype)
        gathered[fqn] = Gather(
            fqn,
            kinds.of_gather(gather),
            nbytes,
            slot[at.first_use_slot[fqn]],
            last,
            prepared,
            dtype,
            mixes_dtypes(gather),
            held,
        )
    for weight in gathered.values():
        if weight.last_use_slot < len(steps):
            freed[weight.last_use_slot].append((last_read(weight.fqn) + 1, weight.nbytes))
    return CostGraph(
        tuple(sum(seconds[begin:end]) for begin, end in steps),
        tuple(
            besides + most_in_use(memory.during, *step, *changes)
            for step, *changes in zip(steps, made, freed, strict=True)
        ),
        tuple(besides + memory.before[mark] for mark in marks),
        tuple(gathered[fqn] for fqn in sorted(at.first_use_slot, key=at.first_use_slot.__getitem__)),
        tuple(sorted(reduced, key=lambda reduction: reduction.ready_slot)),
        tuple(joint_contention(seconds[begin:end], contention[begin:end]) for begin, end in steps)
        if any(contention)
        else (),
        tuple(slot[i] for i in exchanges),
    )


def _large_weights(graph: Graph) -> list[str]:
    """Return the FQNs of weights that are much larger than most, as those of embeddings and output layers are.

    A step ends where the last kernel has run that reads one: its memory is free in the rest of that step, in which a
    large gradient may be made.
    """
    nbytes = {gather.fqns[0]: nbytes_of(gather.node) for gather in gathers(graph)}
    most = _LARGE_WEIGHT * statistics.median(nbytes.values()) if nbytes else 0
    return [fqn for fqn, size in nbytes.items() if size > most]


def accumulated_bytes(graph: Graph) -> int:
    """Return the bytes of the sums to which a backward graph adds full gradients, or which it reduces with its own."""
    added = graph.find_nodes(op="call_function", target=ACCUMULATE)
    ended = {storage_of(node.args[1]) for node in graph.find_nodes(op="call_function", target=ADD_UP)}
    whole = (size_hint(node.args[0].meta["val"].numel()) * node.args[2].itemsize for node in added)
    return sum(whole) + sum(map(nbytes_of, ended))


def _is_read_otherwise(gradient: Node, reduced: Node) -> bool:
    """Return whether something else than the cast or pad of a reduction's input ``reduced`` reads a gradient."""
    chain = [reduced]
    while chain[-1] is not gradient:
        chain.append(chain[-1].all_input_nodes[0])
    return any(user not in chain for user in _users(storage_of(gradient)))


def _leaves_the_device(reduced: Node) -> bool:
    return any(user.target is TO_HOST or _leaves_the_device(user) for user in reduced.users if is_deterministic(user))


def _in_format(collective: Collective, carrier: CollectiveKind, plain: CollectiveKind) -> CollectiveKind:
    """Return the kind of a collective in its wire format, if it has one.

    Args:
        carrier: the kind of a collective that would carry as many bytes as ``plain``.
        plain: the kind of the collective as it is.
    """
    wire_format = collective.wire_format
    return plain if wire_format is None else carrier.in_format(wire_format, collective.input.meta["val"].dtype, plain)


class _Kinds(NamedTuple):
    """The kinds of a graph's collectives: costs, and which can be merged."""

    profile: DeviceProfile
    equivalent: EquivalentGroups

    def of_gather(self, gather: Collective) -> CollectiveKind:
        plain = self._kind("all_gather", gather.options[-1], 1, None, repr(gather.options))
        return _in_format(gather, plain._replace(name=repr(gather.gather_kind())), plain)

    def of_reduction(self, reduction: Collective) -> CollectiveKind:
        kind = "reduce_scatter" if reduction.node.target is REDUCE_SCATTER else "all_reduce"
        all_reduce = None
        if reduction.all_reduce_after:
            ranks = reduction.options[1] if kind == "reduce_scatter" else 1
            all_reduce = self._kind("all_reduce", reduction.all_reduce_after.options[-1], ranks, None, "")
        group, name = reduction.options[-1], repr(reduction.reduction_kind())
        plain = self._kind(kind, group, 1, all_reduce, name)
        if reduction.wire_format is None:
            return plain
        if (two_steps := reduction.two_steps) is not None:
            all_reduce = self._second_step(two_steps, group, reduction.input.meta["val"].dtype)
            group = two_steps.inside
        return _in_format(reduction, self._kind("all_to_all", group, 1, all_reduce, name), plain)

    def _second_step(self, two_steps: TwoSteps, group: str, dtype: torch.dtype) -> CollectiveKind:
        """Return the kind of the second step of a reduction over ``group``, for each byte of the whole gradient."""
        if two_steps.to_replicas:
            # A byte of the gradient becomes ``nodes / ranks`` of what each replica then has.
            second = self._kind("all_gather", two_steps.between, 1, None, "")
            factor = two_steps.nodes / two_steps.ranks
            per_byte = {name: getattr(second, name) * factor for name in ("s_per_byte", "issue_s_per_byte")}
            second = second._replace(**per_byte, received=two_steps.nodes)
        else:
            # It needs the network cards that gathers over all nodes need too.
            second = self._kind("all_to_all", two_steps.between, two_steps.ranks, None, "")._replace(channel=group)
        second = second._replace(copy_s_per_byte=second.copy_s_per_byte / two_steps.ranks)
        return second.in_format(two_steps.between_format, dtype, second)

    def _kind(
        self, kind: str, group: str, parts: int, all_reduce_after: CollectiveKind | None, name: str
    ) -> CollectiveKind:
        """Return the kind of a collective over a process group.

        Args:
            parts: the collective has one of so many parts of a tensor.
        """
        profile, ranks = self.profile, group_ranks(group)
        alpha, seconds = (
            max(profile.collective_s(kind, others, nbytes) for others in self.equivalent.get(tuple(ranks), [ranks]))
            for nbytes in (0, _LARGE)
        )
        rate = (seconds - alpha) / _LARGE / parts
        copy = 2 * profile.memory_s(_COPIED) / _COPIED
        return CollectiveKind(
            group,
            alpha,
            rate,
            profile.collective_launch_s,
            copy,
            1 / len(ranks),
            profile.collective_s_per_byte / parts,
            all_reduce_after,
            profile.member_s if issues_groups(group) else None,
            name,
            contention=profile.contention_of(),
        )
