"""Before a compiled graph first runs, its ranks compare what they have compiled.

A collective that one rank issues and another does not hangs both. So every graph with collectives of this library
begins with an operator that holds the graph's *record* (``record.py``): what was compiled, as text, and the sequence of
collectives for each process group. The record is part of the graph, and so of the compile cache's entry: a rank that
starts with a warm cache has the record too. When the operator first runs, the ranks of each group meet at the store and
compare; a difference is an error on all of them.

[Note: rendezvous at the store]
The ranks of a group meet in a part of the store, their *rendezvous*, whose name no earlier world has used: the store
may be older than this world (a job that was restarted, a process group that was destroyed and made anew). To agree on a
name, each rank sets ``here/<rank>`` to a number drawn at random, and ``rendezvous/<rank>`` to the digest of all such
numbers that the rank has read. When all ranks have set the same digest, the digest is the name.

Keys of a rendezvous, for a record with a digest:
``<digest>``: the record.
``<digest>/came/<rank>``: the rank has come to a graph with this record, maybe long ago. A rank that compiles again (for
the last, smaller batch) need not wait for ranks that do not, if the collectives are the same; if the collectives
differ, the rank waits in vain.
``<digest>/met/<rank>``: the rank has found all ranks of all its groups to agree. A rank goes on when the other ranks of
its groups have; ranks in other rows of a mesh would not hear of a difference in this row otherwise.
``<digest>/came``, ``<digest>/met``: how many ranks. A rank reads only these counts while nothing is amiss: otherwise
each of N ranks would ask the store, which is one process, for N keys.
``now/<rank>``: the digest that the rank is waiting for. Two ranks that wait for each other with different digests would
wait forever: that is a mismatch, found at once.
``failed/<rank>``: the reason for which the rank gave up, when, and with what digest; a failure that was read before is
an old one.
"""

import hashlib
import json
import logging
import secrets
import time
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph

from inductor_passes.ops.pack import LIBRARY
from inductor_passes.runtime.graph_dump import Report, restore_report
from inductor_passes.runtime.history import History
from inductor_passes.runtime.record import Record
from inductor_passes.torch_compat.distributed import (
    default_store,
    group_ranks,
    group_timeout_s,
    is_single_process_group,
)
from inductor_passes.torch_compat.fx import has_side_effect

log = logging.getLogger("simplefsdp")

_PATIENCE_S = 60.0
"""Seconds between warnings that a rank is waited for."""
_SHUTDOWN_GRACE_S = 10.0
"""Seconds in which the other ranks can see that this rank gives up."""
_CONFLICT_GRACE_S = 1.0
"""The same where ``stall_watch.py`` has told them: most of them wait inside of a collective, and do not come."""


class Subject(NamedTuple):
    """Words for what ranks compare, in errors and warnings."""

    differ: str
    """The predicate of "ranks 0 and 1 ..." where they differ."""
    awaited: str
    """The noun phrase for that to which all ranks come."""
    late: str
    """The rest of the warning about a rank that has not come for a minute, behind the noun phrase."""
    remedy: str = ""
    """Sentences on what to do about a difference."""
    every_time: bool = False
    """Whether ranks meet also for lines on which they have agreed before."""


GRAPHS = Subject(
    "have compiled different programs, and would hang",
    "a graph",
    "that has just been compiled; if that rank trains on, it was compiled here alone, for inputs that other ranks do "
    "not have",
)

Ranks = tuple[int, ...]
"""The ranks of a process group, in its order."""


@dataclass
class _World:
    """State of this process for one ``init_process_group``."""

    me: str = field(default_factory=lambda: secrets.token_hex(8))
    agreed: dict[str, Record] = field(default_factory=dict)
    """Records that were compared, by their text."""
    rendezvous_of: dict[Ranks, Any] = field(default_factory=dict)
    """The rendezvous of each group: a part of the store."""
    known_failures: set[str] = field(default_factory=set)
    comparisons: Counter[Ranks] = field(default_factory=Counter)
    """How often the ranks of a group have met for a subject that asks for it every time."""
    histories: dict[str, History] = field(default_factory=dict)
    """Things that this rank has issued, by name of the process group."""
    begun: dict[str, Record] = field(default_factory=dict)
    """Graphs that have begun to run, by what is noted of them."""
    held_bytes: Counter[int] = field(default_factory=Counter)
    """How many forward graphs hold so many bytes for a backward that has not begun."""
    epoch: int = 0
    """How often failures were forgotten, and histories with them."""
    conflict: str = ""
    """How this rank's history and another one's differ, once ``stall_watch.py`` has found it; nothing can go on."""


