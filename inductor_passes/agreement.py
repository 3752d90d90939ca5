"""Before a compiled graph's first run, its ranks compare what they have compiled.

A collective that one rank issues and another does not hangs both. So every graph with collectives of ours begins with
an operator that holds its *record*: what was compiled, as text, and the sequence of collectives for each process group.
The record is part of the graph, and so of the compile cache's entry: a rank that starts warm has it too. The first time
it runs, the ranks of each group meet at the store and compare; a difference is an error on all of them.

[Note: meeting at the store]
Under ``simplefsdp/``, with a group named by its ranks:
``<group>/<digest>``: a record.
``<group>/<digest>/<rank>``: that rank has come to a graph with this record. It may have been long ago: a rank that
compiles again (for the last, smaller batch) need not wait for others that do not, if its collectives are the same. If
they are not, it waits in vain, and says so.
``<group>/<digest>/<rank>/met``: that rank has found all ranks of all its groups to agree. A rank goes on when the
others of its groups have; those of a mesh's other rows would else not hear of a difference in this one.
``now/<rank>``: the digests that a rank is waiting for, by group. Two that wait for each other with different digests
will wait forever: that is a mismatch, found at once.
``failed/<rank>``: why a rank gave up and when, for those that wait for it; what was seen once is an old story.
"""

import hashlib
import json
import logging
import time
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph, Node

from ._compat import default_store, group_ranks, has_side_effect, stands_alone
from .collectives import MARK
from .copies import LIBRARY
from .order import PlanError
from .report import Report, restore

log = logging.getLogger("simplefsdp")

DEADLINE_S = 1800.0
"""Seconds to wait for a rank that has not come, torch's own default for collectives: it may still be compiling."""
_PATIENCE_S = 60.0
"""Seconds between warnings that a rank is waited for."""
_FAREWELL_S = 10.0
"""Seconds in which the others shall see that this rank gives up."""

_agreed: weakref.WeakKeyDictionary[Any, dict[str, dict[str, str]]] = weakref.WeakKeyDictionary()
"""By the store of a world, for as long as there is that world: the records that were compared, and the report in each.
"""
_known_failures: set[str] = set()


def agree(_any: Tensor, record: str) -> Tensor:
    """Compare ``record`` with the other ranks' if it is new; an empty tensor.

    Raises:
        RuntimeError: a rank of one of the record's groups has another one, or does not come before the deadline.
    """
    agreed = _agreed.setdefault(default_store(), {})
    if (report := agreed.get(record)) is None:
        content = json.loads(record)
        compare({group: [*content["about"], *lines] for group, lines in content["sequence"].items()})
        report = agreed[record] = content.get("report", {})
    if report:
        restore(**report)
    return _any.new_empty(0)


LIBRARY.define("agree(Tensor any, str record) -> Tensor", tags=(torch.Tag.flexible_layout,))
LIBRARY.impl("agree", agree, "CompositeExplicitAutograd")
LIBRARY.impl("agree", lambda any, _record: any.new_empty(0), "Meta")
AGREE = torch.ops.simplefsdp.agree.default
has_side_effect(AGREE)


def add_record(graph: Graph, about: Sequence[str], report: Report | None = None) -> None:
    """Let ``graph`` begin with the comparison of its collectives, in the order they are in, and of ``about``.

    ``report``: to keep with the graph.
    """
    collectives = [node for node in graph.nodes if MARK in node.meta]
    if not collectives:
        return
    first = next(node for node in graph.nodes if node.op != "placeholder")
    given = next(n for n in graph.find_nodes(op="placeholder") if isinstance(n.meta["val"], Tensor))
    with graph.inserting_before(first):
        node = graph.call_function(AGREE, (given, record(collectives, about, report)))
    node.meta["val"] = given.meta["val"].new_empty(0)
    graph.lint()


def record(collectives: Iterable[Node], about: Sequence[str], report: Report | None = None) -> str:
    """The record of a graph that issues ``collectives`` in this order."""
    sequence: dict[str, list[str]] = {}
    for node in collectives:
        options, group = node.args[1:-1], str(node.args[-1])
        value = node.all_input_nodes[0].meta["val"]
        dtype = str(value.dtype).removeprefix("torch.")
        name = str(node.target).split(".")[-2].removesuffix("_")  # it may work in place by now
        line = f"{name} of {dtype}[{value.numel()}] {' '.join(map(str, options))}: {', '.join(node.meta[MARK])}"
        sequence.setdefault(group, []).append(line)
    content: dict[str, Any] = {"about": [f"torch {torch.__version__}", *about], "sequence": sequence}
    return json.dumps(content if report is None else {**content, "report": report.packed()})


def with_sequence(old: str, collectives: Iterable[Node]) -> str:
    """A record with another order of collectives.

    Raises:
        PlanError: they are not the same collectives.
    """
    content, sequence = json.loads(old), json.loads(record(collectives, ()))["sequence"]
    for group in {**content["sequence"], **sequence}:
        before, after = (Counter(lines.get(group, ())) for lines in (content["sequence"], sequence))
        if before != after:
            raise PlanError(
                f"the plan is not carried out: lost {[*(before - after)]}, unasked for {[*(after - before)]}"
            )
    return json.dumps({**content, "sequence": sequence})


