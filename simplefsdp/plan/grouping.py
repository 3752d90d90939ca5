"""Which parameters share a bucket: by repeated block, or by patterns; and the plan that makes of it, given a graph.

A *request* (``"block"``, ``manual_plan([...])``) says which parameters belong together and how far ahead; resolved
against the order in which a graph uses them, it becomes a ``BucketPlan``.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby

from inductor_passes.scheduling.issue_points import Bucket
from inductor_passes.scheduling.issue_points import block_of as block_of
from simplefsdp.plan.bucket_plan import BucketPlan, GraphUses
from simplefsdp.text.messages import unknown

log = logging.getLogger("simplefsdp")

Buckets = tuple[tuple[str, ...], ...]
"""FQNs of each bucket, in packing order; every parameter of a model is in one bucket."""


def blocks(fqns: tuple[str, ...]) -> list[str]:
    """Return the names of the repeated blocks that ``fqns`` belong to, in registration order."""
    return list(dict.fromkeys(block for fqn in fqns if (block := block_of(fqn)) is not None))


def block_buckets(fqns: tuple[str, ...]) -> Buckets:
    """One bucket per repeated block and one for each run of parameters before, between and after the blocks.

    ``fqns`` are all parameters of a model in registration order, which is also the packing order (as in FSDP2).
    """
    return tuple(tuple(run) for _, run in groupby(fqns, key=block_of))


@dataclass(frozen=True)
class GroupingRequest:
    """A request for a plan: which parameters share a bucket, and how far ahead they are gathered."""

    name: str
    buckets: Callable[[tuple[str, ...]], Buckets]
    """Returns the buckets for all FQNs of a model, in registration order."""
    prefetch: int = 1
    """Number of buckets ahead. A gather is issued before the wait for the gather that is used this many before it; a
    reduction is awaited before the reduction that is issued this many behind it."""


BLOCK = GroupingRequest("block", block_buckets)


def manual_plan(wrap: Sequence[str | Sequence[str]], *, prefetch: int = 1) -> GroupingRequest:
    """Return a request for buckets by names of modules or parameters: the manual wrapping of the SimpleFSDP paper.

    ``manual_plan(["tok_embeddings", "layers.*", ["norm", "output"]])``: each module (or parameter) that a pattern names
    is a bucket, whatever a nested list names is one together. ``*``, ``?`` and ``[...]`` match within one component of
    the name, as in ``layers.*.attention``. A parameter that nothing names gets a bucket of its own, and a warning.

    Args:
        wrap: patterns, and lists of patterns.
        prefetch: how many buckets ahead gathers are issued, and how many later reductions are awaited; 0: everything
            is awaited where it is issued.

    Raises:
        TypeError: ``wrap`` or ``prefetch`` is of another type.
        ValueError: ``prefetch`` is negative or a list is empty. When a model is compiled: a pattern names nothing, or
            two name the same parameter.
    """
    if isinstance(wrap, str) or not isinstance(wrap, Sequence):
        raise TypeError(f"manual_plan: expected a list of patterns and lists of patterns, found {wrap!r}")
    if isinstance(prefetch, bool) or not isinstance(prefetch, int):
        raise TypeError(f"manual_plan: prefetch: expected a number of buckets, found {prefetch!r}")
    if prefetch < 0:
        raise ValueError(f"manual_plan: prefetch={prefetch}: expected 0 or more buckets")
    for entry in wrap:
        patterns = entry if isinstance(entry, Sequence) and not isinstance(entry, str) else [entry]
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise TypeError(f"manual_plan: expected a pattern or a list of patterns, found {entry!r}")
        if not patterns or "" in patterns:
            raise ValueError(f"manual_plan: expected a pattern or a list of patterns, found {entry!r}")
    entries = tuple((entry,) if isinstance(entry, str) else tuple(entry) for entry in wrap)
    together = tuple(not isinstance(entry, str) for entry in wrap)
    return GroupingRequest(f"manual_plan({list(wrap)!r}, {prefetch=})", _Manual(entries, together), prefetch)


@dataclass(frozen=True)
class _Manual:
    entries: tuple[tuple[str, ...], ...]
    together: tuple[bool, ...]
    """Whether all that an entry names is one bucket."""

    def __call__(self, fqns: tuple[str, ...]) -> Buckets:
        named: dict[str, tuple[str, str]] = {}  # the pattern that names a parameter, and its bucket
        for entry, together in zip(self.entries, self.together, strict=True):
            for pattern in entry:
                matches = {fqn: module for fqn in fqns if (module := _matched(pattern, fqn)) is not None}
                if not matches:
                    raise ValueError("manual_plan: " + unknown("pattern", pattern, _names(fqns)))
                for fqn, module in matches.items():
                    if fqn in named and named[fqn][0] != pattern:
                        raise ValueError(f"manual_plan: {fqn} is named by both {named[fqn][0]!r} and {pattern!r}")
                    named[fqn] = pattern, str(entry) if together else module
        if rest := [fqn for fqn in fqns if fqn not in named]:
            log.warning("manual_plan: no pattern names %s: a bucket for each", ", ".join(rest))
        buckets: dict[str, list[str]] = {}
        for fqn in fqns:
            buckets.setdefault(named[fqn][1] if fqn in named else fqn, []).append(fqn)
        return tuple(map(tuple, buckets.values()))


def _matched(pattern: str, fqn: str) -> str | None:
    """Return the module that holds ``fqn``, or ``fqn`` itself, if ``pattern`` names it."""
    wanted, parts = pattern.split("."), fqn.split(".")
    if len(wanted) <= len(parts) and all(map(fnmatchcase, parts, wanted)):
        return ".".join(parts[: len(wanted)])
    return None


def _names(fqns: Iterable[str]) -> list[str]:
    """Return the names that a pattern may match, modules first."""
    modules = {".".join(parts[:i]): None for fqn in fqns for parts in [fqn.split(".")] for i in range(1, len(parts))}
    return [*modules, *fqns]


def resolve_plan(
    prefetch: int,
    buckets: Buckets,
    uses: GraphUses,
    parameters: Iterable[tuple[str, tuple[int, ...]]],
    keep_unsharded: Iterable[str],
) -> BucketPlan:
    """Return the plan that carries out a request for these buckets, in graphs with these uses."""
    return BucketPlan(
        forward=_gathers(buckets, uses.forward, prefetch),
        backward=_gathers(buckets, uses.backward, prefetch),
        reductions=_reductions(buckets, uses, prefetch),
        keep_unsharded=tuple(keep_unsharded),
        parameters=tuple(parameters),
    )


def _gathers(buckets: Buckets, uses: Sequence[str], prefetch: int) -> tuple[Bucket, ...]:
    members = _members(buckets, uses)
    place = {fqn: i for i, fqn in enumerate(uses)}
    first = [min(fqns, key=place.__getitem__) for fqns in members]
    return tuple(
        Bucket(fqns, first[i - prefetch] if i >= prefetch else None, first[i], position=i)
        for i, fqns in enumerate(members)
    )


def _reductions(buckets: Buckets, uses: GraphUses, prefetch: int) -> tuple[Bucket, ...]:
    members = _members(buckets, uses.reductions[::-1])[::-1]
    place = {fqn: i for i, fqn in enumerate(uses.reductions)}
    last = [max(fqns, key=place.__getitem__) for fqns in members]
    later: list[str | None] = [*last, *[None] * (2 * prefetch)]
    return tuple(
        Bucket(fqns, last[i], later[i + 2 * prefetch], later[i + prefetch], i)
        if uses.has_all_reduce.intersection(fqns)
        else Bucket(fqns, last[i], later[i + prefetch], position=i)
        for i, fqns in enumerate(members)
    )


def _members(buckets: Buckets, uses: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the used members of each bucket, in packing order; buckets by their first use."""
    bucket_of = {fqn: bucket for bucket in buckets for fqn in bucket}
    used = set(uses)
    ordered = dict.fromkeys(bucket_of[fqn] for fqn in uses)
    return [tuple(fqn for fqn in bucket if fqn in used) for bucket in ordered]
