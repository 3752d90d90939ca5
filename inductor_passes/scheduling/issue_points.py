"""When the collective of a bucket is issued and awaited. Order, replay, search and validation all ask this module.

::

    slot 0                    | slot 1                                   | slot 2 ...
    gather B0, gather B1,     |                                          |
    wait B0, compute          | gather B2, wait B1, compute, compute ... | gather B3, wait B2, compute ...

A *point* names a parameter (``Bucket.issue``, ``wait``, ``all_reduce_after``). In a graph a point becomes a *slot*, the
place before a compute step: ``point_slots``, ``gather_slots`` and ``reduction_slots`` say which. Within a slot, actions
happen in the order of their ``Phase``: ``action_key`` says how two actions compare. ``schedule_of`` gives buckets their
slots, ``buckets_of`` is its inverse, and ``check_points`` refuses points that contradict each other.

To issue or await collectives elsewhere, change these functions and nothing else.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Literal, NamedTuple

from inductor_passes.scheduling.cost_graph import CostGraph


class PlanError(RuntimeError):
    """The plan cannot be carried out on this graph."""


Form = Literal["packed", "grouped"]
"""How a bucket moves its members. ``"packed"``: they are copied into one buffer for one collective, and out of it.
``"grouped"``: a collective for each, from and into memory of its own, issued together as one group."""


class Bucket(NamedTuple):
    """Parameters whose gather or reduction is one transfer, and when that transfer is issued and awaited.

    A point names a parameter by its FQN. In a graph that does not use this parameter, an issue point means the start of
    the graph and a wait point its end.
    """

    fqns: tuple[str, ...]
    """Members, in packing order."""
    issue: str | None
    """A gather is issued before the first use of this parameter's full weight; ``None``: at the start of the graph. A
    reduction is issued when this parameter's full gradient and all of the bucket's own are complete, and the reductions
    before it in the plan have been issued; ``None``: nothing but these."""
    wait: str | None
    """A gather is awaited before the first use of this parameter, or of a member that is used earlier. A reduction is
    awaited before the reduction of this parameter is issued; ``None``: at the end of the graph."""
    all_reduce_after: str | None = None
    """A reduce-scatter that an all-reduce follows is awaited, and the all-reduce issued, before the reduction of this
    parameter is issued; ``None``: at the end of the graph."""
    position: int = 0
    """Number among the plan's buckets of its direction. Actions due at the same point happen in this order."""
    form: Form = "packed"


class ScheduledBucket(NamedTuple):
    """A bucket of one graph, with slots in place of points."""

    members: tuple[int, ...]
    """Positions in ``CostGraph.gathers`` or ``CostGraph.reductions``."""
    issue_slot: int
    wait_slot: int
    """For a reduction, the number of steps plus one means the end, behind all slots."""
    all_reduce_slot: int = -1
    """The slot in which a reduce-scatter is awaited and its all-reduce issued; -1: no all-reduce follows."""
    form: Form | None = None
    """``None``: the form that takes less time (``bucket_form.py``)."""


class Schedule(NamedTuple):
    """Slots of all buckets of a ``CostGraph``; both sequences are in the order of issue."""

    gathers: tuple[ScheduledBucket, ...]
    reductions: tuple[ScheduledBucket, ...]

    def with_gathers_merged(self, i: int) -> "Schedule":
        """Return the schedule with gather buckets ``i`` and ``i + 1`` as one, issued and awaited as early as either."""
        one, other = self.gathers[i : i + 2]
        merged = ScheduledBucket(
            tuple(sorted(one.members + other.members)), one.issue_slot, min(one.wait_slot, other.wait_slot)
        )
        return self._replace(gathers=(*self.gathers[:i], merged, *self.gathers[i + 2 :]))

    def with_reductions_merged(self, i: int) -> "Schedule":
        """Return the schedule with reduction buckets ``i`` and ``i + 1`` as one, issued and awaited as late as
        either."""
        one, other = self.reductions[i : i + 2]
        all_reduce = max(one.all_reduce_slot, other.all_reduce_slot)
        all_reduce = all_reduce if all_reduce < 0 else max(all_reduce, other.issue_slot)
        merged = ScheduledBucket(
            tuple(sorted(one.members + other.members)),
            other.issue_slot,
            max(other.wait_slot, all_reduce),
            all_reduce,
        )
        return self._replace(reductions=(*self.reductions[:i], merged, *self.reductions[i + 2 :]))


class Phase(IntEnum):
    """The order of actions within a slot."""

    ALL_REDUCE = 0
    """A reduce-scatter is awaited and the all-reduce of its result issued: before anything else is awaited, so that all
    all-reduces of a slot are under way together."""
    REDUCTION_WAIT = 1
    """Reductions are awaited before others are issued, so that the memory of their gradients is free."""
    REDUCTION_ISSUE = 2
    GATHER_ISSUE = 3
    GATHER_WAIT = 4
    """Gathers are awaited once everything due in the slot has been issued."""
    COMPUTE = 5


