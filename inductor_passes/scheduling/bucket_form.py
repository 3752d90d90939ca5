"""Choose how each bucket moves its members: packed into one buffer, or as a group of collectives.

Packed, a bucket is one collective, and its members are copied into the collective's buffer and out of it. Grouped, each
member is a collective of its own, without these copies, and every member but the first takes ``member_s`` of the
channel. What cannot be grouped is packed whatever the form: members in a wire format, reductions that do not read
their gradient in place (``Reduction.in_place``), and, but with NCCL, gathers of several dtypes.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction
from inductor_passes.scheduling.issue_points import Bucket, Form


def by_kind(members: Iterable[Any]) -> dict[CollectiveKind, list[Any]]:
    """Return gathers or reductions by their kind: those of one kind are merged."""
    mergeable: dict[CollectiveKind, list[Any]] = {}
    for member in members:
        mergeable.setdefault(member.kind, []).append(member)
    return mergeable


def are_grouped(gathers: Sequence[Gather]) -> bool:
    """Return whether these gathers of one kind are a group where their bucket is grouped."""
    mixed = len({gather.dtype for gather in gathers}) > 1 and not all(gather.mixes_dtypes for gather in gathers)
    return len(gathers) > 1 and gathers[0].kind.wire_format is None and not mixed


def reduced_in_place(reductions: Sequence[Reduction]) -> list[Reduction]:
    """Return those of these reductions of one kind that are not packed where their bucket is grouped."""
    grouped = len(reductions) > 1 and reductions[0].kind.wire_format is None
    return [reduction for reduction in reductions if reduction.in_place] if grouped else []


def cheapest_gather_form(gathers: Iterable[Gather]) -> Form:
    """Return the form that takes less time, compute and channel together; packed where both take the same."""
    saved = 0.0
    for kind, members in by_kind(gathers).items():
        if kind.member_s is not None and are_grouped(members):
            nbytes = sum(gather.nbytes for gather in members)
            copied = nbytes * (1 + kind.shard) - sum(gather.prepared for gather in members)
            saved += copied * kind.copy_s_per_byte - (len(members) - 1) * kind.member_s
    return "grouped" if saved > 0 else "packed"


def cheapest_reduction_form(reductions: Iterable[Reduction]) -> Form:
    """Return the form that takes less time, compute and channel together; packed where both take the same."""
    saved = 0.0
    for kind, members in by_kind(reductions).items():
        own = reduced_in_place(members)
        if kind.member_s is not None and own:
            more = len(own) - (len(own) == len(members))
            saved += sum(reduction.nbytes for reduction in own) * kind.copy_s_per_byte - more * kind.member_s
    return "grouped" if saved > 0 else "packed"


def with_cheapest_forms(
    graph: CostGraph, gathers: Iterable[Bucket], reductions: Iterable[Bucket]
) -> tuple[tuple[Bucket, ...], tuple[Bucket, ...]]:
    """Return gather and reduction buckets with the form that is the cheapest for those members that ``graph`` has."""
    gathered = {gather.fqn: gather for gather in graph.gathers}
    reduced = {reduction.fqn: reduction for reduction in graph.reductions}
    return (
        tuple(b._replace(form=cheapest_gather_form(gathered[f] for f in b.fqns if f in gathered)) for b in gathers),
        tuple(b._replace(form=cheapest_reduction_form(reduced[f] for f in b.fqns if f in reduced)) for b in reductions),
    )
