"""What a plan costs on one graph, predicted: a replay of compute, collectives and memory, step by step.

::

    slot 0                 slot 1                 slot 2                     slot n          the end
    issue, await | step 0  issue, await | step 1  issue, await | step 2 ...  issue, await |  await

Compute is a chain of steps that nobody reorders. In the slot before each and behind the last, collectives are issued
and awaited as ``order.py`` does it: what is due from earlier slots, then the reductions that are issued here, each with
what is due of it at once, then gathers. Reductions that name no point are awaited at the end, behind all slots.
Collectives of one process group run one after the other, in the order in which they are issued. A gather's memory is in
use from its issue until the last step that reads the weight, and what was packed for it until it is awaited; a
reduction's from the step that makes the gradient until the reduction is awaited. A bucket of several members is packed
and unpacked by copies, which take compute time and, while they run, as many bytes again.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

from inductor_passes.order import Bucket


class CollectiveKind(NamedTuple):
    """What collectives must have in common to be merged, and what they cost."""

    channel: str
    """Their process group."""
    alpha_s: float
    s_per_byte: float
    """Of the whole tensor: a gather's output, a reduction's input."""
    issue_s: float = 0.0
    """Compute time that is lost by issuing and awaiting one."""
    copy_s_per_byte: float = 0.0
    """Compute time of unpacking a bucket's weights, or of packing its gradients or shards."""
    shard: float = 0.0
    """Part of the whole tensor that one rank has: shards of several members are packed before they are gathered."""
    issue_s_per_byte: float = 0.0
    """Compute time that is lost, besides, for each byte: compute is slower meanwhile."""
    all_reduce_after: "CollectiveKind | None" = None
    """Of the all-reduce that follows, per byte of the same tensor."""
    name: str = ""
    """Tells apart what costs the same but cannot be merged."""

    def seconds(self, nbytes: int) -> float:
        return self.alpha_s + nbytes * self.s_per_byte


class Gather(NamedTuple):
    fqn: str
    kind: CollectiveKind
    nbytes: int
    """Of the full weight."""
    first_use_slot: int
    """The first step that reads it; the number of steps if none does."""
    last_use_slot: int
    """The last step that reads it; the number of steps if it outlives the graph."""
    prepared: int = 0
    """Bytes of what is made of the shard to be gathered alone: cast or padded; 0 if it is gathered as it is."""


class Reduction(NamedTuple):
    fqn: str
    kind: CollectiveKind
    nbytes: int
    """Of the full gradient."""
    ready_slot: int
    """The slot in which it is complete: behind the step of one less."""
    result: int = 0
    """Bytes of the reduced shard, which outlives the graph."""


class CostGraph(NamedTuple):
    """A forward or a backward graph, as far as its schedule is concerned."""

    seconds: tuple[float, ...]
    """Of each step of compute."""
    live_bytes_in_step: tuple[int, ...]
    """In use during each, without what gathers and reductions need."""
    live_bytes_at_slot: tuple[int, ...]
    """The same in each slot; one more than there are steps."""
    gathers: tuple[Gather, ...]
    """By first use."""
    reductions: tuple[Reduction, ...]
    """By when they are complete."""

    def has_all_reduce(self, members: Iterable[int]) -> bool:
        """Whether any of these reductions is followed by an all-reduce."""
        return any(self.reductions[i].kind.all_reduce_after for i in members)


class ScheduledBucket(NamedTuple):
    """A bucket with slots for points."""

    members: tuple[int, ...]
    """Positions in ``Half.gathers`` or ``Half.reductions``."""
    issue_slot: int
    wait_slot: int
    """Of a reduction, one more than the last slot stands for the end."""
    all_reduce_slot: int = -1
    """Of a reduction that an all-reduce follows: when the one is awaited and the other issued; else -1."""


