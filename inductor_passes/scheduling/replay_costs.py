"""Costs of a graph that are the same in all of its replays: its memory by slot, and what each bucket takes."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

from inductor_passes.scheduling.bucket_form import (
    are_grouped,
    by_kind,
    cheapest_gather_form,
    cheapest_reduction_form,
    reduced_in_place,
)
from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction
from inductor_passes.scheduling.issue_points import Form


class GatherCosts(NamedTuple):
    """Costs of gathering those members of a bucket that are merged."""

    kind: CollectiveKind
    fqns: tuple[str, ...]
    nbytes: int
    sent: int
    held: int
    copied: int
    parts: int
    packing_s: float
    """Seconds of compute in which what is sent is packed, cast, padded or encoded."""


class ReductionCosts(NamedTuple):
    """Costs of reducing those members of a bucket that are merged."""

    kind: CollectiveKind
    fqns: tuple[str, ...]
    nbytes: int
    copied: int | None
    """Bytes that a copy writes beside the gradients; ``None``: there is none."""
    copying_s: float
    received: int
    """Bytes that are received beside what is sent."""
    more: int
    """Bytes that the collective's input takes more than the gradients."""
    result: int
    parts: int
    freed: int


def _gather_costs(gathers: Sequence[Gather], form: Form | None) -> tuple[GatherCosts, ...]:
    form = form or cheapest_gather_form(gathers)
    costs = []
    for kind, mergeable in by_kind(gathers).items():
        nbytes = sum(gather.nbytes for gather in mergeable)
        grouped = form == "grouped" and are_grouped(mergeable)
        copies = (len(mergeable) > 1 and not grouped) or kind.wire_format is not None
        sent = kind.sent(nbytes)
        held = sum(gather.held for gather in mergeable)
        if kind.wire_format is not None:
            held += round(sent * kind.shard)
        made_from = round(nbytes * kind.shard) if copies else sum(gather.prepared for gather in mergeable)
        fqns = tuple(gather.fqn for gather in mergeable)
        parts = len(mergeable) if grouped else 1
        packing_s = made_from * kind.copy_s_per_byte
        costs.append(GatherCosts(kind, fqns, nbytes, sent, held, nbytes if copies else 0, parts, packing_s))
    return tuple(costs)


def _reduction_costs(reductions: Sequence[Reduction], form: Form | None) -> tuple[ReductionCosts, ...]:
    form = form or cheapest_reduction_form(reductions)
    costs = []
    for kind, mergeable in by_kind(reductions).items():
        nbytes = sum(reduction.nbytes for reduction in mergeable)
        own = reduced_in_place(mergeable) if form == "grouped" else []
        sent = kind.sent(nbytes)
        copied, copying_s, received = None, 0.0, 0
        if kind.wire_format is not None:
            copied, copying_s, received = sent, nbytes * kind.copy_s_per_byte, sent
        elif len(mergeable) > len(own) and len(mergeable) > 1:
            copied = nbytes - sum(reduction.nbytes for reduction in own)
            copying_s = copied * kind.copy_s_per_byte
        elif mergeable[0].copied_from is not None:
            copied = nbytes
        fqns = tuple(reduction.fqn for reduction in mergeable)
        more = sent - sum(reduction.gradient_bytes for reduction in mergeable)
        result = sum(reduction.result for reduction in mergeable)
        parts = len(own) + (len(mergeable) > len(own)) if own else 1
        freed = nbytes if kind.wire_format is None else 2 * sent
        if result == nbytes and kind.wire_format is None:  # an all-reduce works in the memory of its input
            result = freed = 0
        costs.append(ReductionCosts(kind, fqns, nbytes, copied, copying_s, received, more, result, parts, freed))
    return tuple(costs)


class GraphCosts:
    """A graph as replays need it; what a bucket costs is the same in all of them."""

    def __init__(self, graph: CostGraph):
        self.graph = graph
        steps = len(graph.seconds)
        self.contention = graph.contention or (0.0,) * steps
        self.exchanges = frozenset(graph.exchanges)
        self.last_read = [0] * (steps + 1)
        """Bytes of weights, by the last step that reads them."""
        for gather in graph.gathers:
            self.last_read[gather.last_use_slot] += gather.nbytes
        self.made = [0] * (steps + 1)
        """Bytes of gradients that are the input of their reduction, by the step that makes them."""
        self.ready = [0] * (steps + 1)
        """Bytes of gradients that the graph's live bytes have until they are complete, by the slot of completion."""
        self.given = 0
        """Bytes of gradients that are there when the graph begins."""
        for reduction in graph.reductions:
            if reduction.copied_from is not None or reduction.in_memory_before:
                self.ready[reduction.ready_slot] += reduction.gradient_bytes
            elif reduction.is_made_in_step:
                self.made[reduction.ready_slot - 1] += reduction.nbytes
            else:  # it is an input of the graph
                self.given += reduction.nbytes
        self.given += self.ready[0]
        self._gathers: dict[tuple[tuple[int, ...], Form | None], tuple[GatherCosts, ...]] = {}
        self._reductions: dict[tuple[tuple[int, ...], Form | None], tuple[ReductionCosts, ...]] = {}

    def of_gathers(self, members: tuple[int, ...], form: Form | None) -> tuple[GatherCosts, ...]:
        if (costs := self._gathers.get((members, form))) is None:
            costs = self._gathers[members, form] = _gather_costs([self.graph.gathers[i] for i in members], form)
        return costs

    def of_reductions(self, members: tuple[int, ...], form: Form | None) -> tuple[ReductionCosts, ...]:
        if (costs := self._reductions.get((members, form))) is None:
            reductions = [self.graph.reductions[i] for i in members]
            costs = self._reductions[members, form] = _reduction_costs(reductions, form)
        return costs


@functools.lru_cache(maxsize=16)
def costs_of(graph: CostGraph) -> GraphCosts:
    """Return the costs of a graph: a search replays it, and that with each deviation, thousands of times."""
    return GraphCosts(graph)
