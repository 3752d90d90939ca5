"""Predict what a plan costs on one graph: a replay of compute, collectives and memory, step by step.

::

    slot 0                 slot 1                 slot 2                     slot n          the end
    issue, await | step 0  issue, await | step 1  issue, await | step 2 ...  issue, await |  await

Compute is a chain of steps that nobody reorders. In the slot before each step and behind the last, collectives are
issued and awaited where ``issue_points.py`` says, as ``order.py`` does it. Collectives of one process group run one
after the other, in the order of their issue; while one is under way, compute is slower, as ``contention`` says. The
memory of a gathered weight is in use from the gather's issue until the last step that reads the weight, and this rank
sends its part from there; a gradient's from the step that makes it until its reduction is issued, and the reduction's
input from there until the reduction is awaited. A bucket of several members that is not grouped is packed and unpacked
by copies, which take compute time; unpacked weights and packed gradients take, while they are copied, as many bytes
again. In a wire format these copies encode and decode: a weight has the size of what all ranks send until it is
awaited, besides what this rank sends, and a reduction has a buffer of that size for what it sends and one for what it
receives.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

from inductor_passes.scheduling import issue_points
from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction, beside_collectives
from inductor_passes.scheduling.issue_points import Form, Schedule
from inductor_passes.scheduling.replay_costs import costs_of


class CollectiveSpan(NamedTuple):
    """A collective of a ``Timeline``; seconds since the graph began."""

    what: str
    """``"gather"``, ``"reduce"``, or what follows a reduction: ``"all-reduce"``, ``"between nodes"``."""
    kind: CollectiveKind
    fqns: tuple[str, ...]
    nbytes: int
    issued: float
    started: float
    finished: float
    awaited: float = math.inf
    """When the wait for the collective began; infinite: not yet. The wait ends when the collective has finished."""
    held: int = 0
    """Bytes of encoded or computed shards that are in use until the collective has finished."""
    copied: int = 0
    """Bytes of weights that are copied out of the collective's buffer once it is awaited."""
    parts: int = 1
    """Number of collectives; several are a group."""
    freed: int = 0
    """Bytes of a reduction's buffers, in use until its last collective is awaited."""

    @property
    def exposed(self) -> float:
        """Seconds that compute waits for the collective."""
        return max(0.0, self.finished - self.awaited)


_AWAITED = CollectiveSpan._fields.index("awaited")


class Timeline(NamedTuple):
    """The replay of a schedule on one graph; times in seconds since the graph began."""

    seconds: float
    exposed: float
    """Seconds in which compute waited for a collective; part of ``seconds``."""
    peak: int
    """The most bytes in use at any time."""
    starts: tuple[float, ...]
    """When each step of compute begins, and when the graph ends."""
    ends: tuple[float, ...]
    """When each step of compute ends."""
    memory: tuple[int, ...]
    """The most bytes in use in each slot and the step behind it; one entry per slot."""
    spans: tuple[CollectiveSpan, ...]