_worlds: weakref.WeakKeyDictionary[Any, _World] = weakref.WeakKeyDictionary()
"""States by store, for as long as torch keeps the store."""


def _world() -> _World:
    store = default_store()
    if (world := _worlds.get(store)) is None:
        world = _worlds[store] = _World()
    return world


graph_observers: list[Callable[[Record], None]] = []
"""Functions that are called with the record of a graph whenever such a graph begins to run."""


def agree(_any: Tensor, text: str) -> Tensor:
    """Compare a record with those of the other ranks if it is new; return an empty tensor.

    Raises:
        RuntimeError: a rank of one of the record's groups has another record, or does not come before the deadline.
    """
    agreed = _world().agreed
    record = agreed.get(text) or Record.from_json(text)
    _note_held_bytes(record)
    for group, what in record.noted.items():
        _world().begun[what] = record
        history(group).add(what)
    if text not in agreed:
        compare(record.compared())
        agreed[text] = record
        for warning in record.warnings:
            log.warning(warning)
        if record.summary:
            log.info(record.summary)
    if record.report is not None:
        restore_report(**record.report, direction=record.direction)
    for watch in graph_observers:
        watch(record)
    return _any.new_empty(0)


def _note_held_bytes(record: Record) -> None:
    held = _world().held_bytes
    if record.direction == "forward":
        held[record.held_bytes] += 1
    elif held[record.held_bytes]:
        held[record.held_bytes] -= 1


LIBRARY.define("agree(Tensor any, str record) -> Tensor", tags=(torch.Tag.flexible_layout,))
LIBRARY.impl("agree", agree, "CompositeExplicitAutograd")
LIBRARY.impl("agree", lambda any, _record: any.new_empty(0), "Meta")
AGREE = torch.ops.simplefsdp.agree.default
has_side_effect(AGREE)


def add_record(graph: Graph, record: Record, report: Report | None = None) -> bool:
    """Let ``graph`` begin with the operator that compares ``record`` and that keeps ``report``.

    Returns:
        Whether the graph has collectives of parameters; without them there is nothing to compare.
    """
    if not any(one.fqns for one in record.issued):
        return False
    content = replace(record, report=report.packed()) if report is not None else record
    first = next(node for node in graph.nodes if node.op != "placeholder")
    given = next(n for n in graph.find_nodes(op="placeholder") if isinstance(n.meta["val"], Tensor))
    with graph.inserting_before(first):
        node = graph.call_function(AGREE, (given, content.to_json()))
    node.meta["val"] = given.meta["val"].new_empty(0)
    graph.lint()
    return True


def compare(lines: Mapping[str, Sequence[str]], deadline_s: float | None = None, subject: Subject = GRAPHS) -> None:
    """Meet the ranks of each process group (by name) at the store; see [Note: rendezvous at the store].

    Args:
        deadline_s: seconds to wait for a rank that has not come; ``None``: the shortest timeout of the process groups.

    Raises:
        RuntimeError: the lines of one of the ranks are others, or it does not come before the deadline.
    """
    groups: dict[Ranks, list[str]] = {}
    timeouts: list[float] = []
    for name, content in lines.items():
        ranks = tuple(group_ranks(name))
        if len(ranks) > 1 and not is_single_process_group(name):
            groups.setdefault(ranks, []).extend(content)  # several groups may have the same ranks
            timeouts.append(group_timeout_s(name))
    if groups:
        world = _world()
        if subject.every_time:
            world.comparisons.update(groups.keys())
            groups = {ranks: [f"comparison {world.comparisons[ranks]}", *content] for ranks, content in groups.items()}
        records = {ranks: "\n".join(content) for ranks, content in groups.items()}
        seconds = min(timeouts) if deadline_s is None else deadline_s
        _Meeting(records, dist.get_rank(), world, default_store(), seconds, subject).hold()


def history(group: str) -> History:
    """Return the history of this rank and the process group of this name, to which is added what this rank issues."""
    return _world().histories.setdefault(group, History())


def histories() -> dict[str, History]:
    """Return this rank's histories by name of the process group."""
    return dict(_world().histories)


def noted_graphs(group: str) -> dict[str, str]:
    """Return the lines that the ranks of a group have in common of each graph that has begun, by what is noted."""
    graphs = _world().begun.items()
    return {what: "\n".join(lines) for what, record in graphs if (lines := record.compared().get(group))}


def held_bytes() -> int:
    """Return the bytes that forward graphs of this step, as predicted, hold for backward graphs that have not begun."""
    return sum(nbytes * graphs for nbytes, graphs in _world().held_bytes.items())


def forget_held_bytes() -> None:
    """Begin a step: of graphs whose backward never ran nothing is held any more."""
    _world().held_bytes.clear()


