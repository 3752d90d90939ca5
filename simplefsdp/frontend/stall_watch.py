"""A watch that says which rank is where, when this rank has not gone on for half a minute.

A rank that skips a batch, or does something alone, leaves the others waiting in a collective, and neither side says so
before the timeout of the process group. So a thread of each process looks now and then whether the process has issued
something new: a collective of a parameter (eager code) or a compiled graph. After ``_STALL_S`` seconds without, this
rank publishes at the store what it issued last, and compares with what the other ranks have published. The store is
not read before. Nothing is raised here: the process group's own timeout does that.
"""

import json
import logging
import threading
import time
from typing import Any, NamedTuple

import torch.distributed as dist

from inductor_passes.runtime.agreement import agreed_stores, graph_observers
from inductor_passes.runtime.record import Record

log = logging.getLogger("simplefsdp")

_STALL_S = 30.0
"""Seconds without anything new after which a rank publishes where it is."""
_INTERVAL_S = 5.0
"""Seconds between two looks."""


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


_progress = _Progress()


def advance(what: str) -> None:
    """Note that this rank is about to issue ``what``."""
    _progress.position = _Position(_progress.position.number + 1, what)


def _note_graph(record: Record) -> None:
    first = next((one.fqns[0] for one in record.issued if one.fqns), "no parameter")
    advance(f"the compiled {record.direction} graph whose first collective is of {first}")


graph_observers.append(_note_graph)


def start() -> None:
    """Begin to watch, in a thread that ends with the process; a second call does nothing."""
    if not _progress.is_watched:
        _progress.is_watched = True
        threading.Thread(target=_watch, name="simplefsdp stall watch", daemon=True).start()


def _watch() -> None:
    seen, since, is_told = None, time.monotonic(), False
    while True:
        time.sleep(_INTERVAL_S)
        position, now = _progress.position, time.monotonic()
        try:
            if position != seen:
                if seen is not None and now - since > _STALL_S:
                    _publish("")
                seen, since, is_told = position, now, False
            elif now - since > _STALL_S and not is_told and dist.is_initialized():
                _publish(json.dumps(position))
                is_told = _tell(position, now - since)
        except Exception:  # by a store that has gone, for one: the watch must not end what it watches
            log.debug("the watch for stalls could not read the store", exc_info=True)


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
