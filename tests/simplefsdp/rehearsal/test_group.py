import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from simplefsdp import rehearsal, simple_fsdp
from simplefsdp.hardware.profile import flat
from tests.compare import LOWERINGS
from tests.models import batch, fsdp2, tiny_llama, train
from tests.simplefsdp.rehearsal.clones import run_as_clones

SLOW = flat("slow", 8, alpha_s=0.05, bandwidth_bytes_per_s=1e9)
FAST = flat("fast", 8, alpha_s=100e-6, bandwidth_bytes_per_s=1e9)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture
def rank_one_of_four() -> Iterator[rehearsal.World]:
    with rehearsal.world(4, FAST, rank=1) as world:
        yield world


def _gathered(x: Tensor) -> Tensor:
    out = torch.empty(4, *x.shape, dtype=x.dtype)
    dist.all_gather_into_tensor(out, x)
    return out


def _listed(x: Tensor) -> Tensor:
    out = [torch.empty_like(x) for _ in range(4)]
    dist.all_gather(out, x)
    return torch.stack(out)


def _scattered(x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    out = torch.empty(2, dtype=x.dtype)
    dist.reduce_scatter_tensor(out, x, op)
    return out


def _scattered_list(x: Tensor) -> Tensor:
    out = torch.empty(2, dtype=x.dtype)
    dist.reduce_scatter(out, list(x.chunk(4)))
    return out


def _reduced(x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    dist.all_reduce(x, op)
    return x


def _exchanged(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


def _exchanged_unevenly(x: Tensor) -> Tensor:
    out = torch.empty(12, dtype=x.dtype)
    dist.all_to_all_single(out, x, [3] * 4, [1, 3, 2, 2])
    return out


def _exchanged_with_others(x: Tensor) -> Tensor:
    out = torch.empty(8, dtype=x.dtype)
    dist.all_to_all_single(out, x, [1, 3, 2, 2], [2] * 4)
    return out


def _exchanged_with_an_owner(x: Tensor) -> Tensor:
    out = torch.empty(3, dtype=x.dtype)
    dist.all_to_all_single(out, x, [3, 0, 0, 0], [8, 0, 0, 0])
    dist.all_to_all_single(more := torch.ones(2), x[:0], [2, 0, 0, 0], [0] * 4)
    return torch.cat([out, more])


def _exchanged_list(x: Tensor) -> Tensor:
    out = [torch.empty(2, dtype=x.dtype) for _ in range(4)]
    dist.all_to_all(out, list(x.chunk(4)))
    return torch.cat(out)


def _broadcast(x: Tensor, source: int) -> Tensor:
    dist.broadcast(x, source)
    return x


def _from_a_list(x: Tensor, source: int) -> Tensor:
    out = torch.full((2,), 7.0)
    dist.scatter(out, list(x.chunk(4)) if source == 1 else None, source)
    return out


def _to_root(x: Tensor, root: int) -> Tensor:
    dist.reduce(x, root)
    return x


def _gathered_at_root(x: Tensor) -> Tensor:
    out = [torch.empty_like(x) for _ in range(4)]
    dist.gather(x, out, 1)
    return torch.stack(out)


def _functional(name: str, *args: Any) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        group = dist.group.WORLD.group_name
        return torch.ops._c10d_functional.wait_tensor(getattr(torch.ops._c10d_functional, name)(x, *args, group))

    return call


def _out_form(name: str, size: int, *args: Any) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        op, out = getattr(torch.ops._c10d_functional, name), torch.empty(size)
        return torch.ops._c10d_functional.wait_tensor(op(x, *args, 4, dist.group.WORLD.group_name, out=out))

    return call


def _objects(_x: Tensor) -> Tensor:
    everybodys: list[Any] = [None] * 4
    dist.all_gather_object(everybodys, {"a": 1})
    dist.broadcast_object_list(own := [3], 1)
    dist.scatter_object_list(scattered := [None], [10, 11, 12, 13], 1)
    dist.gather_object(4, gathered := [None] * 4, 1)
    return torch.tensor([everybodys[3]["a"], own[0], scattered[0], *gathered])


def _coalesced(x: Tensor) -> Tensor:
    out = torch.empty(2, 4, 8)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(out[0], x)
        dist.all_gather_into_tensor(out[1], x + 1)
    manager.wait()
    return out


def _functional_coalesced(name: str, *args: Any) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        op, group = getattr(torch.ops._c10d_functional, name), dist.group.WORLD.group_name
        return torch.stack([torch.ops._c10d_functional.wait_tensor(out) for out in op([x, -x], *args, group)])

    return call


def _dtensors(x: Tensor) -> Tensor:
    """Split a tensor that all ranks have, by each of them, and put it together from the parts of clones."""
    mesh = init_device_mesh("cpu", (4,))
    rows = distribute_tensor(x.view(4, 2), mesh, [Shard(0)], src_data_rank=None)
    columns = distribute_tensor(x.view(2, 4), mesh, [Shard(1)], src_data_rank=None)
    partial = DTensor.from_local(x, mesh, [Partial()])
    by_rows = distribute_tensor(x.repeat(2).view(4, 4), mesh, [Shard(0)], src_data_rank=None).redistribute(
        mesh, [Shard(1)]
    )
    return torch.cat(
        [t.flatten() for t in (rows.full_tensor(), columns.full_tensor(), partial.full_tensor(), by_rows.to_local())]
    )


X = torch.arange(8.0)


@pytest.mark.subprocess
@pytest.mark.parametrize(
    ("collective", "expected"),
    [
        (_gathered, X.expand(4, 8)),
        (_listed, X.expand(4, 8)),
        (_scattered, 4 * X[2:4]),
        (lambda x: _scattered(x, dist.ReduceOp.AVG), X[2:4]),
        (lambda x: _scattered(x, dist._make_nccl_premul_sum(0.5)), 2 * X[2:4]),
        (_scattered_list, 4 * X[2:4]),
        (_reduced, 4 * X),
        (lambda x: _reduced(x, dist.ReduceOp.MAX), X),
        (lambda x: _reduced(x.bool(), dist.ReduceOp.SUM), X.bool()),
        (lambda x: _reduced(torch.complex(x, -x)), 4 * torch.complex(X, -X)),
        (_exchanged, X[2:4].repeat(4)),
        (_exchanged_unevenly, X[1:4].repeat(4)),
        (_exchanged_with_others, torch.tensor([2.0, 2, 3, 2, 2, 3, 2, 3])),
        (_exchanged_with_an_owner, torch.tensor([0.0, 1, 2, 0, 0])),
        (_exchanged_list, X[2:4].repeat(4)),
        (lambda x: _broadcast(x, 1), X),
        (lambda x: _broadcast(x, 0), X),
        (lambda x: _from_a_list(x, 1), X[2:4]),
        (lambda x: _from_a_list(x, 0), torch.zeros(2)),
        (lambda x: _to_root(x, 1), 4 * X),
        (lambda x: _to_root(x, 0), X),
        (_gathered_at_root, X.expand(4, 8)),
        (_functional("all_gather_into_tensor", 4), X.repeat(4)),
        (_functional("reduce_scatter_tensor", "avg", 4), X[2:4]),
        (_functional("all_reduce", "sum"), 4 * X),
        (_out_form("all_gather_into_tensor_out", 32), X.repeat(4)),
        (_out_form("reduce_scatter_tensor_out", 2, "sum"), 4 * X[2:4]),
        (_objects, torch.tensor([1, 3, 11, 4, 4, 4, 4])),
        (_coalesced, torch.stack([X.expand(4, 8), X.expand(4, 8) + 1])),
        (_functional_coalesced("all_gather_into_tensor_coalesced", 4), torch.stack([X.repeat(4), -X.repeat(4)])),
        (_functional_coalesced("reduce_scatter_tensor_coalesced", "sum", 4), torch.stack([4 * X[2:4], -4 * X[2:4]])),
        (_functional_coalesced("all_reduce_coalesced", "sum"), torch.stack([4 * X, -4 * X])),
        (_dtensors, torch.cat([X[2:4].repeat(4), X.view(2, 4)[:, 1:2].expand(2, 4).flatten(), 4 * X, X[5].repeat(4)])),
    ],
)
def test_each_collective_gives_what_a_world_of_clones_would(
    rank_one_of_four: rehearsal.World, collective: Callable[[Tensor], Tensor], expected: Tensor
) -> None:
    torch.testing.assert_close(collective(X.clone()), expected, rtol=0, atol=0)
    assert rank_one_of_four.collectives()


@pytest.mark.parametrize(
    ("collective", "kind", "nbytes"),
    [
        (_gathered, "all_gather", 128),
        (_listed, "all_gather", 128),
        (_scattered, "reduce_scatter", 32),
        (_scattered_list, "reduce_scatter", 32),
        (_reduced, "all_reduce", 32),
        (_exchanged, "all_to_all", 32),
        (_exchanged_list, "all_to_all", 32),
        (lambda x: dist.all_to_all_single(torch.empty(12), x, [3] * 4, [2] * 4), "all_to_all", 48),
        (lambda x: _broadcast(x, 0), "broadcast", 32),
        (lambda x: _from_a_list(x, 1), "broadcast", 32),
        (lambda x: _to_root(x, 0), "broadcast", 32),
        (_gathered_at_root, "broadcast", 128),
        (lambda _: dist.barrier(), "broadcast", 0),
        (_coalesced, "all_gather", 256),
        (lambda _: dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0)), "reduce_scatter", 0),
    ],
)
def test_each_collective_costs_what_its_bytes_cost(
    rank_one_of_four: rehearsal.World, collective: Callable[[Tensor], Any], kind: str, nbytes: int
) -> None:
    collective(X.clone())
    (found,) = rank_one_of_four.collectives()
    assert (found.kind, found.nbytes, found.ranks) == (kind, nbytes, (0, 1, 2, 3))
    seconds = FAST.seconds(kind, found.ranks, nbytes)
    assert found.finished - found.started == pytest.approx(seconds, abs=1e-9)


def test_a_future_of_a_world_that_has_ended_does_not_hang() -> None:
    with rehearsal.world(4, flat("an hour", 4, alpha_s=3600, bandwidth_bytes_per_s=1e9)) as world:
        future = dist.all_reduce(X.clone(), async_op=True).get_future()
        world.forget()
        group = dist.group.WORLD
    with pytest.raises(RuntimeError, match="this world has ended"):
        group.allreduce([X.clone()])
    deadline = time.monotonic() + 5
    while not future.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert future.done()


@pytest.mark.usefixtures("rank_one_of_four")
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8],
)
def test_sums_of_every_dtype(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, 1.0, 3.0, 30.0] + ([-2.5, 0.1, 1e-6] if dtype.is_floating_point else []))
    x = values.to(dtype)
    torch.testing.assert_close(_reduced(x.clone()), x * 4, rtol=0, atol=0)
    if dtype.is_floating_point:
        special = torch.tensor([float("nan"), float("inf"), torch.finfo(dtype).max, 1 + torch.finfo(dtype).eps]).to(
            dtype
        )
        torch.testing.assert_close(_reduced(special.clone()), special * 4, rtol=0, atol=0, equal_nan=True)
        dist.all_reduce(third := x.clone(), dist._make_nccl_premul_sum(1 / 12))
        torch.testing.assert_close(third, x * (4 / 12), rtol=0, atol=0)