def compare(lines: Mapping[str, Sequence[str]], deadline_s: float | None = None) -> None:
    """Meet the ranks of each process group (by name) at the store; see [Note: meeting at the store]."""
    groups: dict[str, list[str]] = {}
    for name, content in lines.items():
        ranks = group_ranks(name)
        if len(ranks) > 1 and not stands_alone(name):
            groups.setdefault(" ".join(map(str, ranks)), []).extend(content)  # several groups may have the same ranks
    if groups:
        _Meeting({ranks: "\n".join(content) for ranks, content in groups.items()}).hold(
            DEADLINE_S if deadline_s is None else deadline_s
        )


def forget_failures() -> None:
    """Where a process goes on after such an error (a test, a notebook): on all ranks, when all have had theirs."""
    store = _store()
    _known_failures.update(_get(store, f"failed/{rank}") for rank in range(dist.get_world_size()))


def _store() -> Any:
    return dist.PrefixStore("simplefsdp", default_store())


def _get(store: Any, key: str) -> str:
    """The value of ``key``, empty if it has none."""
    return store.get(key).decode() if store.check([key]) else ""


class _Meeting:
    def __init__(self, groups: Mapping[str, str]):
        self.store = _store()
        self.me = dist.get_rank()
        self.groups = groups
        self.digests = {group: _digest(text) for group, text in groups.items()}

    def hold(self, deadline_s: float) -> None:
        for group, digest in self.digests.items():
            if not self.store.check([f"{group}/{digest}"]):
                self.store.set(f"{group}/{digest}", self.groups[group])
            self.store.set(f"{group}/{digest}/{self.me}", "came")
        self.store.set(f"now/{self.me}", json.dumps(self.digests))
        deadline = time.monotonic() + deadline_s
        try:
            self._meet_all("", deadline)
            for group, digest in self.digests.items():
                self.store.set(f"{group}/{digest}/{self.me}/met", "yes")
            self._meet_all("/met", deadline)
        except _Disagreement as error:
            self._give_up(str(error))
            raise RuntimeError(str(error)) from None
        finally:
            self.store.set(f"now/{self.me}", "")

    def _meet_all(self, what: str, deadline: float) -> None:
        awaited = [(group, int(rank)) for group in self.groups for rank in group.split()]
        keys = [f"{group}/{self.digests[group]}/{rank}{what}" for group, rank in awaited]
        come, pause, patience = 0, 0.001, time.monotonic() + _PATIENCE_S
        while not self.store.check(keys[come:]):
            # Not one by one: of N ranks each would ask the store, which is one process, N times.
            come = bisect_left(range(len(keys)), True, come, key=lambda i: not self.store.check(keys[come : i + 1]))
            if come == len(keys):
                return
            group, rank = awaited[come]
            self._look_for_trouble(group, rank)
            if time.monotonic() > deadline:
                raise _Disagreement(f"rank {rank} has not come to a graph that rank {self.me} waits to run")
            if time.monotonic() > patience:
                log.warning(
                    "rank %d waits for rank %d to come to a graph that has just been compiled; if that rank trains on, "
                    "it was compiled here alone, for inputs that other ranks do not have",
                    self.me,
                    rank,
                )
                patience += _PATIENCE_S
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _look_for_trouble(self, group: str, rank: int) -> None:
        mine = self.digests[group]
        theirs = json.loads(_get(self.store, f"now/{rank}") or "{}").get(group, mine)
        failed = _get(self.store, f"failed/{rank}")
        if failed and failed not in _known_failures:
            failure = json.loads(failed)
            theirs = failure["digests"].get(group, mine)
            if theirs == mine:
                raise _Disagreement(f"rank {rank} gave up: {failure['why']}")
        if theirs != mine and not self.store.check([f"{group}/{theirs}/{self.me}"]):
            raise _Disagreement(_difference(self.groups[group], _get(self.store, f"{group}/{theirs}"), self.me, rank))

    def _give_up(self, why: str) -> None:
        """Say so, and stay for a while: the store may be this process's."""
        self.store.set(f"failed/{self.me}", json.dumps({"why": why, "digests": self.digests, "when": time.time_ns()}))
        until = time.monotonic() + _FAREWELL_S
        others = {rank for group in self.groups for rank in group.split() if int(rank) != self.me}
        while others and time.monotonic() < until:
            for rank in list(others):
                failed = _get(self.store, f"failed/{rank}")
                if failed and failed not in _known_failures:
                    _known_failures.add(failed)
                    others.remove(rank)
            time.sleep(0.01)


class _Disagreement(Exception):
    pass


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _difference(mine: str, theirs: str, me: int, rank: int) -> str:
    here, there = mine.split("\n"), theirs.split("\n")
    end: Any = "nothing more"
    i = next(i for i, pair in enumerate(zip([*here, end], [*there, end], strict=False)) if pair[0] != pair[1])
    found, other = (repr(lines[i]) if i < len(lines) else end for lines in (here, there))
    return (
        f"ranks {me} and {rank} have compiled different programs, and would hang. The first difference: on rank {me} "
        f"{found}, on rank {rank} {other}"
    )
