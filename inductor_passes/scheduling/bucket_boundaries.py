"""Which neighbours share a bucket: ways to cut the gathers and reductions of a graph.

``Chains.gathers`` goes once over the gathers in the order of their use and keeps, for each prefix, the pairs (when
the channel is free, how late compute is) that no other pair beats in both; the best pair of the whole says where to
cut. For gathers alone, issued as soon as the channel is free, that is exact, but for the limits that keep it fast.
``Chains.reductions`` is the same with time reversed: the gradient that a reduction waits for is then what a gather
holds up.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction

Boundaries = tuple[tuple[int, ...], ...]
"""Members of each bucket, by position; together all members, in order."""

Numbers = NDArray[np.float64]
Places = NDArray[np.int64]

_WINDOW, _FRONT = 32, 4
"""The most members of a bucket, and the most pairs that are kept of a prefix."""


def one_bucket_each(members: Sequence[Gather | Reduction]) -> Boundaries:
    """Return a bucket for each member."""
    return tuple((i,) for i in range(len(members)))


def even_buckets(members: Sequence[Gather | Reduction], parts: int) -> Boundaries:
    """Return ``parts`` buckets of about the same size."""
    whole = sum(member.nbytes for member in members)
    before = accumulate((member.nbytes for member in members), initial=0)
    place = [parts * nbytes // (whole + 1) for nbytes, _ in zip(before, members, strict=False)]
    return tuple(tuple(group) for _, group in groupby(range(len(members)), key=place.__getitem__))


class _ChainMember(NamedTuple):
    kind: CollectiveKind
    nbytes: int
    at: float
    """Seconds of compute before the use."""


Way = tuple[float, float]
"""A factor by which transfers count as slower, and the most bytes of a bucket."""


class _Chain:
    """Gathers in the order of their use, to be cut in any number of ways."""

    def __init__(self, members: Sequence[_ChainMember]):
        self._at = np.array([member.at for member in members])
        self._last = [
            [np.array(costs) for costs in zip(*_last_buckets(members[max(0, end - _WINDOW) : end]), strict=True)]
            for end in range(1, len(members) + 1)
        ]
        """Costs of all last buckets of each prefix."""

    def cut(self, ways: Sequence[Way]) -> list[Boundaries]:
        """Return buckets for each way.

        A pair of a prefix is the time when the channel has carried out the prefix's buckets, and the delay of compute
        compared with no communication.
        """
        slower, largest = np.array(ways).T
        free = np.full((len(self._last) + 1, len(ways), _FRONT), np.inf)
        late = np.full_like(free, np.inf)
        free[0, :, 0] = late[0, :, 0] = 0.0
        came = np.zeros((*free.shape, 2), dtype=int)
        """For each pair, the prefix without the last bucket, and the number of that prefix's pair."""
        for end, (channel, overhead, nbytes) in enumerate(self._last, 1):
            begin = end - len(channel)
            fits = (nbytes[:, None] <= largest) | (np.arange(begin, end) == end - 1)[:, None]
            done = free[begin:end] + np.where(fits, np.outer(channel, slower), np.inf)[..., None]
            delay = np.maximum(late[begin:end], done - self._at[begin:end, None, None]) + overhead[:, None, None]
            done, delay = (np.moveaxis(pairs, 0, 1).reshape(len(ways), -1) for pairs in (done, delay))
            best = _undominated(done, delay)
            place = np.maximum(best, 0)
            free[end] = np.where(best < 0, np.inf, np.take_along_axis(done, place, 1))
            late[end] = np.where(best < 0, np.inf, np.take_along_axis(delay, place, 1))
            came[end] = np.stack((begin + place // _FRONT, place % _FRONT), axis=-1)
        return [_ends(came[:, way], int(np.lexsort((free[-1, way], late[-1, way]))[0])) for way in range(len(ways))]


def _last_buckets(chain: Sequence[_ChainMember]) -> Iterator[tuple[float, float, int]]:
    """Yield, for ``chain``, ``chain[1:]``, ...: seconds on the channel, seconds of lost compute, and bytes."""
    found = []
    sums: dict[CollectiveKind, tuple[int, int]] = {}
    for member in reversed(chain):
        count, nbytes = sums.get(member.kind, (0, 0))
        sums[member.kind] = count + 1, nbytes + member.nbytes
        channel = overhead = 0.0
        for kind, (count, nbytes) in sums.items():
            launch_s = math.inf if kind.member_s is None else (count - 1) * kind.member_s
            copy_s = nbytes * kind.copy_s_per_byte if count > 1 or kind.wire_format is not None else 0.0
            channel += max(
                kind.seconds(nbytes), kind.all_reduce_after.seconds(nbytes) if kind.all_reduce_after else 0.0
            ) + (launch_s if launch_s < copy_s else 0.0)
            overhead += kind.issue_s + (0.0 if launch_s < copy_s else copy_s)
        found.append((channel, overhead, sum(nbytes for _, nbytes in sums.values())))
    return reversed(found)


def _undominated(done: Numbers, delay: Numbers) -> Places:
    """Return the places, in each row, of pairs that no other pair beats in both respects.

    There are ``_FRONT`` places in each row, evenly chosen, -1 where there are fewer pairs.
    """
    order = np.lexsort((delay, done))
    sorted_delay = np.take_along_axis(delay, order, 1)
    before = np.minimum.accumulate(sorted_delay, axis=1)
    undominated = sorted_delay < np.concatenate((np.full((len(done), 1), np.inf), before[:, :-1]), axis=1)
    number = np.cumsum(undominated, axis=1) - 1
    count = number[:, -1:] + 1
    wanted = np.arange(_FRONT)
    wanted = np.where(count <= _FRONT, wanted, np.rint(wanted * (count - 1) / (_FRONT - 1)).astype(int))
    found = np.argmax(undominated[:, None] & (number[:, None] == wanted[..., None]), axis=2)
    return np.where(wanted < count, np.take_along_axis(order, found, 1), -1)


def _ends(came: Places, pair: int) -> Boundaries:
    """Return the buckets that lead to a pair of the whole."""
    buckets = []
    end = len(came) - 1
    while end:
        begin, pair = came[end, pair]
        buckets.append(tuple(range(begin, end)))
        end = begin
    return tuple(buckets[::-1])


class Chains:
    """The gathers and reductions of a graph, to be cut in any number of ways."""

    def __init__(self, graph: CostGraph):
        at = list(accumulate(graph.seconds, initial=0.0))
        self._gathers = _Chain([_ChainMember(g.kind, g.nbytes, at[g.first_use_slot]) for g in graph.gathers])
        reversed_reductions = graph.reductions[::-1]
        self._reductions = _Chain(
            [_ChainMember(r.kind, r.nbytes, at[-1] - at[r.ready_slot]) for r in reversed_reductions]
        )
        self._last = len(graph.reductions) - 1

    def gathers(self, ways: Sequence[Way]) -> list[Boundaries]:
        """Return the buckets of gathers, for each way."""
        return self._gathers.cut(ways)

    def reductions(self, ways: Sequence[Way]) -> list[Boundaries]:
        """Return the buckets of reductions, for each way."""
        return [
            tuple(tuple(self._last - i for i in members[::-1]) for members in boundaries[::-1])
            for boundaries in self._reductions.cut(ways)
        ]