@pytest.mark.usefixtures("rank_one_of_four")
def test_collectives_that_a_rehearsal_cannot_carry_are_named() -> None:
    for words, call in {
        "send and recv": lambda: dist.send(X, 0),
        "recv": lambda: dist.recv(X, 0),
        "broadcast_object_list from rank 0": lambda: dist.broadcast_object_list([None], 0),
        "scatter_object_list from rank 0": lambda: dist.scatter_object_list([None], None, 0),
        "all_gather: from torch.float32 on cpu to torch.bfloat16": lambda: dist.all_gather_into_tensor(
            torch.empty(32).bfloat16(), X
        ),
        "all_gather over 4 ranks: a list of 3": lambda: dist.all_gather([torch.empty(8)] * 3, X),
        "all_gather over 4 ranks: 4 elements where 8": lambda: dist.all_gather([torch.empty(4)] * 4, X),
        "reduce_scatter over 4 ranks: 1 elements where 8": lambda: dist.reduce_scatter(torch.empty(1), [X] * 4),
        "reduce_scatter over 4 ranks: a list of 2": lambda: dist.reduce_scatter(X.clone(), [X] * 2),
        "scatter over 4 ranks: 1 elements where 8": lambda: dist.scatter(torch.empty(1), [X] * 4, 1),
        "all_to_all over 4 ranks: 10 rows": lambda: dist.all_to_all_single(torch.empty(10), torch.empty(10)),
        "reduce_scatter: expected contiguous": lambda: dist.reduce_scatter_tensor(
            torch.empty(2), torch.zeros(8, 2)[:, 0]
        ),
        "a reduction by": lambda: dist.all_reduce(X.clone(), dist.ReduceOp.PRODUCT),
        "sums of torch.float8_e4m3fn": lambda: dist.all_reduce(torch.zeros(4).to(torch.float8_e4m3fn)),
        "expected contiguous": lambda: dist.all_reduce(torch.zeros(4, 4)[:, 1]),
        "all_gather over 4 ranks: 8 elements where 32 belong": lambda: dist.all_gather_into_tensor(torch.empty(8), X),
    }.items():
        with pytest.raises((ValueError, NotImplementedError, RuntimeError), match=words):
            call()


