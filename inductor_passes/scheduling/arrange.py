"""Arrange the collectives of a graph in time: when each bucket of a choice is issued and awaited.

A gather is issued as late as keeps this gather and all later ones in time, a reduction when it is complete. Under a
memory limit, gathers wait for memory, and reductions are awaited where it is short.
"""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from inductor_passes.scheduling import issue_points
from inductor_passes.scheduling.bucket_boundaries import Boundaries
from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph
from inductor_passes.scheduling.issue_points import Schedule, ScheduledBucket
from inductor_passes.scheduling.replay import CollectiveSpan, Replay


class Choice(NamedTuple):
    """Inputs of ``arrange``, which makes a schedule of them."""

    gathers: Boundaries
    reductions: Boundaries
    margin: float = math.inf
    """How much earlier than necessary a gather is issued, in parts of its time; infinite: as soon as memory allows."""
    gathers_first: bool = False
    """Whether reductions are held back while a gather is late."""
    memory_limit: float = math.inf
    """Bytes in use up to which gathers are issued early and reductions are not awaited."""


def arrange(graph: CostGraph, choice: Choice) -> Schedule:
    """Return the schedule that issues and awaits the buckets of a choice."""
    end = len(graph.seconds)
    run = Replay(graph)
    due = _GatherIssue(graph, choice, run)
    complete = [max(graph.reductions[i].ready_slot for i in members) for members in choice.reductions]
    gradients = issue_points.reduction_issue_slots(graph)
    gathers: list[ScheduledBucket] = []
    reductions: list[ScheduledBucket] = []
    gathering: deque[tuple[int, list[CollectiveSpan]]] = deque()
    reducing: dict[int, list[CollectiveSpan]] = {}
    while run.slot <= end:
        slot = run.slot
        ready = range(len(reductions), bisect_right(complete, slot))
        held = choice.gathers_first and slot < gradients[-1] and due.late(run, len(gathers), run.clock)
        if ready and _in(gradients, slot) and not held:
            for n in ready:
                for earlier, spans in list(reducing.items()):
                    if max(span.finished for span in spans) > run.clock and run.alive <= choice.memory_limit:
                        break
                    following = [f for span in spans if (f := run.await_reduction(span))]
                    scheduled = reductions[earlier]
                    if following:
                        reducing[earlier] = following
                        reductions[earlier] = scheduled._replace(all_reduce_slot=slot)
                    else:
                        del reducing[earlier]
                        reductions[earlier] = scheduled._replace(wait_slot=slot)
                reducing[n] = run.issue_reductions(choice.reductions[n])
                all_reduced = graph.has_all_reduce(choice.reductions[n])
                reductions.append(ScheduledBucket(choice.reductions[n], slot, end + 1, end + 1 if all_reduced else -1))
        while len(gathers) < len(choice.gathers) and due.now(run, len(gathers), gathering):
            members, first_use = choice.gathers[len(gathers)], due.uses[len(gathers)]
            gathering.append((first_use, run.issue_gathers(members)))
            gathers.append(ScheduledBucket(members, slot, first_use))
        while gathering and gathering[0][0] <= slot:
            for span in gathering.popleft()[1]:
                run.await_gather(span)
        run.advance()
    return Schedule(tuple(gathers), tuple(reductions))


def _after_waits(run: Replay, gathering: Iterable[tuple[int, list[CollectiveSpan]]]) -> float:
    """Return when the step behind the slot of ``run`` begins, once the gathers due in the slot are awaited."""
    clock = run.clock
    for first_use, spans in gathering:
        if first_use > run.slot:
            break
        for span in spans:
            clock = max(clock, span.finished)
            clock += span.copied * span.kind.copy_s_per_byte
    return clock