def epoch() -> int:
    """Return how often this world's failures were forgotten."""
    return _world().epoch


def known_conflict() -> str:
    """Return how the histories of two ranks differ, if that was found; a rank that waits cannot go on then."""
    return _world().conflict


def declare_conflict(reason: str, found_in: int) -> None:
    """Let this rank raise ``reason`` where it waits for others at the store.

    Args:
        found_in: the epoch in which the conflict was found; in another one it is forgotten.
    """
    world = _world()
    if world.epoch == found_in:
        world.conflict = reason


def agreed_stores() -> dict[Ranks, Any]:
    """Return the parts of the store at which this rank has met others, by the ranks of the process group."""
    return dict(_world().rendezvous_of)


def forget_failures() -> None:
    """Forget failed comparisons, so that the process can go on (a test, a notebook).

    To be called on all ranks, once all of them have raised.
    """
    world = _world()
    for one in world.histories.values():
        one.clear()
    world.conflict, world.epoch = "", world.epoch + 1
    for ranks, rendezvous in world.rendezvous_of.items():
        world.known_failures.update(_get(rendezvous, f"failed/{rank}") for rank in ranks)


def _part(store: Any, name: str) -> Any:
    return dist.PrefixStore(name, store)


def _get(store: Any, key: str) -> str:
    """Return the value of ``key``; empty if it has none."""
    return store.get(key).decode() if store.check([key]) else ""


def _first_missing(store: Any, keys: Sequence[str]) -> int:
    """Return the position of the first key without a value; the number of keys if all have one."""
    if store.check(keys):
        return len(keys)
    return bisect_left(range(len(keys)), True, key=lambda i: not store.check(keys[: i + 1]))


def _keys(what: str, ranks: Ranks) -> list[str]:
    return [f"{what}/{rank}" for rank in ranks]


