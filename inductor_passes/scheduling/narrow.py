"""Choose which weights and gradients travel in their wire format: those whose communication compute cannot hide.

A format costs accuracy, and compute to encode and decode, so what hides as it is stays as it is. Members are taken in
the order in which they keep compute waiting in a schedule without formats, in several numbers of bytes; each choice is
searched for a schedule (``search.py``). The fewest bytes that are about as fast as the fastest choice are the result.
"""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from inductor_passes.ops.wire_formats import DTYPES
from inductor_passes.scheduling.cost_graph import CostGraph, Gather, Reduction
from inductor_passes.scheduling.search import QUICK, TIME_TOLERANCE, search_schedule

_PARTS = (0.0, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
"""Parts of the bytes of all members with a format that are tried."""


class Narrowed(NamedTuple):
    """FQNs of the parameters that travel in their wire format."""

    gathers: frozenset[str]
    reductions: frozenset[str]


def narrowed(graph: CostGraph, chosen: Narrowed) -> CostGraph:
    """Return the graph in which only what is chosen has a wire format."""
    return graph._replace(
        gathers=tuple(g if g.fqn in chosen.gathers else g._replace(kind=g.kind.plain or g.kind) for g in graph.gathers),
        reductions=tuple(
            r if r.fqn in chosen.reductions else r._replace(kind=r.kind.plain or r.kind) for r in graph.reductions
        ),
    )


def gathered_in(graph: CostGraph, wire_format: str) -> CostGraph:
    """Return the graph with all weights that have no wire format gathered in a wire format."""

    def narrow(gather: Gather) -> Gather:
        kind, dtype = gather.kind, getattr(torch, gather.dtype.removeprefix("torch."), None)
        if kind.wire_format is not None or dtype not in DTYPES:
            return gather
        return gather._replace(
            kind=kind.in_format(wire_format, dtype, kind)._replace(name=f"{kind.name} {wire_format} {dtype}")
        )

    return graph._replace(gathers=tuple(map(narrow, graph.gathers)))


def all_narrowed(graphs: Sequence[CostGraph]) -> Narrowed:
    """Return all members of these graphs that have a wire format."""
    return Narrowed(
        frozenset(gather.fqn for graph in graphs for gather in graph.gathers if gather.kind.wire_format is not None),
        frozenset(r.fqn for graph in graphs for r in graph.reductions if r.kind.wire_format is not None),
    )


def choose_narrowed(graphs: Sequence[CostGraph], memory_limit: float = math.inf) -> Narrowed:
    """Return what is to travel in its wire format, for these graphs together to be fast.

    Args:
        graphs: the forward and the backward graph, in which everything that may have a format has it.
        memory_limit: bytes of the highest peak of either graph.
    """
    order = _by_exposure(graphs)
    whole = sum(nbytes for *_, nbytes in order)
    tried: list[tuple[float, Narrowed]] = []
    for part in _PARTS:
        taken, nbytes = [], 0
        for fqn, reduces, size in order:
            if nbytes + size > part * whole:
                break
            taken.append((fqn, reduces))
            nbytes += size
        choice = Narrowed(
            frozenset(fqn for fqn, reduces in taken if not reduces), frozenset(fqn for fqn, reduces in taken if reduces)
        )
        if tried and tried[-1][1] == choice:
            continue
        found = [search_schedule(narrowed(graph, choice), memory_limit, effort=QUICK) for graph in graphs]
        seconds = sum(each.timeline.seconds if each else math.inf for each in found)
        tried.append((seconds, choice))
    fastest = min(seconds for seconds, _ in tried)
    return next(choice for seconds, choice in tried if seconds <= (1 + TIME_TOLERANCE) * fastest)


def _by_exposure(graphs: Sequence[CostGraph]) -> list[tuple[str, bool, int]]:
    """Return FQN, whether it is a reduction, and bytes of each member with a format, those that are exposed first.

    A weight is gathered in both directions or in one, and has one format; its bytes and its exposure are the sums.
    """
    allowed = all_narrowed(graphs)
    exposed: dict[tuple[str, bool], float] = {}
    nbytes: dict[tuple[str, bool], int] = {}
    for graph in graphs:
        plain = narrowed(graph, Narrowed(frozenset(), frozenset()))
        found = search_schedule(plain, effort=QUICK)
        assert found is not None
        sizes: dict[tuple[str, bool], int] = {}
        for reduces, members in ((False, plain.gathers), (True, plain.reductions)):
            sizes |= _sizes(members, reduces, allowed[reduces])
        for key, size in sizes.items():
            nbytes[key] = nbytes.get(key, 0) + size
        for span in found.timeline.spans:
            for fqn in span.fqns:
                if (key := (fqn, span.what != "gather")) in nbytes:
                    exposed[key] = exposed.get(key, 0.0) + span.exposed / len(span.fqns)
    return [(*key, nbytes[key]) for key in sorted(nbytes, key=lambda key: (-exposed.get(key, 0.0), -nbytes[key], key))]


def _sizes(
    members: Sequence[Gather | Reduction], reduces: bool, allowed: Collection[str]
) -> dict[tuple[str, bool], int]:
    return {(member.fqn, reduces): member.nbytes for member in members if member.fqn in allowed}
