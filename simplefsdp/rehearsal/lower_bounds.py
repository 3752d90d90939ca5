"""How fast a step could have been: its schedule replayed without losses, and a bound for every schedule.

Both start from one recorded step, best one on a network that costs nothing: what is left between its collectives is
compute.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from inductor_passes.scheduling import replay as timeline
from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction
from simplefsdp.hardware.profile import Network
from simplefsdp.rehearsal.group import Collective

REDUCTIONS = ("reduce_scatter", "all_reduce")


class Event(NamedTuple):
    """A collective of a schedule; times in seconds of compute since the phase began."""

    kind: str
    group: str
    ranks: tuple[int, ...]
    nbytes: int
    issued: float
    waited: float


class Phase(NamedTuple):
    """Forward, backward, or what is outside of both (the optimizer): ``compute`` seconds and the collectives in it."""

    compute: float
    events: tuple[Event, ...]


def phase_of(begin: float, end: float, collectives: Sequence[Collective]) -> Phase:
    """Return the phase from ``begin`` to ``end``, without the time in which compute was blocked.

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
    return Phase(compute(end), tuple(events))


def simulate(parts: Sequence[Phase], network: Network) -> tuple[float, float]:
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


def lower_bound_s(parts: Sequence[Phase], network: Network) -> float:
    """Seconds that no schedule of the same parts can beat, one after the other: their L1 (``replay.lower_bound``).

    What needs a gather and makes a reduction is taken from the record: take that of a step in which every gather is
    awaited where it is needed and every reduction issued where it can be, unbucketed, for a bound that holds for all
    plans.
    """
    return sum(timeline.lower_bound(_cost_graph(phase_of, network)) for phase_of in parts)


def _cost_graph(part: Phase, network: Network) -> CostGraph:
    """Return the steps between the points where gathers are needed and reductions could be issued."""
    compute, events = part
    gathers = sorted((e for e in events if e.kind == "all_gather"), key=lambda e: e.waited)
    reductions = sorted((e for e in events if e.kind in REDUCTIONS), key=lambda e: e.issued)
    points = sorted({0.0, compute, *(e.waited for e in gathers), *(e.issued for e in reductions)})
    slot = {point: i for i, point in enumerate(points)}
    seconds = tuple(end - begin for begin, end in pairwise(points))

    def kind(event: Event) -> CollectiveKind:
        alpha = network.alpha_s(event.kind, event.ranks)
        return CollectiveKind(event.group, alpha, network.transfer_s(event.kind, event.ranks, _LARGE) / _LARGE)

    return CostGraph(
        seconds,
        (0,) * len(seconds),
        (0,) * len(points),
        tuple(Gather("", kind(e), e.nbytes, slot[e.waited], slot[e.waited]) for e in gathers),
        tuple(Reduction("", kind(e), e.nbytes, slot[e.issued]) for e in reductions),
    )


_LARGE = 1 << 30
