"""Choose weights that stay unsharded from forward to backward: the time that a second gather takes, against memory.

Weights are kept in the order in which backward needs them. Those that it needs first are held for the shortest time,
and there is nothing yet under which their gather could hide. How many are kept is searched, with a schedule for each
choice (``search.py``): the fewest bytes that are about as fast as the fastest choice under the budget.
"""

import math
from bisect import bisect_right
from collections.abc import Collection
from itertools import accumulate, pairwise

from inductor_passes.scheduling.cost_graph import CostGraph, Reduction, joint_contention
from inductor_passes.scheduling.search import QUICK, TIME_TOLERANCE, search_schedule

_PARTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
"""Parts of the bytes of all weights that may be kept unsharded; each is tried, besides none and the first weight."""


def choose_unsharded(
    forward: CostGraph, backward: CostGraph, candidates: Collection[str], budget: float = math.inf
) -> frozenset[str]:
    """Return the FQNs among ``candidates`` to keep unsharded, so that both graphs together are fast.

    Neither graph needs more than ``budget`` bytes; the result is empty if no choice fits.

    Args:
        forward, backward: the graphs in which none of the candidates is kept unsharded.
    """
    gathers = [gather for gather in backward.gathers if gather.fqn in candidates]
    if not gathers:
        return frozenset()
    nbytes = list(accumulate((gather.nbytes for gather in gathers), initial=0))
    counts = {max(n for n, total in enumerate(nbytes) if total <= part * nbytes[-1]) for part in _PARTS}
    alone = (
        search_schedule(forward, effort=QUICK) if budget == math.inf else None
    )  # then it takes as long, whatever it leaves behind
    found: list[tuple[float, frozenset[str]]] = []
    for count in sorted({0, 1, *counts}):
        fqns = frozenset(gather.fqn for gather in gathers[:count])
        graphs = keep_unsharded(forward, backward, fqns)
        first, second = (
            (alone or search_schedule(graphs[0], budget, effort=QUICK)),
            search_schedule(graphs[1], budget, effort=QUICK),
        )
        if first and second:
            found.append((first.predicted_s + second.predicted_s, fqns))
    fastest = min((seconds for seconds, _ in found), default=0.0)
    return next((fqns for seconds, fqns in found if seconds <= (1 + TIME_TOLERANCE) * fastest), frozenset())


def keep_unsharded(forward: CostGraph, backward: CostGraph, fqns: Collection[str]) -> tuple[CostGraph, CostGraph]:
    """Return the graphs in which ``backward`` is given these weights and does not gather them again."""
    end = len(forward.seconds)
    gathers = tuple(g._replace(last_use_slot=end) if g.fqn in fqns else g for g in forward.gathers)
    during, between = list(backward.live_bytes_in_step), list(backward.live_bytes_at_slot)
    for gather in backward.gathers:
        if gather.fqn in fqns:
            for step in range(min(gather.last_use_slot + 1, len(during))):
                during[step] += gather.nbytes
            for slot in range(min(gather.last_use_slot + 1, len(between))):
                between[slot] += gather.nbytes
    left = tuple(gather for gather in backward.gathers if gather.fqn not in fqns)
    without = backward._replace(live_bytes_in_step=tuple(during), live_bytes_at_slot=tuple(between), gathers=left)
    return forward._replace(gathers=gathers), _without_idle_slots(without)


def _without_idle_slots(graph: CostGraph) -> CostGraph:
    """Return the graph with neighbouring steps merged where nothing is needed or made in between."""
    end = len(graph.seconds)
    needed = (*graph.exchanges, *(step + 1 for step in graph.exchanges))
    slots = sorted(
        {0, end, *needed, *(g.first_use_slot for g in graph.gathers), *(r.ready_slot for r in graph.reductions)}
    )
    slot = {old: new for new, old in enumerate(slots)}
    steps = list(pairwise(slots))

    def step(old: int) -> int:
        return bisect_right(slots, old) - 1

    def waiting(reduction: Reduction) -> int:
        last = reduction.ready_slot - 1
        return step(last) - step(last - reduction.waiting_steps)

    return CostGraph(
        tuple(sum(graph.seconds[begin:end]) for begin, end in steps),
        tuple(max(graph.live_bytes_in_step[begin:end]) for begin, end in steps),
        tuple(graph.live_bytes_at_slot[old] for old in slots),
        tuple(
            g._replace(first_use_slot=slot[g.first_use_slot], last_use_slot=step(g.last_use_slot))
            for g in graph.gathers
        ),
        tuple(r._replace(ready_slot=slot[r.ready_slot], waiting_steps=waiting(r)) for r in graph.reductions),
        tuple(
            joint_contention(graph.seconds[begin:end], graph.contention[begin:end])
            for begin, end in steps
            if graph.contention
        ),
        tuple(slot[step] for step in graph.exchanges),
    )