ActionKey = tuple[int, int, int, int]
"""Slot, phase, position of the bucket, and stage: 0, but for a reduction that goes on in the slot of its own issue."""


def action_key(phase: Phase, slot: int, issue_slot: int, position: int) -> ActionKey:
    """Return the key by which an action of a bucket is sorted among all actions and steps of a graph.

    A reduction that is awaited, or followed by its all-reduce, in the slot of its own issue goes on directly behind
    that issue, before the next reduction is issued.
    """
    if slot == issue_slot and phase < Phase.REDUCTION_ISSUE:
        return slot, Phase.REDUCTION_ISSUE, position, 1 + phase
    return slot, phase, position, 0


def point_slots(points: Iterable[str | None], slots: Mapping[str, int]) -> list[int]:
    """Return the slots that points mean in a graph, leaving out points that the graph does not have.

    Args:
        points: FQNs, or ``None``.
        slots: the slot of each parameter's first use, for gathers, or of its complete gradient, for reductions.
    """
    return [slots[point] for point in points if point is not None and point in slots]


def gather_slots(bucket: Bucket, first_use_slot: Mapping[str, int]) -> tuple[int, int]:
    """Return the slots in which a gather is issued and awaited.

    A gather is awaited in time for each of its members and issued no later than it is awaited, whatever its points say:
    a fused kernel may read a weight earlier than the plan expected.

    Args:
        first_use_slot: the slot of the first step that reads a weight, by FQN; at least one member must have one.
    """
    wait = min(point_slots((*bucket.fqns, bucket.wait), first_use_slot))
    return min([wait, *(point_slots([bucket.issue], first_use_slot) or [0])]), wait


def reduction_slots(buckets: Sequence[Bucket], ready_slot: Mapping[str, int], end: int) -> list[tuple[int, int, int]]:
    """Return, for each reduction bucket, the slots of its issue, of its all-reduce and of its wait.

    The all-reduce's slot counts only where an all-reduce follows. A collective that is all-reduced is awaited in the
    later one of the last two slots.

    Args:
        buckets: the reductions of a graph, by ``position``.
        ready_slot: the slot in which a full gradient is complete, by FQN.
        end: the number of steps; ``end + 1`` stands for the end of the graph, behind all slots.
    """
    issue_slots: list[int] = []
    last = 0
    for bucket in buckets:
        last = max([last, *point_slots((*bucket.fqns, bucket.issue), ready_slot)])
        issue_slots.append(last)
    slots = [*issue_slots, end + 1]
    return [
        (issue, max(issue, slots[all_reduce]), max(issue, slots[wait]))
        for issue, (all_reduce, wait) in zip(issue_slots, _named_reductions(buckets), strict=True)
    ]


def _named_reductions(buckets: Sequence[Bucket]) -> list[tuple[int, int]]:
    """For each bucket, the buckets before whose issue it is all-reduced and awaited; their number: at the end."""
    number: dict[str | None, int] = {fqn: i for i, bucket in enumerate(buckets) for fqn in bucket.fqns}
    return [
        (number.get(bucket.all_reduce_after, len(buckets)), number.get(bucket.wait, len(buckets))) for bucket in buckets
    ]


def check_points(
    gathers: Mapping[str, Sequence[Bucket]], uses: Mapping[str, Sequence[str]], reductions: Sequence[Bucket]
) -> None:
    """Raise ``ValueError`` if a bucket is issued after it is needed, or awaited before it is issued; name the bucket.

    Args:
        gathers: gather buckets, by direction.
        uses: FQNs of gathered parameters by first use, by direction.
        reductions: reduction buckets of a plan.
    """
    for direction, buckets in gathers.items():
        place = {fqn: i for i, fqn in enumerate(uses[direction])}
        for i, bucket in enumerate(buckets):
            if place.keys().isdisjoint(bucket.fqns):
                continue
            issue, wait = gather_slots(bucket, place)
            for point, slot in (("issue", issue), ("wait", wait)):
                fqn = getattr(bucket, point)
                if place.get(fqn, slot) > slot:
                    first = uses[direction][wait]
                    if first == bucket.wait and first not in bucket.fqns:
                        raise ValueError(
                            f"plan: {direction}[{i}]: {bucket.issue}, its issue point, is used after its wait point"
                        )
                    raise ValueError(f"plan: {direction}[{i}].{point}: {fqn} is used after {first}, of this bucket")
    for i, (bucket, named) in enumerate(zip(reductions, _named_reductions(reductions), strict=True)):
        points = [n for fqn, n in zip((bucket.all_reduce_after, bucket.wait), named, strict=True) if fqn]
        if points != sorted(points) or (points and points[0] < i):
            raise ValueError(f"plan: reductions[{i}]: its points come before what they wait for")


def gather_issue_slots(graph: CostGraph) -> list[int]:
    """Return the slots in which a plan can have a gather issued: the start and the first uses of weights."""
    slots = {gather.fqn: gather.first_use_slot for gather in graph.gathers}
    return sorted({0, *point_slots(slots, slots)})


