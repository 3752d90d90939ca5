"""Why a bucket is exposed, and closed where it is: schedules worked out by hand."""

import math

import pytest

from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction
from inductor_passes.scheduling.issue_points import Schedule, ScheduledBucket
from inductor_passes.scheduling.replay import replay
from simplefsdp.analysis.diagnosis import diagnose

KIND = CollectiveKind("shard", alpha_s=1.0, s_per_byte=0.1)
"""A collective of 10 bytes takes 2 seconds, one of 20 takes 3."""


def forward(*gathers: Gather, seconds: float = 3.0) -> CostGraph:
    steps = 1 + max(gather.first_use_slot for gather in gathers)
    return CostGraph((seconds,) * steps, (0,) * steps, (0,) * (steps + 1), gathers, ())


def backward(*ready_slots: int, seconds: float = 3.0, kind: CollectiveKind = KIND) -> CostGraph:
    """A reduction of 10 bytes for each gradient."""
    steps = max(ready_slots)
    reductions = tuple(Reduction(f"w{i}", kind, 10, slot, 1) for i, slot in enumerate(ready_slots))
    return CostGraph((seconds,) * steps, (0,) * steps, (0,) * (steps + 1), (), reductions)


A, B, C = (Gather(name, KIND, 10, first_use, first_use) for first_use, name in enumerate("abc"))


def test_the_first_gather_has_nothing_before_it() -> None:
    (first,), _ = diagnose(forward(A), Schedule((ScheduledBucket((0,), 0, 0),), ()), math.inf)
    assert (first.bound, first.exposed) == ("dependency", 2.0)
    assert first.where == "there is nothing before it"
    assert first.closed == "it is the last"
    assert [span.fqns for span in first.spans] == [("a",)]


def test_a_collective_that_is_done_in_time_is_hidden() -> None:
    (_, second), _ = diagnose(
        forward(A, B), Schedule((ScheduledBucket((0,), 0, 0), ScheduledBucket((1,), 0, 1)), ()), math.inf
    )
    assert (second.bound, second.exposed) == ("nothing", 0.0)
    assert second.where == "in time, by 1000.00 ms"  # issued at 0, started at 2, there at 4, needed at 5


def test_a_busy_process_group() -> None:
    (_, second), _ = diagnose(
        forward(A, B, seconds=1.0), Schedule((ScheduledBucket((0,), 0, 0), ScheduledBucket((1,), 0, 1)), ()), math.inf
    )
    assert (second.bound, second.exposed) == ("channel", 1.0)  # there at 4, needed at 3
    assert second.where == "its process group is busy for 2000.00 ms when it is issued"


def test_memory_or_the_plan() -> None:
    graph = forward(A, B, C)
    late = Schedule(tuple(ScheduledBucket((i,), i, i) for i in range(3)), ())
    assert replay(graph, late).peak == 10
    for memory_limit, bound, where in (
        (10, "memory", "issued earlier, the step would be 2000.00 ms shorter and 0.00 MiB too large"),
        (20, "plan", "issued earlier, the step would be 2000.00 ms shorter"),
    ):
        gathers, _ = diagnose(graph, late, memory_limit)
        assert [one.bound for one in gathers] == ["dependency", bound, bound]
        assert gathers[1].where == where
        assert [one.exposed for one in gathers] == [2.0, 2.0, 2.0]


def test_earlier_that_is_no_faster() -> None:
    slow = KIND._replace(alpha_s=2.0, name="slow")  # of another dtype, and takes as long as a step
    graph = forward(A._replace(kind=CollectiveKind("shard", 0.0, 0.0)), B, C._replace(kind=slow))
    gathers, _ = diagnose(
        graph,
        Schedule((ScheduledBucket((0,), 0, 0), ScheduledBucket((2,), 0, 2), ScheduledBucket((1,), 1, 1)), ()),
        math.inf,
    )
    assert [one.bound for one in gathers] == ["nothing", "nothing", "compute"]
    assert gathers[2].where == "issued earlier, the step would be as long"
    assert gathers[1].closed == "the next is of another process group or dtype"


def test_diagnosis_says_what_merging_with_the_next_bucket_would_do() -> None:
    graph = forward(A, B, C)
    schedule = Schedule((ScheduledBucket((0,), 0, 0), ScheduledBucket((1,), 0, 1), ScheduledBucket((2,), 0, 2)), ())
    assert [one.closed for one in diagnose(graph, schedule, math.inf)[0]] == [
        "with the next, 1000.00 ms longer",  # 20 bytes are there after 3 seconds, not 2
        "with the next, as long",
        "it is the last",
    ]
    late = Schedule(tuple(ScheduledBucket((i,), i, i) for i in range(3)), ())
    closed = [one.closed for one in diagnose(graph, late, 10)[0]]
    assert closed[:2] == ["with the next, 0.00 MiB too large"] * 2
    assert diagnose(graph, late, 40)[0][0].closed == "with the next, 1000.00 ms shorter"  # unpacked, it is there twice


def test_reductions_are_awaited_later_or_not() -> None:
    graph = backward(1, 2, 3)
    at_once = Schedule((), tuple(ScheduledBucket((i,), i + 1, i + 1) for i in range(3)))
    for memory_limit, bound in ((math.inf, "plan"), (replay(graph, at_once).peak, "memory")):
        _, reductions = diagnose(graph, at_once, memory_limit)
        assert [one.bound for one in reductions] == [bound, bound, "dependency"]
        assert [one.exposed for one in reductions] == [2.0, 2.0, 2.0]
        assert reductions[0].where.startswith("awaited later, the step would be 2000.00 ms shorter")
    at_the_end = Schedule((), tuple(ScheduledBucket((i,), i + 1, 4) for i in range(3)))
    _, reductions = diagnose(graph, at_the_end, math.inf)
    assert [one.bound for one in reductions] == ["nothing", "nothing", "dependency"]
    assert reductions[2].where == "there is nothing behind it"
    assert [one.closed for one in reductions][1:] == ["with the next, 1000.00 ms longer", "it is the last"]


def test_an_all_reduce_that_follows_belongs_to_its_bucket() -> None:
    all_reduce = CollectiveKind("replicate", alpha_s=4.0, s_per_byte=0.0)
    graph = backward(1, kind=KIND._replace(all_reduce_after=all_reduce))
    _, (one,) = diagnose(graph, Schedule((), (ScheduledBucket((0,), 1, 2, 2),)), math.inf)
    assert [span.what for span in one.spans] == ["reduce", "all-reduce"]
    assert one.exposed == pytest.approx(6.0)
