"""Ranks compare the order of the collectives that eager code has issued, before an optimizer steps on the result.

[Note: the order of eager collectives]
Compiled graphs are compared before they run. Eager code decides as it runs which weight it reads next. Ranks that
decide differently (a block that one rank skips, an expert that one rank uses, a layer that was frozen later) would take
each other's weights and gradients for their own where sizes fit. So each rank notes the collectives of parameters that
it issues, for each process group, as a running digest. Before an optimizer steps on sharded parameters, each rank
counts itself at the store under its digest since the last step, and goes on once all ranks of the group are counted
there. A rank of several groups (hybrid sharding) then counts itself as agreed in each of them, and goes on once all
ranks of its groups are: a rank in another row of the mesh would step before it heard of a difference in this row. A
rank that has waited for a second also publishes what it has issued; ranks with different digests find the first
difference.

This costs two or three requests to the store for each group and step, twice that for several groups, and no
collective. Compiled steps issue nothing here, and cost nothing. If a difference makes ranks wait for each other in a
collective, ``stall_watch.py`` says so.
"""

import functools
import hashlib
import json
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from inductor_passes.runtime import stall_watch
from inductor_passes.runtime.agreement import (
    agreed_stores,
    first_difference,
    forget_held_bytes,
    history,
    known_conflict,
)
from inductor_passes.runtime.history import History
from inductor_passes.torch_compat.autograd import in_backward
from inductor_passes.torch_compat.distributed import group_ranks, group_timeout_s, is_single_process_group
from simplefsdp.frontend.sharding import Group, ShardedParameter

_KEPT = 10_000
"""Number of collectives since the last step whose names are kept, to find the first difference."""
_PATIENCE_S = 1.0
"""Seconds that a rank waits for the others before it publishes what it has issued."""
_GRACE_S = 10.0
"""Seconds that a rank which has found a difference waits for the others to find it too: the store may live here."""


@dataclass(eq=False)
class _Issued:
    """Collectives of one process group that this rank has issued since the last comparison."""

    group: str
    history: History
    comparisons: int = 0
    """Number of comparisons so far."""
    count: int = 0
    digest: Any = field(default_factory=hashlib.blake2b)
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT))
    compared: tuple[Any, list[str]] | None = None
    """Store of the last comparison and keys that this rank deletes once all ranks have come to the next one."""

    def add(self, what: str) -> None:
        self.count += 1
        self.digest.update(what.encode())
        self.recent.append(what)
        self.history.add(what)


class _World:
    """The groups of one ``init_process_group`` over which eager code has issued collectives."""

    def __init__(self) -> None:
        self.group: Callable[[], Any] = lambda: None
        """A weak reference to the process group of the whole world; under another one nothing here counts any more."""
        self.issued: dict[str, _Issued | None] = {}
        """By name of the process group; ``None``: there are no other ranks to compare with."""
        self.groups_of: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Any, frozenset[str]]] = (
            weakref.WeakKeyDictionary()
        )
        """Results of ``_groups_of``, and the lists of parameters in which it looked."""


_world = _World()


def note_gather(info: ShardedParameter) -> None:
    """Note that this rank is about to gather a weight."""
    if info.communication.dim is not None:
        _note(f"all-gather of {info.fqn}", info.communication.shard_group)


def note_reduction(info: ShardedParameter) -> None:
    """Note that this rank is about to reduce the gradient of a parameter."""
    factor = info.communication.divide_factor
    divided = "" if factor is None else f", divided by {factor:g}"
    for group in info.communication.groups:
        _note(f"reduction of the gradient of {info.fqn}{divided}", group)


def note_lookup(info: ShardedParameter, tokens: int) -> None:
    """Note that this rank is about to exchange so many tokens for embeddings."""
    _note(f"lookup of {tokens} tokens in {info.fqn}", info.communication.shard_group)