def reduction_issue_slots(graph: CostGraph) -> list[int]:
    """Return the slots in which a plan can have a reduction issued: those in which gradients become complete."""
    slots = {reduction.fqn: reduction.ready_slot for reduction in graph.reductions}
    return sorted(set(point_slots(slots, slots)))


def reduction_wait_slots(schedule: Schedule, end: int) -> list[int]:
    """Return the slots in which a plan can have a reduction awaited: those of reductions' issues, and the end."""
    return sorted({end + 1, *(scheduled.issue_slot for scheduled in schedule.reductions)})


def with_waits_at_issues(schedule: Schedule, end: int) -> Schedule:
    """Return the schedule with the waits of reductions moved to the next slots that a plan can name."""
    slots = reduction_wait_slots(schedule, end)

    def moved(scheduled: ScheduledBucket) -> ScheduledBucket:
        wait, all_reduce = (
            slots[bisect_left(slots, slot)] for slot in (scheduled.wait_slot, scheduled.all_reduce_slot)
        )
        return scheduled._replace(
            wait_slot=wait, all_reduce_slot=scheduled.all_reduce_slot if scheduled.all_reduce_slot < 0 else all_reduce
        )

    return schedule._replace(reductions=tuple(map(moved, schedule.reductions)))


def schedule_of(graph: CostGraph, gathers: Iterable[Bucket], reductions: Iterable[Bucket]) -> Schedule:
    """Return the slots in which these buckets are issued and awaited, as far as ``graph`` has their members."""
    end = len(graph.seconds)
    first_use = {gather.fqn: gather.first_use_slot for gather in graph.gathers}
    number = {gather.fqn: i for i, gather in enumerate(graph.gathers)}
    gathered = []
    for bucket in gathers:
        members = tuple(sorted(number[fqn] for fqn in bucket.fqns if fqn in number))
        if members:
            gathered.append(ScheduledBucket(members, *gather_slots(bucket, first_use), form=bucket.form))
    ready = {reduction.fqn: reduction.ready_slot for reduction in graph.reductions}
    number = {reduction.fqn: i for i, reduction in enumerate(graph.reductions)}
    reducing = [bucket for bucket in reductions if not ready.keys().isdisjoint(bucket.fqns)]
    reduced = []
    for bucket, (issue, all_reduce, wait) in zip(reducing, reduction_slots(reducing, ready, end), strict=True):
        members = tuple(sorted(number[fqn] for fqn in bucket.fqns if fqn in number))
        all_reduce = all_reduce if graph.has_all_reduce(members) else -1
        reduced.append(ScheduledBucket(members, issue, wait, all_reduce, bucket.form))
    return Schedule(tuple(sorted(gathered, key=lambda scheduled: scheduled.issue_slot)), tuple(reduced))


def block_of(fqn: str) -> str | None:
    """Return the outermost numbered module that holds ``fqn``, or ``None``: ``layers.0`` for ``layers.0.wq.weight``."""
    parts = fqn.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdecimal():
            return ".".join(parts[: i + 1])
    return None


def buckets_of(
    graph: CostGraph, schedule: Schedule, position: Mapping[str, int]
) -> tuple[tuple[Bucket, ...], tuple[Bucket, ...]]:
    """Return gather and reduction buckets that have the slots of ``schedule``: the inverse of ``schedule_of``.

    All are packed; ``with_cheapest_forms`` (``bucket_form.py``) gives them other forms.

    Args:
        schedule: its slots are among those that a plan can name (``gather_issue_slots`` and its neighbours).
        position: the number of each FQN in packing order.
    """
    used = {gather.first_use_slot: gather.fqn for gather in reversed(graph.gathers)}
    gathers = []
    for i, scheduled in enumerate(schedule.gathers):
        members = [graph.gathers[k] for k in scheduled.members]
        fqns = tuple(sorted((member.fqn for member in members), key=position.__getitem__))
        first = min(members, key=lambda member: member.first_use_slot).fqn
        gathers.append(Bucket(fqns, used.get(scheduled.issue_slot), first, position=i))
    complete = {reduction.ready_slot: reduction.fqn for reduction in graph.reductions}
    reduced = [[graph.reductions[k].fqn for k in scheduled.members] for scheduled in schedule.reductions]
    issued = {
        scheduled.issue_slot: fqns[0]
        for scheduled, fqns in reversed(list(zip(schedule.reductions, reduced, strict=True)))
    }
    reductions = []
    for i, (scheduled, fqns_made) in enumerate(zip(schedule.reductions, reduced, strict=True)):
        _, wait, all_reduce = (
            fqns_made[0] if slot == scheduled.issue_slot else issued.get(slot) for slot in scheduled[1:4]
        )
        packed = tuple(sorted(fqns_made, key=position.__getitem__))
        has_all_reduce = scheduled.all_reduce_slot >= 0
        reductions.append(
            Bucket(packed, complete[scheduled.issue_slot], wait, all_reduce if has_all_reduce else None, i)
        )
    return tuple(gathers), tuple(reductions)
