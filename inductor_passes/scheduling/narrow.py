"""Choose which weights and gradients travel in a wire format: those whose communication compute cannot hide.

A format costs accuracy, and compute to encode and decode, so what hides as it is stays as it is. Members are taken in
the order in which they keep compute waiting in a schedule without formats, in several numbers of bytes, first in the
formats of 16 bits, then in those of 8 and of 4, as far as they are allowed; each choice is searched for a schedule
(``search.py``). The mildest formats that are about as fast as the fastest choice are the result, and of these the
fewest bytes.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from inductor_passes.ops.wire_formats import DTYPES, GATHER_FORMATS, LEVELS, REDUCE_FORMATS, Encoding, milder
from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction
from inductor_passes.scheduling.replay import replay
from inductor_passes.scheduling.search import QUICK, TIME_TOLERANCE, search_schedule

_PARTS = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
"""Parts of the bytes of all members with a format that are tried."""


class Narrowed(NamedTuple):
    """Wire formats of the parameters that have one, by FQN: one for each step of the collective."""

    gathers: Mapping[str, tuple[str, ...]]
    reductions: Mapping[str, tuple[str, ...]]


NOTHING = Narrowed({}, {})


def narrowed(graph: CostGraph, chosen: Narrowed) -> CostGraph:
    """Return the graph in which only what is chosen has a wire format, and the chosen one."""
    return graph._replace(
        gathers=tuple(g._replace(kind=g.kind.with_formats(*chosen.gathers.get(g.fqn, ()))) for g in graph.gathers),
        reductions=tuple(
            r._replace(kind=r.kind.with_formats(*chosen.reductions.get(r.fqn, ()))) for r in graph.reductions
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
        {gather.fqn: formats for graph in graphs for gather in graph.gathers if (formats := gather.kind.wire_formats)},
        {r.fqn: formats for graph in graphs for r in graph.reductions if (formats := r.kind.wire_formats)},
    )


def choose_narrowed(graphs: Sequence[CostGraph], memory_limit: float = math.inf) -> Narrowed:
    """Return what is to travel in which wire format, for these graphs together to be fast.

    Args:
        graphs: the forward and the backward graph, in which everything that may have a format has the one that sends
            the fewest bytes.
        memory_limit: bytes of the highest peak of either graph.
    """
    order = _by_exposure(graphs)
    tried: list[tuple[float, Narrowed]] = []
    for choice in (NOTHING, *(choice for level in levels(graphs) for choice in _parts(level, order))):
        if any(choice == other for _, other in tried):
            continue
        found = [search_schedule(narrowed(graph, choice), memory_limit, effort=QUICK) for graph in graphs]
        seconds = sum(each.predicted_s if each else math.inf for each in found)
        tried.append((seconds, choice))
    fastest = min(seconds for seconds, _ in tried)
    return next(choice for seconds, choice in tried if seconds <= (1 + TIME_TOLERANCE) * fastest)


def levels(graphs: Sequence[CostGraph]) -> Iterator[Narrowed]:
    """Yield everything that may have a format, with formats of 16, of 8 and of 4 bits at least."""
    for bits in LEVELS:
        gathers: dict[str, tuple[str, ...]] = {}
        reductions: dict[str, tuple[str, ...]] = {}
        for graph in graphs:
            gathers |= {gather.fqn: _milder(gather.kind, bits, GATHER_FORMATS) for gather in graph.gathers}
            reductions |= {r.fqn: _milder(r.kind, bits, REDUCE_FORMATS) for r in graph.reductions}
        yield Narrowed(*({fqn: names for fqn, names in found.items() if names} for found in (gathers, reductions)))


def _milder(kind: CollectiveKind, bits: int, formats: Mapping[str, Encoding]) -> tuple[str, ...]:
    """Return the formats of a kind with so many bits at least; none where they would send as many bytes as without."""
    names = tuple(milder(name, bits, formats) for name in kind.wire_formats)
    narrow = names == kind.wire_formats or kind.with_formats(*names).wire < 1
    return names if narrow else ()


def _parts(level: Narrowed, order: Sequence[tuple[str, bool, int]]) -> Iterator[Narrowed]:
    """Yield parts of a level's members, in this order (FQN, whether it is a reduction, bytes)."""
    allowed = [each for each in order if each[0] in level[each[1]]]
    whole = sum(nbytes for *_, nbytes in allowed)
    for part in _PARTS:
        taken: tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]] = {}, {}
        nbytes = 0
        for fqn, reduces, size in allowed:
            if nbytes + size > part * whole:
                break
            taken[reduces][fqn] = level[reduces][fqn]
            nbytes += size
        yield Narrowed(*taken)


def _by_exposure(graphs: Sequence[CostGraph]) -> list[tuple[str, bool, int]]:
    """Return FQN, whether it is a reduction, and bytes of each member with a format, those that are exposed first.

    A weight is gathered in both directions or in one, and has one format; its bytes and its exposure are the sums.
    """
    allowed = all_narrowed(graphs)
    exposed: dict[tuple[str, bool], float] = {}
    nbytes: dict[tuple[str, bool], int] = {}
    for graph in graphs:
        plain = narrowed(graph, NOTHING)
        found = search_schedule(plain, effort=QUICK)
        assert found is not None
        sizes: dict[tuple[str, bool], int] = {}
        for reduces, members in ((False, plain.gathers), (True, plain.reductions)):
            sizes |= _sizes(members, reduces, allowed[reduces])
        for key, size in sizes.items():
            nbytes[key] = nbytes.get(key, 0) + size
        for span in replay(plain, found.schedule).spans:
            for fqn in span.fqns:
                if (key := (fqn, span.what != "gather")) in nbytes:
                    exposed[key] = exposed.get(key, 0.0) + span.exposed / len(span.fqns)
    return [(*key, nbytes[key]) for key in sorted(nbytes, key=lambda key: (-exposed.get(key, 0.0), -nbytes[key], key))]


def _sizes(
    members: Sequence[Gather | Reduction], reduces: bool, allowed: Collection[str]
) -> dict[tuple[str, bool], int]:
    return {(member.fqn, reduces): member.nbytes for member in members if member.fqn in allowed}