def test_worlds_that_cannot_be_are_named() -> None:
    worlds: dict[str, dict[str, Any]] = {
        "ranks: expected a positive number, found 0": {"ranks": 0},
        "rank: 4 is outside of a world of 4 ranks": {"ranks": 4, "rank": 4},
        "rank: -1 is outside": {"ranks": 4, "rank": -1},
        "ranks: 9, but network 'fast' has 8": {"ranks": 9},
        "unknown network 'fst'": {"ranks": 4, "network": "fst"},
    }
    for words, arguments in worlds.items():
        with pytest.raises(ValueError, match=words), rehearsal.world(**{"network": FAST, **arguments}):
            pass
    assert not dist.is_initialized()


def test_a_rehearsed_world_is_made_by_torchs_init_process_group() -> None:
    dist.init_process_group("rehearsal", rank=2, world_size=4, store=dist.HashStore(), pg_options="cpu-bandwidth")
    try:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (2, 4, "rehearsal")
        torch.testing.assert_close(_scattered(X.clone()), 4 * X[4:6])
        assert dist.new_group([1, 2]).size() == 2
    finally:
        dist.destroy_process_group()


def test_data_moves_when_the_time_is_over_and_not_before() -> None:
    """The bug of a buffer that is used again, or read, too early: a wrong number here as on a real network."""
    with rehearsal.world(4, SLOW):
        source, out = torch.ones(8), torch.zeros(32)
        work = dist.all_gather_into_tensor(out, source, async_op=True)
        assert not work.is_completed()
        assert out.sum() == 0, "read too early: not there yet"
        source.fill_(5)  # reused too early
        work.wait()
        assert work.is_completed()
        assert out.sum() == 5 * 32, "the gather has read what was written over its input"