class _Meeting:
    """One rank's part in the comparison of a record."""

    def __init__(
        self, records: Mapping[Ranks, str], me: int, world: _World, store: Any, deadline_s: float, subject: Subject
    ):
        self.records = records
        self.subject = subject
        self.digests = {ranks: _digest(text) for ranks, text in records.items()}
        self.me = me
        self.world = world
        self.namespaces = {ranks: _part(store, f"simplefsdp/{_digest(str(ranks))}") for ranks in records}
        self.announced: set[tuple[Ranks, str]] = set()
        self.deadline = time.monotonic() + deadline_s

    def hold(self) -> None:
        try:
            for namespace in self.namespaces.values():
                namespace.set(f"here/{self.me}", self.world.me)
            self._until_all_have("came")
            self._until_all_have("met")
        except _Disagreement as error:
            with suppress(dist.DistError):  # the store may be another process's, which has gone
                self._give_up(str(error), error.grace_s)
            raise RuntimeError(str(error)) from None
        finally:
            with suppress(dist.DistError):
                for ranks, _ in self.announced:
                    self.world.rendezvous_of[ranks].set(f"now/{self.me}", "")

    def _until_all_have(self, what: str) -> None:
        pause, patience = 0.001, time.monotonic() + _PATIENCE_S
        longest = max(0.1, max(map(len, self.records)) / 1000)
        while lagging := [ranks for ranks in self.records if not self._all_have(ranks, what)]:
            late, conflict = time.monotonic() > self.deadline, self.world.conflict
            # Who is missing is asked seldom: it takes more of the store than whether somebody is.
            asks = late or conflict or pause == longest
            awaited = [self._missing(ranks, what) for ranks in lagging] if asks else []
            if conflict:  # which says less than a difference that was found here
                raise _Disagreement(conflict, grace_s=_CONFLICT_GRACE_S)
            if late:
                raise _Disagreement(
                    f"rank {awaited[0]} has not come to {self.subject.awaited} that rank {self.me} waits to run"
                )
            if awaited and time.monotonic() > patience:
                log.warning(
                    "rank %d waits for rank %d to come to %s %s",
                    self.me,
                    awaited[0],
                    self.subject.awaited,
                    self.subject.late,
                )
                patience += _PATIENCE_S
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _enter(self, ranks: Ranks) -> bool:
        """Return whether all ranks have agreed on the group's rendezvous."""
        if ranks in self.world.rendezvous_of:
            return True
        namespace = self.namespaces[ranks]
        here, names = _keys("here", ranks), _keys("rendezvous", ranks)
        if not namespace.check(here):
            return False
        name = _digest(" ".join(value.decode() for value in namespace.multi_get(here)))
        namespace.set(f"rendezvous/{self.me}", name)
        if not namespace.check(names) or set(namespace.multi_get(names)) != {name.encode()}:
            return False
        self.world.rendezvous_of[ranks] = _part(namespace, name)
        return True

    def _all_have(self, ranks: Ranks, what: str) -> bool:
        """Return whether all ranks of the group have announced ``what``; this rank announces it."""
        if not self._enter(ranks):
            return False
        rendezvous, digest = self.world.rendezvous_of[ranks], self.digests[ranks]
        if self._announces_first(ranks, what) and not rendezvous.check([f"{digest}/{what}/{self.me}"]):
            rendezvous.set(f"{digest}/{what}/{self.me}", "yes")
            rendezvous.add(f"{digest}/{what}", 1)
        return bool(rendezvous.add(f"{digest}/{what}", 0) == len(ranks))

    def _announces_first(self, ranks: Ranks, what: str) -> bool:
        """Return whether ``what`` is still to be announced; others then know what this rank waits with."""
        if (ranks, what) in self.announced:
            return False
        self.announced.add((ranks, what))
        rendezvous, digest = self.world.rendezvous_of[ranks], self.digests[ranks]
        if not rendezvous.check([digest]):  # the text is long, and the same from all that agree
            rendezvous.set(digest, self.records[ranks])
        rendezvous.set(f"now/{self.me}", digest)
        return True

    def _missing(self, ranks: Ranks, what: str) -> int:
        """Return a rank that has not announced ``what``."""
        if ranks not in self.world.rendezvous_of:
            i = _first_missing(self.namespaces[ranks], _keys("here", ranks))
        elif (
            i := _first_missing(self.world.rendezvous_of[ranks], _keys(f"{self.digests[ranks]}/{what}", ranks))
        ) < len(ranks):
            self._look_for_trouble(ranks, ranks[i])
        return ranks[min(i, len(ranks) - 1)]  # the last, if all have come meanwhile

    def _look_for_trouble(self, ranks: Ranks, rank: int) -> None:
        rendezvous, mine = self.world.rendezvous_of[ranks], self.digests[ranks]
        theirs = _get(rendezvous, f"now/{rank}") or mine
        failed = _get(rendezvous, f"failed/{rank}")
        if failed and failed not in self.world.known_failures:
            failure = json.loads(failed)
            theirs = failure["digest"]
            if theirs == mine:
                raise _Disagreement(f"rank {rank} gave up: {failure['reason']}")
        if theirs != mine and not rendezvous.check([f"{theirs}/came/{self.me}"]):
            raise _Disagreement(_difference(self.records[ranks], _get(rendezvous, theirs), self.me, rank, self.subject))

    def _give_up(self, reason: str, grace_s: float) -> None:
        """Announce the failure at each rendezvous, and stay a while: others may come late, the store may live here."""
        leave = time.monotonic() + grace_s
        unheard = [*self.records]
        while unheard:
            unheard = [ranks for ranks in unheard if not self._all_have_failed(ranks, reason)]
            if time.monotonic() > leave:
                return
            time.sleep(0.01)

    def _all_have_failed(self, ranks: Ranks, reason: str) -> bool:
        """Return whether all other ranks of the group have given up too; this rank announces its failure."""
        if not self._enter(ranks):
            return False
        rendezvous, known = self.world.rendezvous_of[ranks], self.world.known_failures
        if self._announces_first(ranks, "failed"):
            failure = {"reason": reason, "digest": self.digests[ranks], "when": time.time_ns()}
            rendezvous.set(f"failed/{self.me}", json.dumps(failure))
        keys = [key for key in _keys("failed", ranks) if key != f"failed/{self.me}"]
        failures = [value.decode() for value in rendezvous.multi_get(keys)] if rendezvous.check(keys) else []
        if not failures or not known.isdisjoint(failures):
            return False
        known.update(failures)
        return True


class _Disagreement(Exception):
    def __init__(self, reason: str, grace_s: float = _SHUTDOWN_GRACE_S):
        super().__init__(reason)
        self.grace_s = grace_s


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def first_difference(mine: Sequence[str], theirs: Sequence[str]) -> tuple[int, str, str]:
    """Return the position of the first line that differs, and both sides' lines, quoted; ``nothing more``: no line."""
    end = "nothing more"
    pairs = enumerate(zip([*map(repr, mine), end], [*map(repr, theirs), end], strict=False))
    return next((position, own, other) for position, (own, other) in pairs if own != other)


def _difference(mine: str, theirs: str, me: int, rank: int, subject: Subject) -> str:
    _, own, other = first_difference(mine.split("\n"), theirs.split("\n"))
    return (
        f"ranks {me} and {rank} {subject.differ}. The first difference: on rank {me} {own}, on rank {rank} {other}"
        + (f". {subject.remedy}" if subject.remedy else "")
    )
