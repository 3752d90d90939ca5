"""A watch that says how ranks differ, when this rank has not gone on for seconds, and where each is, after a minute.

A rank that skips a batch, or does something alone, leaves the others waiting in a collective, and neither side says so
before the timeout of the process group. So a thread of each process looks now and then whether the process has issued
something new: a collective of a parameter (eager code) or a compiled graph. After ``_STALL_S`` seconds without, this
rank publishes at the store what it issued last, and compares with what the other ranks have published. The store is
not read before. Nothing is raised here: the process group's own timeout does that.

[Note: conflicts of histories]
Each rank keeps a history of what it has issued for each process group (``history.py``): collectives of eager code,
compiled graphs, steps of optimizers. A rank without anything new for ``_CONFLICT_S`` seconds compares its history
with the longest one that a rank has published, and publishes its own where that is longer: a few requests to the
store, however many ranks there are. Ranks whose histories are the same compare digests, and read nothing else.
Histories that differ at one place are proof of a mistake that no waiting mends. All ranks of the group log it as an
error and publish it for their other groups, and a rank that waits at the store raises it. A rank compares again after
half as long again, and so on: two ranks that come to a halt together may each have published too late for the other. A
rank that waits inside of a collective cannot be made to raise (``ProcessGroupGloo.abort`` does not end a wait): it
raises when a peer ends, or at the timeout.
"""

import atexit
import hashlib
import json
import logging
import threading
import time
from typing import Any, NamedTuple

import torch.distributed as dist

from inductor_passes.runtime.agreement import (
    agreed_stores,
    declare_conflict,
    epoch,
    first_difference,
    graph_observers,
    histories,
    known_conflict,
    noted_graphs,
)
from inductor_passes.runtime.history import History, HistoryEnd, first_conflict
from inductor_passes.torch_compat.distributed import group_ranks

log = logging.getLogger("simplefsdp")

_STALL_S = 30.0
"""Seconds without anything new after which a rank publishes where it is."""
_CONFLICT_S = 2.0
"""Seconds without anything new after which a rank compares its history with another one."""
_INTERVAL_S = 0.5
"""Seconds between two looks."""
_ENDING_S = 5.0
"""Seconds that a process which ends waits for its watch to come back from the store."""
_TELLING_S = 3.0
"""Seconds that a rank which knows of a conflict waits for the others to know: the store may live here."""


class _Position(NamedTuple):
    """The last thing that a rank has issued."""

    number: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} (number {self.number})"


class _Progress:
    """Where this process is, whichever of its threads issues."""

    position = _Position(0, "nothing")
    is_watched = False
    is_over = threading.Event()
    """Set when the process ends."""


_progress = _Progress()


def advance(what: str) -> None:
    """Note that this rank is about to issue ``what``."""
    _progress.position = _Position(_progress.position.number + 1, what)


graph_observers.append(lambda record: advance(record.title))


def start() -> None:
    """Begin to watch, in a thread that ends with the process; a second call does nothing."""
    if not _progress.is_watched:
        _progress.is_watched = True
        thread = threading.Thread(target=_watch, name="simplefsdp stall watch", daemon=True)
        thread.start()
        atexit.register(_end, thread)


def _end(thread: threading.Thread) -> None:
    """End the watch before the interpreter: a thread that comes back from the store after that aborts the process."""
    _progress.is_over.set()
    thread.join(_ENDING_S)


def _watch() -> None:
    seen: tuple[_Position, int] | None = None
    since, is_told = time.monotonic(), False
    comparisons: dict[str, _Comparison] = {}
    next_comparison_s = _CONFLICT_S
    while not _progress.is_over.wait(_INTERVAL_S):
        position, now = _progress.position, time.monotonic()
        try:
            # A graph is noted before its ranks meet, and is the position of this rank once they have.
            noted = sum(history.count for history in histories().values()) if dist.is_initialized() else 0
            if (position, noted) != seen:
                if seen is not None and now - since > _STALL_S:
                    _publish("")
                seen, since, is_told = (position, noted), now, False
                comparisons, next_comparison_s = {}, _CONFLICT_S
            elif dist.is_initialized() and not known_conflict():
                if now - since > next_comparison_s:
                    next_comparison_s *= 1.5
                    _compare_histories(comparisons)
                if now - since > _STALL_S and not is_told:
                    _publish(json.dumps(position))
                    is_told = _tell(position, now - since)
        except Exception:  # by a store that has gone, for one: the watch must not end what it watches
            log.debug("the watch for stalls could not read the store", exc_info=True)