def _note(what: str, group: Group | None) -> None:
    if group is None:
        return
    if _world.group() is not dist.group.WORLD:
        _world.group, _world.issued = weakref.ref(dist.group.WORLD), {}
    if group.name not in _world.issued:
        is_alone = group.ranks == 1 or is_single_process_group(group.name)
        _world.issued[group.name] = None if is_alone else _Issued(group.name, history(group.name))
    if (issued := _world.issued[group.name]) is not None:
        issued.add(what)
        stall_watch.advance(what)


@functools.cache
def compare_before_steps() -> None:
    """Let every optimizer of this process call ``compare_order`` before each step on sharded parameters.

    Steps inside of backward, one for each parameter by a hook, are too many to compare at each.
    """

    def before(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and not in_backward() and (groups := _groups_of(optimizer)):
            for group in groups:
                history(group).add("a step of an optimizer")
            forget_held_bytes()
            compare_order()

    register_optimizer_step_pre_hook(before)


def _groups_of(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Return the names of the process groups over which parameters of ``optimizer`` are sharded or replicated."""
    lists = [group["params"] for group in optimizer.param_groups]
    looked_at = [(id(params), len(params)) for params in lists]
    known = _world.groups_of.get(optimizer)
    if known is None or known[0] != looked_at:
        infos = (getattr(param, "simple_fsdp_info", None) for params in lists for param in params)
        groups = frozenset(group.name for info in infos if info for group in info.communication.groups)
        known = _world.groups_of[optimizer] = (looked_at, groups)
    return known[1]


def compare_order() -> None:
    """Compare the collectives that the ranks of each group have issued since the last call; all ranks must call it.

    Raises:
        RuntimeError: the ranks of a group have issued different collectives, or a rank does not come before the
            timeout of the process group. All ranks of the group are told.
    """
    known = [issued for issued in _world.issued.values() if issued and _world.group() is dist.group.WORLD]
    stores = agreed_stores() if known else {}
    comparisons = [
        _Comparison(issued, stores[ranks]) for issued in known if (ranks := tuple(group_ranks(issued.group))) in stores
    ]
    try:
        _wait(comparisons)
    finally:
        for issued in known:
            issued.comparisons, issued.count, issued.digest = issued.comparisons + 1, 0, hashlib.blake2b()
            issued.recent.clear()


def _wait(comparisons: list["_Comparison"]) -> None:
    began = time.monotonic()
    for _ in range(min(len(comparisons), 2)):  # rounds: of several groups, one to compare and one to have agreed in all
        for each in comparisons:  # before any wait: a rank of two groups is awaited in both
            each.announce()
        _wait_for_all(comparisons, began)
    for each in comparisons:
        each.clean_up()


def _wait_for_all(comparisons: list["_Comparison"], began: float) -> None:
    """Wait until all ranks of all groups have announced what this rank has; ``began`` is when it began to wait."""
    pause = 0.0002
    lagging = comparisons
    while lagging := [each for each in lagging if not each.all_have_come()]:
        time.sleep(pause)
        pause = min(2 * pause, max(0.05, max(len(each.ranks) for each in lagging) / 1000))  # one store serves them all
        waited, conflict = time.monotonic() - began, known_conflict()
        if waited > _PATIENCE_S and (reason := next(filter(None, (each.trouble(waited) for each in lagging)), "")):
            for each in comparisons:
                each.give_up(reason)
            leave = time.monotonic() + _GRACE_S
            for each in comparisons:
                each.wait_until_told(leave)
            raise RuntimeError(reason)
        if conflict:  # the other ranks have been told by the watch
            raise RuntimeError(conflict)


class _Comparison:
    """One rank's part in the comparison of what the ranks of one process group have issued.

    Keys in the store: ``<key>/1``, how many ranks have issued the collectives with this digest; ``<key>/2``, how many
    of them agree with the other ranks of all their groups; once somebody has waited, ``first``, the key of the first
    rank that waited, and ``issued/<key>``, its number and what it has issued; ``waits/<rank>``; ``failed``, what a rank
    has found, and ``told``, how many ranks know.
    """

    def __init__(self, issued: _Issued, store: Any):
        self.issued = issued
        self.me, self.ranks = dist.get_rank(), group_ranks(issued.group)
        self.timeout_s = group_timeout_s(issued.group)
        self.store = dist.PrefixStore(f"order/{issued.group}/{issued.comparisons}", store)
        self.key = f"{issued.count}/{issued.digest.hexdigest()[:32]}"
        self.round = 0
        self.keys = ["first"] if self._is_first else []
        """Keys that this rank deletes when nobody needs them."""
        self.published = False

    def announce(self) -> None:
        """Begin the next round."""
        self.round += 1
        self.store.add(self._round_key, 1)
        if self._is_first:
            self.keys.append(self._round_key)

    def all_have_come(self) -> bool:
        return bool(self.store.add(self._round_key, 0) == len(self.ranks))

    @property
    def _round_key(self) -> str:
        return f"{self.key}/{self.round}"

    @property
    def _is_first(self) -> bool:
        return self.me == self.ranks[0]

    def clean_up(self) -> None:
        """Delete the keys of the comparison before this one: all ranks have left it."""
        store, keys = self.issued.compared or (self.store, [])
        for key in keys:
            store.delete_key(key)
        self.issued.compared = self.store, self.keys

    def trouble(self, waited_s: float) -> str:
        """Return why this rank waits in vain; empty if it does not know."""
        if self.store.check(["failed"]):
            return str(self.store.get("failed").decode())
        if not self.published:
            self.published = True
            self._set(f"waits/{self.me}", "")
            if not self.store.check([f"issued/{self.key}"]):
                self._set(f"issued/{self.key}", json.dumps([self.me, self.issued.count, *self.issued.recent]))
            if (first := self.store.compare_set("first", "", self.key).decode()) != self.key:
                return self._difference(*json.loads(self.store.get(f"issued/{first}")))
        # Ranks that wait in the first round know more.
        if waited_s > self.timeout_s + (self.round - 1) * _GRACE_S:
            absent = next((rank for rank in self.ranks if not self.store.check([f"waits/{rank}"])), None)
            whom = "ranks that wait for others" if absent is None else f"rank {absent}, which did not come to one"
            return (
                f"rank {self.me} waited {waited_s:.0f} s, the timeout of the process group, before a step of the "
                f"optimizer for {whom}"
            )
        return ""

    def _set(self, key: str, value: str) -> None:
        self.keys.append(key)
        self.store.set(key, value)

    def _difference(self, rank: int, count: int, *recent: str) -> str:
        """Return what another rank, which issued ``count`` collectives, the last ones ``recent``, did otherwise."""
        mine = [*self.issued.recent]
        first = max(self.issued.count - len(mine), count - len(recent))  # collective of which both names are known
        mine, theirs = mine[first - self.issued.count + len(mine) :], recent[first - count + len(recent) :]
        i, own, other = first_difference(mine, theirs)
        return (
            f"ranks {self.me} and {rank} have issued different collectives of parameters since the last step of an "
            f"optimizer, so gradients are mixtures. The first difference is collective {first + i}: on rank {self.me} "
            f"{own}, on rank {rank} {other}. All ranks must use the same layers in the same order: draw "
            "from one seed what is skipped or frozen, and let every rank use every expert"
        )

    def give_up(self, reason: str) -> None:
        """Tell the other ranks of the group, and that this rank knows."""
        self.store.compare_set("failed", "", reason)
        self.store.add("told", 1)

    def wait_until_told(self, leave: float) -> None:
        """Wait until all ranks of the group know, or until ``leave``, seconds of ``time.monotonic``."""
        while self.store.add("told", 0) < len(self.ranks) and time.monotonic() < leave:
            time.sleep(0.01)
