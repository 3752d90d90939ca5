"""Which neighbours share a bucket: ways to cut the gathers and reductions of a graph.

``cut_gathers`` goes once over the gathers in the order of their use and keeps, for each prefix, the pairs (when the
channel is free, how late compute is) that no other pair beats in both; the best pair of the whole says where to cut.
For gathers alone, issued as soon as the channel is free, that is exact, but for the limits that keep it fast.
``cut_reductions`` is the same with time reversed: the gradient that a reduction waits for is then what a gather holds
up.
"""

from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

from .timeline import Gather, Half, Kind, Reduction

Cuts = tuple[tuple[int, ...], ...]
"""The members of each bucket, by position; all of them, in order."""

_WINDOW, _FRONT = 32, 4
"""Most members of a bucket, and most pairs that are kept of a prefix."""


def alone(members: Sequence[Gather | Reduction]) -> Cuts:
    """A bucket for each."""
    return tuple((i,) for i in range(len(members)))


def evenly(members: Sequence[Gather | Reduction], parts: int) -> Cuts:
    """So many buckets, of about the same size."""
    whole = sum(member.nbytes for member in members)
    before = accumulate((member.nbytes for member in members), initial=0)
    place = [parts * nbytes // (whole + 1) for nbytes, _ in zip(before, members, strict=False)]
    return tuple(tuple(group) for _, group in groupby(range(len(members)), key=place.__getitem__))


class _Use(NamedTuple):
    kind: Kind
    nbytes: int
    at: float
    """Seconds of compute before it."""


_Prefix = tuple[float, float, int, "_Prefix | None"]
"""Buckets for the first members of a chain: when the channel is done with them, how much later than without
communication compute then is, how many members they are, and the same without the last bucket."""


def _cut(chain: Sequence[_Use], slower: float, largest: float) -> Cuts:
    """Buckets of at most ``largest`` bytes for gathers in the order of their use, where transfers take ``slower`` times
    as long."""
    fronts: list[list[_Prefix]] = [[] for _ in range(len(chain) + 1)]
    fronts[0].append((0.0, 0.0, 0, None))
    for i, first in enumerate(chain):
        front = _undominated(fronts[i])
        sums: dict[Kind, tuple[int, int]] = {}
        for j in range(i, min(len(chain), i + _WINDOW)):
            count, nbytes = sums.get(chain[j].kind, (0, 0))
            sums[chain[j].kind] = count + 1, nbytes + chain[j].nbytes
            if j > i and sum(nbytes for _, nbytes in sums.values()) > largest:
                break
            channel = overhead = 0.0
            for kind, (count, nbytes) in sums.items():
                channel += slower * _bottleneck(kind, nbytes)
                overhead += kind.issue_s + (nbytes * kind.copy_s_per_byte if count > 1 else 0.0)
            for prefix in front:
                free = prefix[0] + channel
                late = free - first.at
                fronts[j + 1].append((free, (late if late > prefix[1] else prefix[1]) + overhead, j + 1, prefix))
    best: _Prefix | None = min(fronts[-1], key=lambda prefix: (prefix[1], prefix[0]))
    ends = []
    while best is not None:
        ends.append(best[2])
        best = best[3]
    return tuple(tuple(range(a, b)) for a, b in pairwise(ends[::-1]))


def _bottleneck(kind: Kind, nbytes: int) -> float:
    return max(kind.seconds(nbytes), kind.then.seconds(nbytes) if kind.then else 0.0)


def _undominated(prefixes: list[_Prefix]) -> list[_Prefix]:
    """Those that no other beats in both respects: at most ``_FRONT``, evenly chosen."""
    kept: list[_Prefix] = []
    for prefix in sorted(prefixes, key=itemgetter(0, 1)):
        if not kept or prefix[1] < kept[-1][1]:
            kept.append(prefix)
    if len(kept) <= _FRONT:
        return kept
    return [kept[round(i * (len(kept) - 1) / (_FRONT - 1))] for i in range(_FRONT)]


def cut_gathers(half: Half, slower: float, largest: float) -> Cuts:
    at = list(accumulate(half.seconds, initial=0.0))
    return _cut([_Use(g.kind, g.nbytes, at[g.use]) for g in half.gathers], slower, largest)


def cut_reductions(half: Half, slower: float, largest: float) -> Cuts:
    at = list(accumulate(half.seconds, initial=0.0))
    count = len(half.reductions)
    cuts = _cut([_Use(r.kind, r.nbytes, at[-1] - at[r.there]) for r in half.reductions[::-1]], slower, largest)
    return tuple(tuple(count - 1 - i for i in members[::-1]) for members in cuts[::-1])