class _Comparison:
    """A comparison of this rank's history of one process group, for as long as nothing new is added to it."""

    def __init__(self, group: str, ranks: tuple[int, ...], store: Any, history: History):
        self.ranks = ranks
        self.epoch = epoch()
        self.store = dist.PrefixStore(f"history/{self.epoch}/{group}", store.clone())
        self.mine = history.end(dist.get_rank())
        self.digest = hashlib.sha256("\n".join(self.mine.recent).encode()).hexdigest()
        self.graphs = noted_graphs(group)
        self.is_done = False

    def conflict(self) -> str:
        """Return how the histories of two ranks of the group differ; empty if no rank knows that they do."""
        if self.store.check(["conflict"]):
            return str(self.store.get("conflict").decode())
        if self.is_done:
            return ""
        for what in {*self.mine.recent} & self.graphs.keys():
            if not self.store.check([what]):
                self.store.set(what, self.graphs[what])
        mine = self._published()
        published = self.store.compare_set("longest", "", mine).decode()
        rank, total, digest = json.loads(published)
        if (total, digest) == (self.mine.total, self.digest):
            self.is_done = True
            return ""
        recent = json.loads(self.store.get(digest))
        if found := first_conflict(self.mine, HistoryEnd(rank, total, tuple(recent))):
            number, own, other = found
            settings = self._difference_of_graphs(own, other)
            reason = (
                f"ranks {self.mine.rank} and {rank} have issued different things, and wait for each other or mix their "
                f"values. The first difference is number {number}: on rank {self.mine.rank} {own!r}, on rank {rank} "
                f"{other!r}{settings}. All ranks must use the same layers, steps and settings in the same order"
            )
            return str(self.store.compare_set("conflict", "", reason).decode())
        longer = self.mine.total > total
        self.is_done = not longer or self.store.compare_set("longest", published, mine).decode() == mine
        return ""

    def _published(self) -> str:
        """Publish this rank's history under its digest, and return the few words that stand for it."""
        if not self.store.check([self.digest]):  # the text is long, and the same from all that agree
            self.store.set(self.digest, json.dumps(self.mine.recent))
        return json.dumps([self.mine.rank, self.mine.total, self.digest])

    def _difference_of_graphs(self, own: str, other: str) -> str:
        """Return what two graphs differ in, as far as both are known."""
        if own not in self.graphs or not self.store.check([other]):
            return ""
        theirs = self.store.get(other).decode()
        _, mine, its = first_difference(self.graphs[own].split("\n"), theirs.split("\n"))
        return f", which differ in {mine} and {its}"

    def tell(self, reason: str) -> None:
        """Publish how two ranks differ, of this group or of another one of this rank's, and that this rank knows."""
        self.store.compare_set("conflict", "", reason)
        self.store.add("told", 1)

    def wait_until_told(self, leave: float) -> None:
        """Wait until all ranks of the group know of the conflict, or until ``leave``, seconds of ``time.monotonic``."""
        while self.store.add("told", 0) < len(self.ranks) and time.monotonic() < leave:
            time.sleep(0.05)


def _compare_histories(comparisons: dict[str, _Comparison]) -> None:
    """Compare this rank's history of each process group with those of ranks that have come to a halt too."""
    stores = agreed_stores()
    for group, history in histories().items():
        ranks = tuple(group_ranks(group))
        known = comparisons.get(group)
        is_new = known is None or (known.epoch, known.mine.total) != (epoch(), history.count)
        if is_new and ranks in stores:
            comparisons[group] = _Comparison(group, ranks, stores[ranks], history)
    here = [comparison for comparison in comparisons.values() if comparison.epoch == epoch()]
    if reason := next(filter(None, (comparison.conflict() for comparison in here)), ""):
        log.error("rank %d: %s", dist.get_rank(), reason)
        for comparison in here:  # ranks of other rows of a mesh wait too, and would not hear of a conflict in this one
            comparison.tell(reason)
        leave = time.monotonic() + _TELLING_S
        for comparison in here:
            comparison.wait_until_told(leave)
        declare_conflict(reason, here[0].epoch)


def _stores() -> list[tuple[tuple[int, ...], Any]]:
    """Return ranks and store of each process group, over connections of this thread's own: the others may be busy."""
    return [(ranks, store.clone()) for ranks, store in agreed_stores().items()] if dist.is_initialized() else []


def _publish(text: str) -> None:
    for _, store in _stores():
        store.set(f"stalled/{dist.get_rank()}", text)


def _tell(mine: _Position, seconds: float) -> bool:
    """Warn if another rank is elsewhere; return whether it is."""
    for ranks, store in _stores():
        others = [rank for rank in ranks if rank != dist.get_rank()]
        found = {rank: store.get(f"stalled/{rank}") for rank in others if store.check([f"stalled/{rank}"])}
        positions = {rank: _Position(*json.loads(text)) for rank, text in found.items() if text}
        elsewhere = {rank: str(position) for rank, position in positions.items() if position != mine}
        if seconds > 2 * _STALL_S:
            elsewhere |= {rank: "something new meanwhile" for rank in others if rank not in positions}
        if elsewhere:
            log.warning(
                "rank %d has issued nothing for %.0f s since %s. %s. Ranks that issue different things wait for each "
                "other until the timeout of their process group",
                dist.get_rank(),
                seconds,
                mine,
                "; ".join(f"rank {rank} last issued {what}" for rank, what in elsewhere.items()),
            )
            return True
    return False