class Replay:
    """A graph while it is replayed: collectives are issued and awaited in the slot that ``advance`` has come to."""

    def __init__(self, graph: CostGraph):
        self.graph = graph
        self._costs = costs_of(graph)
        self.slot = 0
        self.clock = 0.0
        self.exposed = 0.0
        self.free: dict[str, float] = {}
        """When each channel has carried out all collectives that were issued on it."""
        self._busy_until = 0.0
        """When all channels have. Until then one is under way, as each begins when it is issued or behind others."""
        self.alive = self._costs.given
        """Bytes of gathers, gradients and reduced shards."""
        self.undecoded = 0
        """Bytes by which gathered weights grow when they are decoded."""
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._memory = list(graph.live_bytes_at_slot)
        self._awaited: list[tuple[CollectiveSpan, float]] = []

    @property
    def last_read(self) -> Sequence[int]:
        """Bytes of weights, by the last step that reads them."""
        return self._costs.last_read

    def issue_gathers(self, members: tuple[int, ...], form: Form | None = None) -> list[CollectiveSpan]:
        spans = []
        for kind, fqns, nbytes, sent, held, copied, parts, packing_s in self._costs.of_gathers(members, form):
            self._compute(packing_s, kind.contention)
            self._allocate(held + sent)
            self.undecoded += nbytes - sent
            spans.append(self._issue("gather", kind, fqns, nbytes, held, copied, parts))
        return spans

    def issue_reductions(self, members: tuple[int, ...], form: Form | None = None) -> list[CollectiveSpan]:
        spans = []
        for cost in self._costs.of_reductions(members, form):
            kind = cost.kind
            if cost.copied is not None:
                self._note(cost.copied)
                self._compute(cost.copying_s, kind.contention)
                self._allocate(cost.received)
            self.alive += cost.more
            self._allocate(cost.result)
            spans.append(self._issue("reduce", kind, cost.fqns, cost.nbytes, parts=cost.parts, freed=cost.freed))
        return spans

    def await_gather(self, span: CollectiveSpan) -> None:
        self._wait(span)
        self.alive -= span.held
        if span.copied:
            self._copy(span.kind, span.copied)
            grown = span.nbytes - span.kind.sent(span.nbytes)
            self.undecoded -= grown
            self._allocate(grown)

    def await_reduction(self, span: CollectiveSpan) -> CollectiveSpan | None:
        """Await a reduction; issue and return the collective that follows, if there is one."""
        self._wait(span)
        if span.kind.wire_format is not None:
            added_up = span.kind.received * span.kind.sent(span.nbytes) * span.kind.copy_s_per_byte / 2  # and read
            self._compute(added_up, span.kind.contention)
        if (following := span.kind.all_reduce_after) is not None:
            what, freed = "all-reduce", 0  # it works in the memory of the result
            if following.wire_format is not None:
                what = "between nodes"
                encoded = following.sent(span.nbytes) * following.copy_s_per_byte / 2
                self._compute(encoded, following.contention)
                freed = round((1 + following.received) * following.sent(span.nbytes) * span.kind.shard)
                self._allocate(freed)
            self.alive -= span.freed
            return self._issue(what, following, span.fqns, span.nbytes, freed=freed)
        self.alive -= span.freed
        return None

    def advance(self) -> None:
        """Run the step behind this slot, or end the graph."""
        step, graph, costs = self.slot, self.graph, self._costs
        self._starts.append(self.clock)
        if step < len(graph.seconds):
            self.alive += costs.made[step]
            most = graph.live_bytes_in_step[step] + self.alive
            if most > self._memory[step]:
                self._memory[step] = most
            if step in costs.exchanges:
                self._wait_for_channels()
            self._compute(graph.seconds[step], costs.contention[step])
            self._ends.append(self.clock)
            self.alive += costs.ready[step + 1] - costs.last_read[step]
        else:
            self._note(0)
        self.slot += 1

    @property
    def peak(self) -> int:
        """The most bytes in use so far."""
        return max(self._memory)

    def timeline(self) -> Timeline:
        """Return the timeline; to be called once ``advance`` has come to the end."""
        spans = tuple(
            CollectiveSpan._make((*span[:_AWAITED], awaited, *span[_AWAITED + 1 :])) for span, awaited in self._awaited
        )
        starts, ends, memory = tuple(self._starts), tuple(self._ends), tuple(self._memory)
        return Timeline(self.clock, self.exposed, self.peak, starts, ends, memory, spans)

    def _issue(
        self,
        what: str,
        kind: CollectiveKind,
        fqns: tuple[str, ...],
        nbytes: int,
        held: int = 0,
        copied: int = 0,
        parts: int = 1,
        freed: int = 0,
    ) -> CollectiveSpan:
        self.clock += kind.issue_s + nbytes * kind.issue_s_per_byte
        started = max(self.clock, self.free.get(kind.channel, 0.0))
        finished = self.free[kind.channel] = started + kind.seconds(nbytes) + (parts - 1) * (kind.member_s or 0.0)
        self._busy_until = max(self._busy_until, finished)
        return CollectiveSpan(
            what, kind, fqns, nbytes, self.clock, started, finished, math.inf, held, copied, parts, freed
        )

    def _wait(self, span: CollectiveSpan) -> None:
        self._awaited.append((span, self.clock))
        if span.finished > self.clock:
            self.exposed += span.finished - self.clock
            self.clock = span.finished

    def _wait_for_channels(self) -> None:
        self.exposed += max(0.0, self._busy_until - self.clock)
        self.clock = max(self.clock, self._busy_until)

    def _copy(self, kind: CollectiveKind, nbytes: int) -> None:
        self._note(nbytes)
        self._compute(nbytes * kind.copy_s_per_byte, kind.contention)

    def _compute(self, seconds: float, contention: float) -> None:
        """Advance the clock by compute that takes ``seconds`` with the device for itself."""
        if contention and self._busy_until > self.clock:
            self.clock, seconds = beside_collectives(self.clock, seconds, self._busy_until, contention)
        self.clock += seconds

    def _allocate(self, nbytes: int) -> None:
        self.alive += nbytes
        self._note(0)

    def _note(self, more: int) -> None:
        in_use = self.graph.live_bytes_at_slot[self.slot] + self.alive + more
        if in_use > self._memory[self.slot]:
            self._memory[self.slot] = in_use


def replay(graph: CostGraph, schedule: Schedule) -> Timeline:
    """Return what ``schedule`` takes on ``graph`` if every step and collective takes its predicted time."""
    return _replayed(graph, schedule).timeline()


def seconds_and_peak(graph: CostGraph, schedule: Schedule) -> tuple[float, int]:
    """Return these two of ``replay``, in less time."""
    run = _replayed(graph, schedule)
    return run.clock, run.peak