class Schedule(NamedTuple):
    """What is issued and awaited in which slot of a ``Half``. Gathers and reductions each in the order of issue."""

    gathers: tuple[ScheduledBucket, ...]
    reductions: tuple[ScheduledBucket, ...]

    def with_gathers_merged(self, i: int) -> "Schedule":
        """Bucket ``i`` and the next are one, issued and awaited as early as either."""
        one, other = self.gathers[i : i + 2]
        merged = ScheduledBucket(
            tuple(sorted(one.members + other.members)), one.issue_slot, min(one.wait_slot, other.wait_slot)
        )
        return self._replace(gathers=(*self.gathers[:i], merged, *self.gathers[i + 2 :]))

    def with_reductions_merged(self, i: int) -> "Schedule":
        """Bucket ``i`` and the next are one, issued and awaited as late as either."""
        one, other = self.reductions[i : i + 2]
        then = max(one.all_reduce_slot, other.all_reduce_slot)
        then = then if then < 0 else max(then, other.issue_slot)
        merged = ScheduledBucket(
            tuple(sorted(one.members + other.members)), other.issue_slot, max(other.wait_slot, then), then
        )
        return self._replace(reductions=(*self.reductions[:i], merged, *self.reductions[i + 2 :]))


class CollectiveSpan(NamedTuple):
    """A collective of a ``Timeline``; seconds since the graph began."""

    what: str
    """``"gather"``, ``"reduce"``, or ``"all-reduce"``: one that follows."""
    kind: CollectiveKind
    fqns: tuple[str, ...]
    nbytes: int
    issued: float
    started: float
    finished: float
    awaited: float = math.inf
    """When the wait for it began, which ended then, or when the collective had finished; infinite: not yet."""
    held: int = 0
    """Bytes that are in use until then: what was packed or prepared to be gathered."""

    @property
    def exposed(self) -> float:
        """Seconds that compute waits for it."""
        return max(0.0, self.finished - self.awaited)


class Timeline(NamedTuple):
    """The prediction for a graph."""

    seconds: float
    exposed: float
    """Of the seconds, those in which compute waited for a collective."""
    peak: int
    """Most bytes in use at a time."""
    starts: tuple[float, ...]
    """When each step of compute begins, and when the graph ends."""
    memory: tuple[int, ...]
    """Most bytes in use in each slot and step."""
    spans: tuple[CollectiveSpan, ...]


