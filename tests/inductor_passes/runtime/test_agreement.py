"""Ranks that have compiled different programs are told so, all of them, before any collective runs."""

import os
import re
import tempfile
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes.runtime import agreement
from inductor_passes.runtime.record import Record
from simplefsdp import manual_plan, simple_fsdp
from tests.ranks import Ranks

PLANTED = {
    "plan": r"'plan (block|none)', on rank \d 'plan (block|none)'",
    "prefetch": r"plan manual_plan\(\['\*'\], prefetch=[01]\)",
    "option": r"inductor epilogue_fusion=(True|False)",
    "model": r"'sharding of 1.weight: shape=\(\d, 6\)",
    "frozen": r"'parameter 1.bias: torch.float32 (trained|frozen)",
    "torch": r"'torch (2.13.99|.*)', on rank",
}


def program(kind: str, odd: bool, mesh: Any = None, **options: Any) -> Any:
    """A compiled model; on the odd rank something of this kind is another."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 7 if kind == "model" and odd else 8))
    model[1].bias.requires_grad_(not (kind == "frozen" and odd))
    plan: Any = "none" if kind == "plan" and odd else "block"
    if kind == "prefetch":
        plan = manual_plan(["*"], prefetch=int(odd))
    options = {"plan": plan, "lower_with": "aot_eager", **options}
    if kind == "option":
        options["inductor"] = {"epilogue_fusion": odd}
    model = simple_fsdp(model, mesh, check_initial_weights=kind != "model")
    return torch.compile(model, backend="simplefsdp", options=options)


def what_is_said(kind: str, odd: bool, mesh: Any = None, **options: Any) -> str:
    """Run a forward and a backward, and return the error."""
    torch._dynamo.reset()
    version = "2.13.99" if kind == "torch" and odd else torch.__version__
    try:
        with mock.patch.object(torch, "__version__", version):
            program(kind, odd, mesh, **options)(torch.ones(2, 6)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ("plan", "model") else pytest.mark.slow) for kind in PLANTED]
)
def test_every_rank_is_told_of_a_difference(two_ranks: Ranks, kind: str) -> None:
    for both in two_ranks.run(_ten_times, kind)[0]:
        for rank, text in enumerate(both):
            assert re.search(rf"on rank {rank} .*, on rank {1 - rank} ", text)
            assert re.search(PLANTED[kind], text), text


def _ten_times(kind: str) -> list[list[str]]:
    said = []
    for _ in range(10):
        mine = what_is_said(kind, odd=dist.get_rank() == 1)
        both: list[Any] = [None, None]
        dist.all_gather_object(both, mine)
        said.append(both)
        agreement.forget_failures()
    return said


def test_ranks_of_other_groups_are_told_too(four_ranks: Ranks) -> None:
    said = four_ranks.run(_hybrid)
    assert all("have compiled different programs" in text for text in said), said
    assert any("gave up" in text for text in said), "rank 0 shares no group with rank 3"


def _hybrid() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    said = what_is_said("plan", dist.get_rank() == 3, mesh)
    dist.barrier()
    agreement.forget_failures()
    assert not (again := what_is_said("nothing", False, mesh)), f"the next program is compared afresh, but: {again}"
    return said


@pytest.mark.slow
def test_a_warm_rank_and_a_cold_one_compare_too() -> None:
    """The pairs of processes after the first: rank 0 starts from the cache, rank 1 compiles."""
    with tempfile.TemporaryDirectory() as warm, tempfile.TemporaryDirectory() as cold:
        for i, (kind, expected) in enumerate([("nothing", "^$"), ("nothing", "^$"), ("plan", "different programs")]):
            ranks = Ranks(2)
            try:
                said = ranks.run(_from_cache, kind, [warm, f"{cold}/{i}"])
            finally:
                ranks.close()
            assert all(re.search(expected, text) for text, _ in said)
            assert [hits > 0 for _, hits in said] == [i > 0, False]


def _from_cache(kind: str, folders: list[str]) -> tuple[str, int]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folders[dist.get_rank()]
    said = what_is_said(kind, dist.get_rank() == 1, lower_with="inductor")
    counters = torch._dynamo.utils.counters  # torch 2.11 keeps no joint graphs with DTensors, only what they become
    return said, counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]


def test_a_rank_that_does_not_come_is_named(two_ranks: Ranks) -> None:
    assert two_ranks.run(_alone) == ["rank 1 has not come to a graph that rank 0 waits to run", None]


def _alone() -> str | None:
    found, group = None, dist.group.WORLD.group_name
    agreement.compare({group: ["before"]})
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as error, mock.patch.object(agreement, "_SHUTDOWN_GRACE_S", 0.1):
            agreement.compare({group: ["a"]}, deadline_s=0.2)
        found = str(error.value)
    dist.barrier()
    agreement.forget_failures()
    if dist.get_rank() == 0:
        time.sleep(0.5)  # rank 1 looks for what keeps it, and must not find what is forgotten
    agreement.compare({group: ["after"]})
    return found


def test_a_rank_that_waits_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(agreement, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(agreement, "_SHUTDOWN_GRACE_S", 0)
    assert meet(dist.HashStore(), {0: "a", 1: "a"}, size=3, deadline_s=0.2) == {
        rank: f"rank 2 has not come to a graph that rank {rank} waits to run" for rank in range(2)
    }
    assert "rank 0 waits for rank 2 to come to a graph that has just been compiled" in caplog.text


def meet(store: Any, records: dict[int, str], size: int, deadline_s: float = 60, worlds: Any = None) -> dict[int, str]:
    """Return what each rank, a thread in a group of ``size``, is told."""
    said: dict[int, str] = {}

    def rank(me: int, record: str) -> None:
        world = worlds[me] if worlds else agreement._World()
        try:
            agreement._Meeting({tuple(range(size)): record}, me, world, store, deadline_s, agreement.GRAPHS).hold()
            said[me] = ""
        except RuntimeError as error:
            said[me] = str(error)

    threads = [threading.Thread(target=rank, args=each) for each in records.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(sorted(said.items()))


class Counted:
    """A store in Python that counts what it is asked."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.calls = 0
        self.lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self.lock:
            self.calls += 1
            self.values[key] = value.encode()

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            self.calls += 1
            self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
            return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        with self.lock:
            self.calls += 1
            return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        with self.lock:
            self.calls += 1
            return [self.values[key] for key in keys]

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]