def _replayed(graph: CostGraph, schedule: Schedule) -> Replay:
    run = Replay(graph)
    end = len(graph.seconds)
    gathering: list[list[CollectiveSpan]] = [[] for _ in schedule.gathers]
    reducing: list[list[CollectiveSpan]] = [[] for _ in schedule.reductions]
    for (slot, *_), action, i in sorted(_actions(schedule)):
        while run.slot < min(slot, end):
            run.advance()
        match action:
            case _Action.ISSUE_GATHER:
                gathering[i] = run.issue_gathers(schedule.gathers[i].members, schedule.gathers[i].form)
            case _Action.AWAIT_GATHER:
                for span in gathering[i]:
                    run.await_gather(span)
            case _Action.ISSUE_REDUCTION:
                reducing[i] = run.issue_reductions(schedule.reductions[i].members, schedule.reductions[i].form)
            case _Action.ALL_REDUCE:
                reducing[i] = [
                    run.await_reduction(span) or span if span.kind.all_reduce_after else span for span in reducing[i]
                ]
            case _Action.AWAIT_REDUCTION:
                for span in reducing[i]:
                    if not span.kind.all_reduce_after:
                        run.await_reduction(span)
                reducing[i] = [span for span in reducing[i] if span.kind.all_reduce_after]
    while run.slot <= end:
        run.advance()
    return run


class _Action(IntEnum):
    """An action of a replay for one bucket."""

    ISSUE_GATHER = 0
    AWAIT_GATHER = 1
    ISSUE_REDUCTION = 2
    ALL_REDUCE = 3
    AWAIT_REDUCTION = 4
    """Await the collectives of a bucket that no all-reduce is still to follow."""


def _actions(schedule: Schedule) -> Iterator[tuple[issue_points.ActionKey, _Action, int]]:
    """Yield all actions of a schedule with their keys, and the position of each action's bucket."""
    key, phase = issue_points.action_key, issue_points.Phase
    for i, (_, issue, wait, *_) in enumerate(schedule.gathers):
        yield key(phase.GATHER_ISSUE, issue, issue, i), _Action.ISSUE_GATHER, i
        yield key(phase.GATHER_WAIT, max(issue, wait), issue, i), _Action.AWAIT_GATHER, i
    for i, (_, issue, wait, all_reduce, _) in enumerate(schedule.reductions):
        yield key(phase.REDUCTION_ISSUE, issue, issue, i), _Action.ISSUE_REDUCTION, i
        yield key(phase.REDUCTION_WAIT, max(issue, wait), issue, i), _Action.AWAIT_REDUCTION, i
        if all_reduce >= 0:
            all_reduce = max(issue, all_reduce)
            yield key(phase.ALL_REDUCE, all_reduce, issue, i), _Action.ALL_REDUCE, i
            yield key(phase.REDUCTION_WAIT, max(all_reduce, wait), issue, i), _Action.AWAIT_REDUCTION, i


def lower_bound(graph: CostGraph) -> float:
    """Seconds that no schedule of these steps can beat, without a memory budget.

    A gather cannot end before those that are needed earlier, nor a reduction begin before its gradient is there; so
    compute is held up at the start until some first gathers are through, goes on to the gradient of some last
    reductions, and these follow: the worst choice of both, or all that one channel has to do. Bytes go at full speed,
    with one alpha for all gathers of a channel and one for its reductions; copies and issuing cost nothing.
    """
    at = list(accumulate(graph.seconds, initial=0.0))
    held_up = [(-1, 0.0)]  # from this slot on, by so much
    ends = [(len(at), at[-1])]  # reductions from this slot on cannot end before, nothing held up
    longest = 0.0
    members: list[Gather | Reduction] = [*graph.gathers, *graph.reductions]
    for channel in dict.fromkeys(member.kind.channel for member in members):
        gathers = [gather for gather in graph.gathers if gather.kind.channel == channel]
        reductions = [reduction for reduction in graph.reductions[::-1] if reduction.kind.channel == channel]
        gathering, reducing = _at_once(gathers), _at_once(reductions)
        held_up += [
            (g.first_use_slot, seconds - at[g.first_use_slot]) for g, seconds in zip(gathers, gathering, strict=True)
        ]
        ends += [(r.ready_slot, at[r.ready_slot] + seconds) for r, seconds in zip(reductions, reducing, strict=True)]
        longest = max(longest, sum(seconds[-1] for seconds in (gathering, reducing) if seconds))
    held_up.sort()
    so_far = list(accumulate((delay for _, delay in held_up), max))
    # What a slot awaits does not hold up the reductions that are issued in it.
    return max(longest, *(end + so_far[bisect_left(held_up, (slot, -math.inf)) - 1] for slot, end in ends))


def _at_once(members: Sequence[Gather | Reduction]) -> list[float]:
    """Return the seconds of the first member, the first two, ... on one channel, with the largest alpha once."""
    alphas = accumulate((member.kind.alpha_s for member in members), max)
    transfers = accumulate(member.nbytes * member.kind.s_per_byte for member in members)
    return [alpha + transfer for alpha, transfer in zip(alphas, transfers, strict=True)]
