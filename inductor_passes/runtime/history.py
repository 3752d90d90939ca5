"""Histories of what ranks have issued for a process group: two that differ at one place prove that the ranks do.

The ranks of a group must issue the same things in the same order, from the first one on. So what is number 7 on one
rank is number 7 on all. A history that is only shorter proves nothing: its rank may be slow.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_RECENT = 400
"""Number of things whose names are remembered."""


class HistoryEnd(NamedTuple):
    """The last part of a rank's history."""

    rank: int
    total: int
    """Number of all things issued since the beginning."""
    recent: tuple[str, ...]
    """The last of them."""


class History:
    """The history of this rank and one process group."""

    def __init__(self) -> None:
        self.count = 0
        self._recent: deque[str] = deque(maxlen=_RECENT)

    def add(self, what: str) -> None:
        self._recent.append(what)
        self.count += 1

    def clear(self) -> None:
        """Begin anew."""
        self.count = 0
        self._recent.clear()

    def end(self, rank: int) -> HistoryEnd:
        """Return the end of the history of this rank, which another thread may be adding to."""
        while True:
            count, recent = self.count, tuple(self._recent.copy())
            if count == self.count:
                return HistoryEnd(rank, count, recent)


def first_conflict(mine: HistoryEnd, theirs: HistoryEnd) -> tuple[int, str, str] | None:
    """Return the number of the first thing that differs, counted from 1, and what it is on each side.

    ``None``: nothing differs as far as both are known.
    """
    begin = max(one.total - len(one.recent) for one in (mine, theirs))
    pairs = zip(_from(mine, begin), _from(theirs, begin), strict=False)
    return next(((begin + i, own, other) for i, (own, other) in enumerate(pairs, 1) if own != other), None)


def _from(end: HistoryEnd, begin: int) -> Sequence[str]:
    return end.recent[begin - end.total + len(end.recent) :]