def test_a_tensor_that_is_dropped_before_its_collective_ends_is_kept() -> None:
    with rehearsal.world(4, SLOW) as world:
        out = torch.zeros(4 * 1000)
        dist.all_gather_into_tensor(out, torch.ones(1000), async_op=True)
        world.forget()
        torch.zeros(1000)  # would get the memory of the first
        time.sleep(0.1)
        assert out.sum() == 4000


def test_collectives_of_a_group_go_one_after_the_other_and_of_two_groups_side_by_side() -> None:
    with rehearsal.world(4, SLOW) as world:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        groups = [mesh.get_group("a"), mesh.get_group("a"), mesh.get_group("b")]
        assert [groups[0].ranks, groups[2].ranks] == [(0, 2), (0, 1)]
        world.forget()
        works = [dist.all_reduce(X.clone(), group=group, async_op=True) for group in groups]
        for work in works:
            work.wait()
        first, second, other = world.collectives()
    assert second.started == first.finished
    assert other.started == other.issued < first.finished
    for collective in (first, second, other):
        assert collective.finished - collective.started == pytest.approx(SLOW.seconds("all_reduce", range(2), 32))


def test_the_record_says_what_how_much_and_for_which_parameters() -> None:
    with rehearsal.world(4, FAST) as world:
        model = simple_fsdp(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4, bias=False)))
        world.name_parameters(model)
        model(torch.ones(2, 8)).sum().backward()
        found = [(c.kind, c.nbytes, c.fqns, c.ranks) for c in world.collectives()]
        world.forget()
        assert world.collectives() == []
    everybody = (0, 1, 2, 3)
    gathers = [("0.weight", 256), ("0.bias", 32), ("1.weight", 128)]
    for fqn, nbytes in gathers:
        assert ("all_gather", nbytes, (fqn,), everybody) in found
    assert sum(nbytes for kind, nbytes, _, _ in found if kind == "reduce_scatter") == 256 + 32 + 128


def test_python_being_busy_does_not_hold_up_the_network() -> None:
    """A kernel that keeps Python's lock, as those of Inductor do, must not delay a collective."""
    with rehearsal.world(4, SLOW) as world:
        work = dist.all_gather_into_tensor(torch.zeros(32), torch.ones(8), async_op=True)
        ctypes.PyDLL(None).usleep(1_000_000)
        assert work.is_completed()
        work.wait()
        collective = world.collectives()[0]
    assert collective.moved < collective.issued + 0.9
    assert collective.blocked == 0


