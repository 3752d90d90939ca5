"""How fast a step could have been: its schedule replayed without losses, and a bound for every schedule.

Both start from one recorded step, best one on a network that costs nothing: what is left between its collectives is
compute.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from ..hardware import Network
from .group import Collective

REDUCTIONS = ("reduce_scatter", "all_reduce")


class Event(NamedTuple):
    """A collective of a schedule, in seconds of compute since its part began."""

    kind: str
    group: str
    ranks: tuple[int, ...]
    nbytes: int
    issued: float
    waited: float


class Part(NamedTuple):
    """Forward, backward, or what is outside of both (the optimizer): ``compute`` seconds and the collectives in it."""

    compute: float
    events: tuple[Event, ...]


def part(begin: float, end: float, collectives: Sequence[Collective]) -> Part:
    """What happened from ``begin`` to ``end``, without the time that anybody was blocked.

    A collective that nobody waited for is awaited at the end, one that an earlier part issued is left out.
    """
    inside = [c for c in collectives if begin <= c.issued < end]
    blocked = sorted((c.waited, c.blocked) for c in collectives if c.waited is not None and begin <= c.waited < end)

    def compute(time: float) -> float:
        return time - begin - sum(seconds for waited, seconds in blocked if waited < time)

    events = (
        Event(
            c.kind,
            c.group,
            c.ranks,
            c.nbytes,
            compute(c.issued),
            compute(min(end, end if c.waited is None else c.waited)),
        )
        for c in inside
    )
    return Part(compute(end), tuple(events))


def simulate(parts: Sequence[Part], network: Network) -> tuple[float, float]:
    """``(step, exposed)`` in seconds of these parts, one after the other: issued and awaited where they say, no losses.

    The L2 of a plan: what its schedule takes on ``network`` if nothing but compute and the network costs time.
    """
    time = exposed = 0.0
    for compute, events in parts:
        free: dict[str, float] = {}
        finished: dict[int, float] = {}
        passed = 0.0
        actions = sorted(
            [(event.issued, i, 0) for i, event in enumerate(events)] + [(e.waited, i, 1) for i, e in enumerate(events)]
        )
        for at, i, is_wait in actions:
            time += at - passed
            passed = at
            event = events[i]
            if is_wait:
                exposed += max(0.0, finished[i] - time)
                time = max(time, finished[i])
            else:
                start = max(time, free.get(event.group, 0.0))
                finished[i] = free[event.group] = start + network.seconds(event.kind, event.ranks, event.nbytes)
        time += compute - passed
    return time, exposed


def bound(parts: Sequence[Part], network: Network) -> float:
    """Seconds that no schedule of the same parts can beat: their L1.

    Summed over parts. A gather cannot end before those that are needed earlier, nor a reduction begin before its
    gradient is computed; so compute is held up at the start until some first gathers are through, goes on to the
    gradient of some last reductions, and these follow: the worst choice of both, or all communication of one channel.
    Bytes go at full bandwidth, with one alpha for all gathers of a part and one for all its reductions. What needs a
    gather and makes a reduction is taken from the record: take that of a step in which every gather is awaited where it
    is needed and every reduction issued where it can be, unbucketed, for a bound that holds for all plans.
    """
    return sum(_bound(compute, events, network) for compute, events in parts)


def _bound(compute: float, events: Sequence[Event], network: Network) -> float:
    held_up = [(0.0, 0.0)]  # from this point of compute on, by so much
    ends = [(compute, compute)]  # reductions from this point on cannot end before, nothing held up
    longest = 0.0
    for group in dict.fromkeys(event.group for event in events):
        of_group = [event for event in events if event.group == group]
        gathers = sorted((e for e in of_group if e.kind == "all_gather"), key=lambda e: e.waited)
        reductions = sorted((e for e in of_group if e.kind in REDUCTIONS), key=lambda e: e.issued, reverse=True)
        gathering, reducing = _at_once(gathers, network), _at_once(reductions, network)
        held_up += [(e.waited, seconds - e.waited) for e, seconds in zip(gathers, gathering, strict=True)]
        ends += [(e.issued, e.issued + seconds) for e, seconds in zip(reductions, reducing, strict=True)]
        longest = max(longest, sum(seconds[-1] for seconds in (gathering, reducing) if seconds))
    held_up.sort()
    so_far = list(accumulate((delay for _, delay in held_up), max))
    return max(longest, *(end + so_far[bisect_right(held_up, (point, math.inf)) - 1] for point, end in ends))


def _at_once(events: Sequence[Event], network: Network) -> list[float]:
    """Seconds of the first, of the first two, ... of them on one channel, each time with the largest alpha once."""
    alphas = accumulate((network.alpha_s(e.kind, e.ranks) for e in events), max)
    transfers = accumulate(network.transfer_s(e.kind, e.ranks, e.nbytes) for e in events)
    return [alpha + transfer for alpha, transfer in zip(alphas, transfers, strict=True)]