class Replay:
    """A graph while it runs: collectives are issued and awaited in the slot that ``advance`` has come to."""

    def __init__(self, half: CostGraph):
        steps = len(half.seconds)
        self.half = half
        self.slot = 0
        self.clock = 0.0
        self.exposed = 0.0
        self.free: dict[str, float] = {}
        """When each channel has done all that was issued."""
        self.alive = 0
        """Bytes of gathers, gradients and reduced shards."""
        self._starts: list[float] = []
        self._memory = list(half.live_bytes_at_slot)
        self._spans: list[CollectiveSpan] = []
        self.last_read = [0] * (steps + 1)
        """Bytes of weights, by the last step that reads them."""
        for gather in half.gathers:
            self.last_read[gather.last_use_slot] += gather.nbytes
        self._made = [0] * (steps + 1)
        for reduction in half.reductions:
            if reduction.ready_slot:
                self._made[reduction.ready_slot - 1] += reduction.nbytes
            else:  # it is an input of the graph
                self.alive += reduction.nbytes

    def issue_gathers(self, members: Iterable[int]) -> list[CollectiveSpan]:
        flights = []
        for kind, alike in _by_kind(self.half.gathers[i] for i in members).items():
            nbytes = sum(gather.nbytes for gather in alike)
            held = round(nbytes * kind.shard) if len(alike) > 1 else alike[0].prepared
            self.clock += held * kind.copy_s_per_byte
            self._use(held + nbytes)
            flights.append(self._issue("gather", kind, tuple(gather.fqn for gather in alike), nbytes, held))
        return flights

    def issue_reductions(self, members: Iterable[int]) -> list[CollectiveSpan]:
        flights = []
        for kind, alike in _by_kind(self.half.reductions[i] for i in members).items():
            nbytes = sum(reduction.nbytes for reduction in alike)
            if len(alike) > 1:
                self._copy(kind, nbytes)
            self._use(sum(reduction.result for reduction in alike))
            flights.append(self._issue("reduce", kind, tuple(reduction.fqn for reduction in alike), nbytes))
        return flights

    def await_gather(self, flight: CollectiveSpan) -> None:
        self._wait(flight)
        self.alive -= flight.held
        if len(flight.fqns) > 1:
            self._copy(flight.kind, flight.nbytes)

    def await_reduction(self, flight: CollectiveSpan) -> CollectiveSpan | None:
        """The all-reduce that follows is issued and returned, if there is one."""
        self._wait(flight)
        if flight.kind.all_reduce_after is not None:
            return self._issue("all-reduce", flight.kind.all_reduce_after, flight.fqns, flight.nbytes)
        self.alive -= flight.nbytes
        return None

    def advance(self) -> None:
        """Run the step that this slot precedes, or end."""
        step = self.slot
        self._starts.append(self.clock)
        if step < len(self.half.seconds):
            self._use(self._made[step])
            self._note(self.half.live_bytes_in_step[step] - self.half.live_bytes_at_slot[step])
            self.clock += self.half.seconds[step]
            self.alive -= self.last_read[step]
        else:
            self._note(0)
        self.slot += 1

    def timeline(self) -> Timeline:
        """Once ``advance`` has come to the end."""
        memory = tuple(self._memory)
        return Timeline(self.clock, self.exposed, max(memory), tuple(self._starts), memory, tuple(self._spans))

    def _issue(
        self, what: str, kind: CollectiveKind, fqns: tuple[str, ...], nbytes: int, held: int = 0
    ) -> CollectiveSpan:
        self.clock += kind.issue_s + nbytes * kind.issue_s_per_byte
        started = max(self.clock, self.free.get(kind.channel, 0.0))
        finished = self.free[kind.channel] = started + kind.seconds(nbytes)
        return CollectiveSpan(what, kind, fqns, nbytes, self.clock, started, finished, held=held)

    def _wait(self, flight: CollectiveSpan) -> None:
        self._spans.append(flight._replace(awaited=self.clock))
        self.exposed += max(0.0, flight.finished - self.clock)
        self.clock = max(self.clock, flight.finished)

    def _copy(self, kind: CollectiveKind, nbytes: int) -> None:
        self._note(nbytes)
        self.clock += nbytes * kind.copy_s_per_byte

    def _use(self, nbytes: int) -> None:
        self.alive += nbytes
        self._note(0)

    def _note(self, more: int) -> None:
        self._memory[self.slot] = max(
            self._memory[self.slot], self.half.live_bytes_at_slot[self.slot] + self.alive + more
        )


def _by_kind(members: Iterable[Any]) -> dict[CollectiveKind, list[Any]]:
    alike: dict[CollectiveKind, list[Any]] = {}
    for member in members:
        alike.setdefault(member.kind, []).append(member)
    return alike


def replay(half: CostGraph, schedule: Schedule) -> Timeline:
    """What ``schedule`` takes on ``half``, if nothing is late."""
    run = Replay(half)
    end = len(half.seconds)
    gathers, reductions = list(schedule.gathers[::-1]), list(schedule.reductions[::-1])
    gathering: list[list[CollectiveSpan]] = [[] for _ in range(end + 1)]
    due: list[_Awaited] = [_Awaited([], []) for _ in range(end + 2)]
    """By the slot in which they are awaited."""
    issued = 0

    def reduce_what_is_due(slot: int) -> None:
        followed, last = due[slot]
        for number, timed, flight in sorted(followed, key=itemgetter(0)):
            following = run.await_reduction(flight)
            assert following is not None
            due[max(slot, timed.wait_slot)].last.append((number, timed, following))
        followed.clear()
        for _, _, flight in sorted(last, key=itemgetter(0)):
            run.await_reduction(flight)
        last.clear()

    while run.slot <= end:
        reduce_what_is_due(run.slot)
        while reductions and reductions[-1].issue_slot <= run.slot:
            timed = reductions.pop()
            for flight in run.issue_reductions(timed.members):
                slot = max(run.slot, timed.all_reduce_slot if flight.kind.all_reduce_after else timed.wait_slot)
                (due[slot].has_all_reduce if flight.kind.all_reduce_after else due[slot].last).append(
                    (issued, timed, flight)
                )
                issued += 1
            reduce_what_is_due(run.slot)
        while gathers and gathers[-1].issue_slot <= run.slot:
            timed = gathers.pop()
            gathering[max(run.slot, timed.wait_slot)] += run.issue_gathers(timed.members)
        for flight in gathering[run.slot]:
            run.await_gather(flight)
        if run.slot == end:
            reduce_what_is_due(end + 1)
        run.advance()
    return run.timeline()