def _busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_exposed_time_is_that_of_the_schedule_by_hand() -> None:
    """Compute of 5 x 20 ms, gathers of 50 ms on two channels, awaited at 40, 70 and 90 ms, done at 50, 70 and 100 ms.

    A fourth gather, of half a second, is awaited at once. When compute waits depends on this machine. When a
    collective is done follows from its issue, and a wait lasts until its own collective is done.
    """
    network = flat("50 ms", 8, alpha_s=0.05, bandwidth_bytes_per_s=1e12)
    with rehearsal.world(4, network) as world:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        groups = [mesh.get_group("a"), mesh.get_group("b")]
        world.forget()
        out, source = torch.empty(2 * 8), torch.ones(8)
        pending = [dist.all_gather_into_tensor(out, source, groups[0], async_op=True)]
        _busy(0.02)
        pending.append(dist.all_gather_into_tensor(torch.empty(2 * 8), source, groups[0], async_op=True))
        pending.append(dist.all_gather_into_tensor(torch.empty(2 * 8), source, groups[1], async_op=True))
        _busy(0.02)
        returned = [0.0, 0.0, 0.0]
        for i in (0, 2, 1):
            pending[i].wait()
            returned[i] = time.perf_counter()
            _busy(0.02)
        world.network = flat("half a second", 8, alpha_s=0.5, bandwidth_bytes_per_s=1e12)
        pending.append(dist.all_gather_into_tensor(out, source, groups[0], async_op=True))
        pending[3].wait()
        returned.append(time.perf_counter())
        first, second, other, at_once = world.collectives()
    seconds = network.seconds("all_gather", [0, 1], 2 * 8 * 4)
    assert first.finished == pytest.approx(first.issued + seconds, abs=1e-6)
    assert second.finished == pytest.approx(max(second.issued, first.finished) + seconds, abs=1e-6)
    assert other.finished == pytest.approx(other.issued + seconds, abs=1e-6)
    for one, end in zip((first, second, other, at_once), returned, strict=True):
        assert one.waited is not None
        assert max(one.waited, one.finished) <= end + 1e-6
        assert 0 <= one.blocked <= end - one.waited
    assert at_once.blocked > seconds / 2


def test_a_wait_does_not_last_until_the_next_of_its_channel_is_done() -> None:
    with rehearsal.world(4, FAST) as world:
        first = dist.all_reduce(X.clone(), async_op=True)
        world.network = flat("an hour", 4, alpha_s=3600, bandwidth_bytes_per_s=1e9)
        second = dist.all_reduce(X.clone(), async_op=True)
        waiting = threading.Thread(target=first.wait, daemon=True)
        waiting.start()
        waiting.join(60)
        assert not waiting.is_alive()
        assert not second.is_completed()
        world.forget()


def _train_fsdp2(policy: MixedPrecisionPolicy) -> Any:
    model = fsdp2(tiny_llama(), policy)
    return train(model, model, 4, 0)


def _train_ddp() -> Any:
    model = tiny_llama()
    return train(model, DistributedDataParallel(model, bucket_cap_mb=0.01), 4, 0)


def _train_fsdp2_fp32() -> Any:
    return _train_fsdp2(MixedPrecisionPolicy())


def _train_fsdp2_bf16() -> Any:
    return _train_fsdp2(BF16)


@pytest.mark.parametrize("fn", [_train_fsdp2_fp32, _train_fsdp2_bf16, _train_ddp])
def test_training_is_bitwise_that_of_a_real_world_of_clones(fn: Callable[[], Any], tmp_path: Path) -> None:
    expected = run_as_clones(fn, rank=1, size=2, folder=tmp_path)
    with rehearsal.world(2, FAST, rank=1):
        torch.testing.assert_close(fn(), expected, rtol=0, atol=0)


@pytest.mark.compile
@pytest.mark.parametrize("lowering", ["eager", "aot_eager", "inductor"])
def test_slow_and_free_networks_give_the_same_bits(lowering: str) -> None:
    """Late data movement: nothing that runs here uses a buffer before its collective is through."""
    results = []
    for network in (None, flat("2 ms", 4, alpha_s=0.002, bandwidth_bytes_per_s=1e9)):
        with rehearsal.world(4, network):
            model: Any = simple_fsdp(tiny_llama(), mp_policy=BF16)
            options = LOWERINGS[lowering]
            forward = torch.compile(model, backend="simplefsdp", options=options) if options else model
            results.append(train(model, forward, 3, 0))
        torch._dynamo.reset()
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_batches_are_not_all_the_same() -> None:
    """Or the comparisons above would compare less than they seem to."""
    assert not torch.equal(batch(0, 0)[0], batch(1, 0)[0])