class _GatherIssue:
    """Decides when the gathers of a choice are issued."""

    def __init__(self, graph: CostGraph, choice: Choice, run: Replay):
        self.members = choice.gathers
        self.uses = [min(graph.gathers[i].first_use_slot for i in members) for members in choice.gathers]
        self._memory_limit = choice.memory_limit
        self._margin = choice.margin
        self._at = list(accumulate(graph.seconds, initial=0.0))
        self._slots = issue_points.gather_issue_slots(graph)
        self._nbytes = [sum(graph.gathers[i].nbytes for i in members) for members in choice.gathers]
        self._channels = [graph.gathers[members[0]].kind.channel for members in choice.gathers]
        self._latest = [math.inf] * (len(self.uses) + 1)
        """Seconds of compute before which gather k must begin, for this and all later gathers to be in time."""
        for k in reversed(range(len(self.uses))):
            kinds: dict[CollectiveKind, int] = {}
            for i in choice.gathers[k]:
                kinds[graph.gathers[i].kind] = kinds.get(graph.gathers[i].kind, 0) + graph.gathers[i].nbytes
            cost = sum(kind.seconds(nbytes) for kind, nbytes in kinds.items())
            margin = choice.margin * cost if cost else 0.0
            self._latest[k] = min(self._at[self.uses[k]], self._latest[k + 1]) - cost - margin
        copied = [0] * len(graph.live_bytes_at_slot)
        for slot, nbytes, members in zip(self.uses, self._nbytes, self.members, strict=True):
            kind = graph.gathers[members[0]].kind
            copied[slot] = max(
                copied[slot], kind.sent(nbytes) if len(members) > 1 or kind.wire_format is not None else 0
            )
        self._read = list(accumulate(run.last_read, initial=0))
        """Bytes of weights that are not needed any longer, at each slot."""
        in_use = zip(graph.live_bytes_at_slot, copied, (*graph.live_bytes_in_step, 0), self._read, strict=False)
        self._needs = [max(between + copy, during) - read for between, copy, during, read in in_use]
        """Bytes in use in each slot and step beside the weights that were gathered by then."""
        self._window: deque[int] = deque()
        """Slots to come, up to ``_seen``, that need more memory than all slots after them."""
        self._seen = 0

    def now(self, run: Replay, k: int, gathering: Iterable[tuple[int, list[CollectiveSpan]]]) -> bool:
        """Return whether gather ``k`` is issued in the slot of ``run``; ``gathering`` is still to be awaited."""
        clock = _after_waits(run, gathering)
        if self.uses[k] <= run.slot:
            return True
        if not _in(self._slots, run.slot) or not self.late(run, k, clock):
            return False
        if run.free.get(self._channels[k], 0.0) >= self._next(run, clock) and self._margin < math.inf:
            return False  # the channel has enough to do until the next slot
        return self._memory_limit == math.inf or self._most(run, k) <= self._memory_limit

    def _most(self, run: Replay, k: int) -> int:
        """Return the most bytes in use until gather ``k`` is used, if issued now and no more gradients are held."""
        while self._seen <= self.uses[k]:
            while self._window and self._needs[self._window[-1]] <= self._needs[self._seen]:
                self._window.pop()
            self._window.append(self._seen)
            self._seen += 1
        while self._window[0] < run.slot:
            self._window.popleft()
        return run.alive + run.undecoded + self._nbytes[k] + self._read[run.slot] + self._needs[self._window[0]]

    def late(self, run: Replay, k: int, clock: float) -> bool:
        """Return whether gather ``k`` would be late if it were issued in the next slot."""
        if k >= len(self.uses):
            return False
        behind = clock - self._at[run.slot]
        begin = max(self._next(run, clock), run.free.get(self._channels[k], 0.0))
        return begin > self._latest[k] + behind

    def _next(self, run: Replay, clock: float) -> float:
        """Return when the next slot comes in which a gather could be issued."""
        following = bisect_right(self._slots, run.slot)
        slot = self._slots[following] if following < len(self._slots) else len(self._at) - 1
        return clock + self._at[slot] - self._at[run.slot]


def _in(numbers: Sequence[int], number: int) -> bool:
    """Return whether ``number`` is among the sorted ``numbers``."""
    place = bisect_left(numbers, number)
    return place < len(numbers) and numbers[place] == number