class _Awaited(NamedTuple):
    """Collectives that are awaited in a slot, with their number in the order of issue."""

    has_all_reduce: list[tuple[int, ScheduledBucket, CollectiveSpan]]
    """By all-reduces."""
    last: list[tuple[int, ScheduledBucket, CollectiveSpan]]


def schedule_of(half: CostGraph, gathers: Sequence[Bucket], reductions: Sequence[Bucket]) -> Schedule:
    """The slots in which ``order`` issues and awaits the collectives of these buckets, as far as ``half`` has them."""
    end = len(half.seconds)
    use = {gather.fqn: gather.first_use_slot for gather in half.gathers}
    number = {gather.fqn: i for i, gather in enumerate(half.gathers)}
    found = []
    for bucket in gathers:
        members = tuple(sorted(number[fqn] for fqn in bucket.fqns if fqn in number))
        if members:
            wait = min(use[fqn] for fqn in (*bucket.fqns, bucket.wait) if fqn in use)
            issue = min(wait, use[bucket.issue]) if bucket.issue in use else 0
            found.append(ScheduledBucket(members, issue, wait))
    there = {reduction.fqn: reduction.ready_slot for reduction in half.reductions}
    number = {reduction.fqn: i for i, reduction in enumerate(half.reductions)}
    slots: list[tuple[Bucket, tuple[int, ...]]] = []
    issued: dict[str | None, int] = {}
    last = 0
    for bucket in reductions:
        members = tuple(sorted(number[fqn] for fqn in bucket.fqns if fqn in number))
        if members:
            last = max(last, *(there[fqn] for fqn in (*bucket.fqns, bucket.issue) if fqn in there))
            issued.update(dict.fromkeys(bucket.fqns, last))
            slots.append((bucket, members))
    reduced = [
        ScheduledBucket(
            members,
            issued[bucket.fqns[0]],
            max(issued[bucket.fqns[0]], issued.get(bucket.wait, end + 1)),
            max(issued[bucket.fqns[0]], issued.get(bucket.all_reduce_after, end + 1))
            if half.has_all_reduce(members)
            else -1,
        )
        for bucket, members in slots
    ]
    return Schedule(tuple(sorted(found, key=lambda timed: timed.issue_slot)), tuple(reduced))


def lower_bound(half: CostGraph) -> float:
    """Seconds that no schedule of these steps can beat, without a memory budget.

    A gather cannot end before those that are needed earlier, nor a reduction begin before its gradient is there; so
    compute is held up at the start until some first gathers are through, goes on to the gradient of some last
    reductions, and these follow: the worst choice of both, or all that one channel has to do. Bytes go at full speed,
    with one alpha for all gathers of a channel and one for its reductions; copies and issuing cost nothing.
    """
    at = list(accumulate(half.seconds, initial=0.0))
    held_up = [(-1, 0.0)]  # from this slot on, by so much
    ends = [(len(at), at[-1])]  # reductions from this slot on cannot end before, nothing held up
    longest = 0.0
    members: list[Gather | Reduction] = [*half.gathers, *half.reductions]
    for channel in dict.fromkeys(member.kind.channel for member in members):
        gathers = [gather for gather in half.gathers if gather.kind.channel == channel]
        reductions = [reduction for reduction in half.reductions[::-1] if reduction.kind.channel == channel]
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
    """Seconds of the first, of the first two, ... of them on one channel, each time with the largest alpha once."""
    alphas = accumulate((member.kind.alpha_s for member in members), max)
    transfers = accumulate(member.nbytes * member.kind.s_per_byte for member in members)
    return [alpha + transfer for alpha, transfer in zip(alphas, transfers, strict=True)]