class Part:
    def __init__(self, prefix: str, store: Any):
        self.prefix, self.store = prefix, store

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.store, name)

        def prefixed(keys: Any, *args: Any) -> Any:
            one = isinstance(keys, str)
            return call(f"{self.prefix}/{keys}" if one else [f"{self.prefix}/{key}" for key in keys], *args)

        return prefixed


def test_a_meeting_of_many_ranks_asks_the_store_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_part", lambda store, prefix: Part(prefix, store))
    store, size = Counted(), 64
    worlds = {rank: agreement._World() for rank in range(size)}
    first = meet(store, dict.fromkeys(range(size), "forward"), size, worlds=worlds)
    assert set(first.values()) == {""}
    store.calls = 0
    second = meet(store, dict.fromkeys(range(size), "backward"), size, worlds=worlds)
    assert set(second.values()) == {""}
    assert store.calls < 40 * size, "a rank asks a constant number of times, whatever the number of ranks"
    assert max(map(len, store.values)) < 200, "TCPStore refuses long keys"
    assert not any(value for key, value in store.values.items() if "/now/" in key), "nobody waits any more"


def test_a_store_that_is_older_than_the_world_is_no_witness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_SHUTDOWN_GRACE_S", 2)
    store = dist.TCPStore("localhost", 0, is_master=True)
    assert meet(store, {0: "a", 1: "a"}, size=2) == {0: "", 1: ""}
    for _ in range(3):  # what was agreed, or found different, in another world counts for nothing in the next
        said = meet(store, {0: "a", 1: "b"}, size=2)
        assert all(
            "on rank 0 'a', on rank 1 'b'" in text or "on rank 1 'b', on rank 0 'a'" in text for text in said.values()
        )
        assert meet(store, {0: "b", 1: "b"}, size=2) == {0: "", 1: ""}


def test_a_difference_that_all_have_seen_is_an_old_story(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_SHUTDOWN_GRACE_S", 10)
    store, worlds = dist.HashStore(), {rank: agreement._World() for rank in range(2)}
    assert all(meet(store, {0: "a", 1: "b"}, size=2, worlds=worlds).values())
    assert meet(store, {0: "b", 1: "b"}, size=2, worlds=worlds) == {0: "", 1: ""}


def test_a_rank_whose_store_goes_away_still_says_why() -> None:
    store, gone = dist.HashStore(), mock.patch.object(agreement._Meeting, "_give_up", side_effect=dist.DistNetworkError)
    with gone:
        assert meet(store, {0: "a"}, size=2, deadline_s=0) == {
            0: "rank 1 has not come to a graph that rank 0 waits to run"
        }


def test_where_one_program_ends_earlier_is_said() -> None:
    assert agreement._difference("a", "a\nb", 0, 1, agreement.GRAPHS).endswith("on rank 0 nothing more, on rank 1 'b'")
    assert agreement._difference("a\nb", "a", 0, 1, agreement.GRAPHS).endswith("on rank 0 'b', on rank 1 nothing more")


def test_another_world_agrees_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(agreement, "compare", compared.append)
    record = Record("forward", ("this",), ("0",), (), ()).to_json()
    for _ in range(2):
        store = dist.HashStore()
        monkeypatch.setattr(agreement, "default_store", lambda store=store: store)
        for _ in range(2):
            agreement.agree(torch.ones(1), record)
    assert compared == [{"0": ["this"]}] * 2


def test_groups_of_the_same_ranks_are_both_compared(two_ranks: Ranks) -> None:
    assert all("on rank 0 'a'" in text or "on rank 1 'a'" in text for text in two_ranks.run(_same_ranks))


def _same_ranks() -> str:
    names = [dist.group.WORLD.group_name, dist.new_group([0, 1]).group_name]
    mine = "b" if dist.get_rank() else "a"
    with pytest.raises(RuntimeError, match="different programs") as error:
        agreement.compare({names[0]: [mine], names[1]: ["the same"]})
    dist.barrier()
    agreement.forget_failures()
    return str(error.value)


def test_a_rank_may_compile_again_by_itself(two_ranks: Ranks) -> None:
    two_ranks.run(_last_batch)


def _last_batch() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = program("nothing", odd=False)
    for rows in (4, 3 if dist.get_rank() else 4, 4):
        model(torch.ones(rows, 6)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1 + dist.get_rank()
