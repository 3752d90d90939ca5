"""Which gradients are cast by the matmuls that make them: those for which there is memory, where it saves time."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from inductor_passes.scheduling.cost_graph import CostGraph, Gather, Reduction
from inductor_passes.scheduling.issue_points import ScheduledBucket, block_of
from simplefsdp.analysis.prediction import schedules, timelines
from simplefsdp.plan.bucket_plan import BucketPlan

_BLOCKS_UNDER_WAY = 4
"""Number of blocks for whose communication there must be memory beside a gradient that its matmul casts.

Llama 3 8B on 64 H100s, 2048 tokens a rank, took 228, 211, 213 and 212 ms within 13.9 GiB with 2, 3, 4 and 6 blocks, and
209, 207 and 207 ms within 14.6 GiB with 3, 4 and 6 (simulated on a null GPU).
"""


def worth_casting_in_matmuls(graph: CostGraph, limit: float, *, narrows: bool = False) -> frozenset[str]:
    """Return the FQNs of the gradients whose cast is worth moving into the matmul, and for which there is memory.

    A gradient that its matmul casts takes twice as much from there on until its reduction is issued. So the peak of
    compute may not grow by it, and beside it there must be room for what several blocks gather and reduce: where memory
    is short, a plan can hide more communication with gradients that are cast when they are reduced.

    Args:
        graph: a backward graph in which gradients are cast behind their matmuls.
        limit: bytes that the graphs may need.
        narrows: whether the plan leaves most gradients that have a wire format as they are.
    """
    highest = min(limit - _BLOCKS_UNDER_WAY * most_bytes_of_a_block(graph), max(graph.live_bytes_in_step, default=0))

    def is_worth_it(reduction: Reduction) -> bool:
        kind = (reduction.kind.plain if narrows else None) or reduction.kind
        return kind.member_s is not None and kind.member_s < reduction.nbytes * kind.copy_s_per_byte

    def fits(reduction: Reduction) -> bool:
        first = reduction.ready_slot - 1 - reduction.waiting_steps
        in_use = max(graph.live_bytes_in_step[first : reduction.ready_slot])
        return in_use + reduction.nbytes - reduction.gradient_bytes <= highest

    return frozenset(r.fqn for r in graph.reductions if r.ready_slot > 0 and is_worth_it(r) and fits(r))


def casts_that_raise_no_peak(
    fqns: frozenset[str],
    plan_of: Callable[[Sequence[CostGraph]], BucketPlan],
    costs_with: Callable[[frozenset[str]], Sequence[CostGraph]],
) -> frozenset[str]:
    """Return as many of ``fqns`` as matmuls can cast without a higher peak of a plan that a rule makes.

    Such a plan has its buckets whatever memory they need. So where it would need more than without casts in matmuls,
    gradients that wait for their reduction are cast by it.

    Args:
        fqns: FQNs of gradients.
        plan_of: returns the plan for a forward and a backward graph.
        costs_with: returns both graphs, in which matmuls cast the gradients of these FQNs.
    """
    without = costs_with(frozenset())
    highest = max(timeline.peak for timeline in timelines(plan_of(without), without))
    while fqns:
        graphs = costs_with(fqns)
        plan = plan_of(graphs)
        above = {slot: most - highest for slot, most in enumerate(timelines(plan, graphs)[1].memory) if most > highest}
        if not above:
            break
        backward = graphs[1]
        cast = {i: reduction for i, reduction in enumerate(backward.reductions) if reduction.fqn in fqns}
        too_many = _casts_above(above, cast, schedules(plan, graphs)[1].reductions)
        fqns = fqns - too_many if too_many else frozenset()
    return fqns


def _casts_above(
    above: Mapping[int, int], cast: Mapping[int, Reduction], buckets: Collection[ScheduledBucket]
) -> frozenset[str]:
    """Return the FQNs of gradients whose casts take the bytes that are too many in some slots.

    Args:
        above: bytes that are too many, by slot.
        cast: the gradients that matmuls cast, by their number in ``buckets``.
        buckets: all buckets of reductions.
    """
    found: set[int] = set()
    for slot, nbytes in sorted(above.items(), key=lambda item: -item[1]):
        waiting = {
            i
            for bucket in buckets
            for i in bucket.members
            if i in cast and cast[i].ready_slot - 1 <= slot <= bucket.issue_slot
        }
        left = nbytes - sum(_more_bytes(cast[i]) for i in waiting & found)
        for i in sorted(waiting - found):  # the first that are made wait the longest
            if left > 0:
                found.add(i)
                left -= _more_bytes(cast[i])
    return frozenset(cast[i].fqn for i in found)


def _more_bytes(reduction: Reduction) -> int:
    """Return how many bytes more a gradient takes in float32 than in the 16 bits in which a matmul would make it."""
    return reduction.nbytes // 2


def most_bytes_of_a_block(graph: CostGraph) -> int:
    """Return the most bytes that a repeated block has in gathered weights and reductions; 0 if there is no block."""
    by_block: Counter[str] = Counter()
    members: list[Gather | Reduction] = [*graph.gathers, *graph.reductions]
    for each in members:
        if (block := block_of(each.fqn)) is not None:
            by_block[block] += each.nbytes
    return max(by_block.values(), default=0)
