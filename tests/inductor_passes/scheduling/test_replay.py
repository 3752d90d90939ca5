"""Predicted times and memory of schedules, against ones worked out by hand."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from inductor_passes.order import order
from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction
from inductor_passes.scheduling.issue_points import Bucket, Schedule, ScheduledBucket, schedule_of
from inductor_passes.scheduling.order_items import OrderItem
from inductor_passes.scheduling.replay import CollectiveSpan, Replay, Timeline, lower_bound, replay
from inductor_passes.scheduling.search import least_memory_schedule
from tests.inductor_passes.scheduling.chains import cost_graphs

SLOW = CollectiveKind("shard", alpha_s=1.0, s_per_byte=0.1)
"""A collective of 10 bytes takes 2 seconds."""


def forward(kind: CollectiveKind = SLOW) -> CostGraph:
    """Three steps of 3 seconds; each reads a weight of 10 bytes, and the last the first one too."""
    gathers = (Gather("a", kind, 10, 0, 2), Gather("b", kind, 10, 1, 1), Gather("c", kind, 10, 2, 3))
    return CostGraph((3.0, 3.0, 3.0), (100, 200, 300), (50, 60, 70, 80), gathers, ())


def backward(kind: CollectiveKind = SLOW) -> CostGraph:
    """Three steps of 3 seconds; each makes a gradient of 10 bytes, whose shard has 1."""
    reductions = tuple(Reduction(fqn, kind, 10, i + 1, 1) for i, fqn in enumerate("cba"))
    return CostGraph((3.0, 3.0, 3.0), (0, 0, 0), (0, 0, 0, 0), (), reductions)


def test_a_collective_awaited_where_it_is_issued_is_exposed() -> None:
    timeline = replay(forward(), least_memory_schedule(forward()).schedule)
    assert (timeline.seconds, timeline.exposed) == pytest.approx((15.0, 6.0))
    assert timeline.starts == pytest.approx((2.0, 7.0, 12.0, 15.0))
    # Weights: a all the time, b in its own step, c in its own and afterwards.
    assert timeline.memory == (100 + 10, 200 + 20, 300 + 20, 80 + 10)
    assert timeline.peak == 320


def test_a_gather_that_is_issued_ahead_is_hidden_and_takes_memory() -> None:
    schedule = Schedule((ScheduledBucket((0,), 0, 0), ScheduledBucket((1,), 0, 1), ScheduledBucket((2,), 1, 2)), ())
    timeline = replay(forward(), schedule)
    assert (timeline.seconds, timeline.exposed) == pytest.approx((11.0, 2.0))
    assert timeline.memory == (100 + 20, 200 + 30, 300 + 20, 80 + 10)
    one, other, _ = timeline.spans
    assert (one.issued, one.started, one.finished, one.awaited) == pytest.approx((0.0, 0.0, 2.0, 0.0))
    assert (other.issued, other.started, other.finished, other.awaited) == pytest.approx((0.0, 2.0, 4.0, 5.0))


def test_an_exchange_begins_when_the_collectives_under_way_have_ended() -> None:
    at_once = Schedule(tuple(ScheduledBucket((i,), 0, i) for i in range(3)), ())
    # Gathers end after 2, 4 and 6 seconds; the first step ends after 5.
    timeline = replay(forward()._replace(exchanges=(1,)), at_once)
    assert timeline.ends == pytest.approx((5.0, 9.0, 12.0))
    assert timeline.exposed == pytest.approx(2.0 + 1.0)


def test_compute_is_slower_while_a_collective_is_under_way() -> None:
    at_once = Schedule(tuple(ScheduledBucket((i,), 0, i) for i in range(3)), ())
    # Gathers end after 2, 4 and 6 seconds. The first step does 2 of its 3 seconds in the 4 that are left then.
    all_steps = forward()._replace(contention=(0.5, 0.5, 0.5))
    timeline = replay(all_steps, at_once)
    assert timeline.starts == pytest.approx((2.0, 7.0, 10.0, 13.0))
    assert timeline.ends == pytest.approx((7.0, 10.0, 13.0))
    # Where the first step loses nothing, the second one does half a second in the one that is left.
    one_step = forward()._replace(contention=(0.0, 0.5, 0.0))
    assert replay(one_step, at_once).starts == pytest.approx((2.0, 5.0, 8.5, 11.5))
    # Awaited where they are issued, collectives are beside no compute.
    assert least_memory_schedule(all_steps).predicted_s == pytest.approx(15.0)


def test_copies_are_slower_while_a_collective_is_under_way() -> None:
    kind = SLOW._replace(copy_s_per_byte=0.05, contention=0.5, shard=0.1)
    bucket, alone = ScheduledBucket((0, 1), 0, 0), ScheduledBucket((2,), 0, 2)
    # 0.1 seconds of packing, 3 of the first gather; unpacking takes 2, beside the second gather.
    timeline = replay(forward(kind), Schedule((bucket, alone), ()))
    assert timeline.starts[0] == pytest.approx(0.1 + 3.0 + 2.0)
    apart = replay(forward(kind), Schedule((bucket, alone._replace(issue_slot=2)), ()))
    assert apart.starts[0] == pytest.approx(0.1 + 3.0 + 1.0)


def test_a_bucket_costs_one_alpha_and_a_copy_that_takes_its_bytes_again() -> None:
    kind = SLOW._replace(copy_s_per_byte=0.01, issue_s=0.5)
    timeline = replay(forward(kind), Schedule((ScheduledBucket((0, 1, 2), 0, 0),), ()))
    # 0.5 to issue, 1 + 30 bytes on the way, 0.3 to unpack, 9 of compute.
    assert (timeline.seconds, timeline.exposed) == pytest.approx((0.5 + 4.0 + 0.3 + 9.0, 4.0))
    assert timeline.memory == (max(50 + 60, 100 + 30), 200 + 30, 300 + 20, 80 + 10)


def test_packing_and_casting_shards_takes_time_and_a_copy_of_one_memory_until_its_gather_is_awaited() -> None:
    kind = SLOW._replace(copy_s_per_byte=0.1, shard=0.5)
    a, b, c = forward(kind).gathers
    graph = forward()._replace(gathers=(a, b, c._replace(prepared=7, held=7)))
    timeline = replay(graph, Schedule((ScheduledBucket((0, 1), 0, 1), ScheduledBucket((2,), 1, 2)), ()))
    # Half of both weights is packed, 10 bytes in a second; 20 are unpacked in two. What is made of c's shard takes 0.7.
    assert timeline.starts == pytest.approx((1.0, 4.0 + 0.7 + 2.0, 9.7, 12.7))
    # They are packed where the gather receives them; of c's shard there is a copy besides.
    assert timeline.memory == (100 + 20, 200 + 20 + 10 + 7, 300 + 20, 80 + 10)
    one, other = timeline.spans
    assert (one.issued, one.finished, one.held) == pytest.approx((1.0, 4.0, 0))
    assert (other.issued, other.finished, other.held) == pytest.approx((4.7, 6.7, 7))


def test_collectives_of_one_group_follow_each_other_those_of_two_do_not() -> None:
    both = Schedule((ScheduledBucket((0,), 0, 0), ScheduledBucket((1,), 0, 1), ScheduledBucket((2,), 0, 2)), ())
    a, b, c = forward().gathers
    for other, finished in ((SLOW, [2.0, 4.0, 6.0]), (SLOW._replace(channel="other"), [2.0, 2.0, 4.0])):
        graph = forward()._replace(gathers=(a, b._replace(kind=other), c))
        assert [span.finished for span in replay(graph, both).spans] == pytest.approx(finished)


def test_members_of_two_kinds_are_two_collectives() -> None:
    a, b, c = forward().gathers
    graph = forward()._replace(gathers=(a, b._replace(kind=SLOW._replace(name="bf16")), c))
    spans = replay(graph, Schedule((ScheduledBucket((0, 1, 2), 0, 0),), ())).spans
    assert [span.fqns for span in spans] == [("a", "c"), ("b",)]


def test_compute_lost_for_each_byte_is_counted_at_the_issue() -> None:
    timeline = replay(backward(SLOW._replace(issue_s_per_byte=0.05)), Schedule((), (ScheduledBucket((0, 1, 2), 3, 3),)))
    assert timeline.seconds == pytest.approx(9.0 + 30 * 0.05 + 4.0)


def test_gradients_take_memory_until_they_are_reduced() -> None:
    late = replay(backward(), Schedule((), (ScheduledBucket((0, 1, 2), 3, 3),)))
    assert late.memory == (10, 20, 30, 30 + 30)  # packing takes as many again; there are 3 of shards only then
    assert late.seconds == pytest.approx(9.0 + 4.0)
    soon = replay(
        backward(),
        Schedule((), (ScheduledBucket((0,), 1, 2), ScheduledBucket((1,), 2, 3), ScheduledBucket((2,), 3, 3))),
    )
    assert soon.memory == (10, 10 + 1 + 10, 10 + 2 + 10, 3 + 10)
    assert soon.seconds == pytest.approx(9.0 + 2.0)
    at_once = replay(backward(), least_memory_schedule(backward()).schedule)
    assert at_once.memory == (10, 1 + 10, 2 + 10, 3 + 10)
    assert at_once.exposed == pytest.approx(6.0)


def test_a_gradient_that_is_cast_takes_its_own_bytes_until_its_reduction_is_issued() -> None:
    graph = backward()
    cast = tuple(reduction._replace(copied_from=4) for reduction in graph.reductions)
    graph = graph._replace(reductions=cast, live_bytes_in_step=(4, 4, 4))  # made in the step, complete behind it
    late = replay(graph, Schedule((), (ScheduledBucket((0, 1, 2), 3, 3),)))
    assert late.memory == (4, 4 + 4, 4 + 8, 12 + 30)
    at_once = replay(graph, least_memory_schedule(graph).schedule)
    assert at_once.memory == (4, 4 + 10, 1 + 4 + 10, 2 + 4 + 10)
    elsewhere = graph._replace(reductions=tuple(reduction._replace(copied_from=0) for reduction in cast))
    assert replay(elsewhere, Schedule((), (ScheduledBucket((0, 1, 2), 3, 3),))).memory == (4, 4, 4, 30 + 3)


def test_an_all_reduce_works_in_the_memory_of_the_gradient_or_of_the_copy_of_several() -> None:
    graph = backward()
    graph = graph._replace(reductions=tuple(each._replace(result=each.nbytes) for each in graph.reductions))
    alone = Schedule((), (ScheduledBucket((0,), 1, 2), ScheduledBucket((1,), 2, 3), ScheduledBucket((2,), 3, 3)))
    assert replay(graph, alone).memory == (10, 20, 30, 30)
    together = Schedule((), (ScheduledBucket((0, 1, 2), 3, 3),))
    assert replay(graph, together).memory == (10, 20, 30, 30 + 30)


def test_an_all_reduce_follows_where_the_schedule_says() -> None:
    kind = SLOW._replace(all_reduce_after=CollectiveKind("replicas", alpha_s=0.5, s_per_byte=0.05))
    graph = backward(kind)
    spans = replay(graph, Schedule((), (ScheduledBucket((0,), 1, 3, 2), ScheduledBucket((1, 2), 3, 3, 3)))).spans
    assert [(span.kind.channel, span.fqns) for span in spans] == [
        ("shard", ("c",)),
        ("replicas", ("c",)),
        ("shard", ("b", "a")),
        ("replicas", ("b", "a")),
    ]
    assert [(span.issued, span.finished) for span in spans] == [
        pytest.approx((3.0, 5.0)),
        pytest.approx((6.0, 7.0)),
        pytest.approx((9.0, 12.0)),
        pytest.approx((12.0, 13.5)),
    ]


def test_what_a_reduce_scatter_read_is_free_when_its_all_reduce_is_issued() -> None:
    graph = backward(SLOW._replace(all_reduce_after=CollectiveKind("replicas", alpha_s=0.5, s_per_byte=0.05)))
    schedule = Schedule(
        (), (ScheduledBucket((0,), 1, 4, 2), ScheduledBucket((1,), 2, 4, 3), ScheduledBucket((2,), 3, 4, 3))
    )
    # A gradient from the step that makes it on, until its reduce-scatter is awaited; and shards.
    assert replay(graph, schedule).memory == (10, 10 + 1 + 10, 1 + 10 + 1 + 10, 3 + 10)


def test_buckets_have_the_slots_in_which_order_puts_them() -> None:
    graph = forward()._replace(reductions=backward().reductions)
    gathers = [Bucket(("a",), None, "a"), Bucket(("c", "b"), "b", "b", position=1), Bucket(("elsewhere",), None, None)]
    reductions = [
        Bucket(("c",), "c", "a"),
        Bucket(("b",), None, None, position=1),
        Bucket(("a",), "b", "a", position=2),
    ]
    schedule = schedule_of(graph, gathers, reductions)
    assert schedule.gathers == (
        ScheduledBucket((0,), 0, 0, form="packed"),
        ScheduledBucket((1, 2), 1, 1, form="packed"),
    )
    assert [scheduled[:3] for scheduled in schedule.reductions] == [((0,), 1, 3), ((1,), 2, 4), ((2,), 3, 3)]


@st.composite
def planned(draw: st.DrawFn) -> tuple[CostGraph, list[Bucket], list[Bucket]]:
    """A graph and a plan for it, as ``manual_plan`` and the planners make them: issued in order, points among what is
    issued later."""
    graph = draw(cost_graphs(5, 5, channels=2))
    gathers: list[Bucket] = []
    number = 0
    for part in _parts(draw, graph.gathers):
        number = draw(st.integers(number, graph.gathers.index(part[0])))
        at_the_start = number == 0 and all(bucket.issue is None for bucket in gathers) and draw(st.booleans())
        issue = None if at_the_start else graph.gathers[number].fqn
        gathers.append(Bucket(tuple(g.fqn for g in part), issue, part[0].fqn, position=len(gathers)))
    reductions: list[Bucket] = []
    parts = _parts(draw, graph.reductions)
    for place, reduced in enumerate(parts):
        later = [part[0].fqn for part in parts[place:]]
        points = sorted(draw(st.tuples(*[st.integers(0, len(later))] * 2)))
        all_reduce_after, wait = [later[i] if i < len(later) else None for i in points]
        issue = draw(st.sampled_from([None, reduced[-1].fqn, graph.reductions[-1].fqn]))
        reductions.append(Bucket(tuple(r.fqn for r in reduced), issue, wait, all_reduce_after, place))
    return graph, gathers, reductions


def _parts(draw: st.DrawFn, members: Sequence[Any]) -> list[list[Any]]:
    numbers = sorted(draw(st.lists(st.integers(0, 2), min_size=len(members), max_size=len(members))))
    return [[members[i] for i, n in enumerate(numbers) if n == number] for number in sorted(set(numbers))]


def ordered(graph: CostGraph, gathers: Sequence[Bucket], reductions: Sequence[Bucket]) -> Timeline:
    """Return the timeline of this graph in the order of ``order``, replayed node by node."""
    items: list[OrderItem] = []
    does: list[Callable[[], object]] = []
    """The action of each item in a replay."""
    run = Replay(graph)
    flights: dict[Any, CollectiveSpan] = {}

    def add(do: Callable[[], object], *needs: int, **of: Any) -> int:
        does.append(do)
        items.append(OrderItem(frozenset(needs), **of))
        return len(items) - 1

    def issue(
        key: object, start: Callable[[tuple[int, ...]], list[CollectiveSpan]], members: tuple[int, ...]
    ) -> Callable[[], object]:
        def do() -> None:
            (flights[key],) = start(members)

        return do

    def wait(key: object, end: Callable[[CollectiveSpan], object]) -> Callable[[], object]:
        return lambda: end(flights[key])

    def hand_on(key: object) -> Callable[[], object]:
        def do() -> None:
            following = run.await_reduction(flights[key])
            assert following is not None
            flights[key] = following

        return do

    def collectives(
        bucket: Bucket, members: Sequence[Any]
    ) -> Iterator[tuple[CollectiveKind, tuple[int, ...], tuple[str, ...]]]:
        mine = [i for i, member in enumerate(members) if member.fqn in bucket.fqns]
        for kind in dict.fromkeys(members[i].kind for i in mine):
            of_kind = tuple(i for i in mine if members[i].kind == kind)
            yield kind, of_kind, tuple(members[i].fqn for i in of_kind)

    weights: dict[str, int] = {}
    for bucket in gathers:
        for _, of_kind, fqns in collectives(bucket, graph.gathers):
            key = ("gather", fqns)
            of = {"fqns": fqns, "bucket": bucket}
            node = add(issue(key, run.issue_gathers, of_kind), reads_inputs=True, kind="gather", **of)
            alone = fqns if len(fqns) == 1 else ()
            node = add(wait(key, run.await_gather), node, kind="gathered", weights=alone, **of)
            parts = {fqn: node if alone else add(lambda: None, node, weights=(fqn,)) for fqn in fqns}
            weights.update(parts)
    steps: list[int] = []
    for step in range(len(graph.seconds)):
        read = [weights[g.fqn] for g in graph.gathers if step in (g.first_use_slot, g.last_use_slot)]
        steps.append(add(run.advance, *read, *steps[-1:], reads_inputs=True))
    for bucket in reductions:
        for kind, of_kind, fqns in collectives(bucket, graph.reductions):
            key = ("reduce", fqns)
            of = {"fqns": fqns, "bucket": bucket}
            made = [(steps[ready - 1] if (ready := graph.reductions[i].ready_slot) else -1) for i in of_kind]
            node = add(
                issue(key, run.issue_reductions, of_kind),
                *(source for source in made if source >= 0),
                kind="reduction",
                gradients=tuple(zip(made, fqns, strict=True)),
                **of,
            )
            if kind.all_reduce_after:
                node = add(hand_on(key), node, kind="reduced", has_all_reduce=True, **of)
                node = add(lambda: None, node, kind="reduction", is_all_reduce_after=True, **of)
            add(
                wait(key, run.await_reduction),
                node,
                kind="reduced",
                is_all_reduce_after=kind.all_reduce_after is not None,
                **of,
            )
    for i in order(items):
        does[i]()
    run.advance()
    return run.timeline()


@given(planned())
@settings(max_examples=300, deadline=None)
def test_a_replay_issues_and_awaits_as_order_does(plan: tuple[CostGraph, list[Bucket], list[Bucket]]) -> None:
    graph, gathers, reductions = plan
    assert replay(graph, schedule_of(graph, gathers, reductions)) == ordered(graph, gathers, reductions)


@given(cost_graphs(4, 4, channels=2))
@settings(max_examples=200, deadline=None)
def test_no_schedule_beats_the_bound(graph: CostGraph) -> None:
    end = len(graph.seconds)
    everything_at_the_start = Schedule(
        tuple(ScheduledBucket((i,), 0, gather.first_use_slot) for i, gather in enumerate(graph.gathers)),
        tuple(ScheduledBucket((i,), reduction.ready_slot, end, end) for i, reduction in enumerate(graph.reductions)),
    )
    one_bucket = Schedule(
        (ScheduledBucket(tuple(range(len(graph.gathers))), 0, graph.gathers[0].first_use_slot),)
        if graph.gathers
        else (),
        (ScheduledBucket(tuple(range(len(graph.reductions))), end, end, end),) if graph.reductions else (),
    )
    for schedule in (least_memory_schedule(graph).schedule, everything_at_the_start, one_bucket):
        assert lower_bound(graph) <= replay(graph, schedule).seconds + 1e-9


def test_the_bound_is_reached_where_nothing_can_be_hidden() -> None:
    both = forward()._replace(reductions=backward().reductions[2:])
    assert lower_bound(forward()) == pytest.approx(2.0 + 9.0)
    assert lower_bound(both) == pytest.approx(2.0 + 9.0 + 2.0)
    fast = forward(CollectiveKind("shard", 0.0, 1e-9))
    assert lower_bound(fast) == pytest.approx(9.0)
    slow = forward(CollectiveKind("shard", 1.0, 10.0))
    assert lower_bound(slow) == pytest.approx(1.0 + 300.0 + 3.0)


def test_a_weight_in_a_wire_format_is_small_until_it_is_decoded() -> None:
    kind = SLOW._replace(s_per_byte=0.02, copy_s_per_byte=0.01, shard=0.5, wire_format="int8", wire=0.2)
    timeline = replay(forward(kind), Schedule((ScheduledBucket((0,), 0, 0), ScheduledBucket((1, 2), 0, 1)), ()))
    # Half of 10 and of 20 bytes are encoded, 10 and 20 bytes decoded; 1.2 and 1.4 s on the way.
    assert timeline.seconds == pytest.approx(0.05 + 0.1 + 9.0 + (1.2 - 0.1) + 0.1 + 0.2)
    # In slot 0: 2 + 4 bytes received, 1 + 2 sent, and the first 10 bytes decoded beside the 2.
    assert timeline.memory[0] == max(50 + 6 + 2 + 10, 100 + 10 + 4 + 2)
    # Then the 4 beside 20 decoded bytes, and the first weight.
    assert timeline.memory[1] == max(60 + 10 + 4 + 20, 200 + 10 + 20)


def test_a_gradient_in_a_wire_format_has_a_buffer_to_send_and_one_to_receive() -> None:
    kind = SLOW._replace(s_per_byte=0.02, copy_s_per_byte=0.01, wire_format="int8", wire=0.2)
    schedule = Schedule((), tuple(ScheduledBucket((i,), i + 1, 4) for i in range(3)))
    timeline = replay(backward(kind), schedule)
    # 10 bytes are encoded in 0.1 s; the last transfer is exposed, and its 2 received bytes are added up in 0.01 s.
    assert timeline.seconds == pytest.approx(9.0 + 3 * 0.1 + 1.2 + 0.01)
    # The gradient of 10 bytes makes room for two buffers of 2 bytes and the reduced shard.
    assert timeline.memory[0] == 10
    assert timeline.memory[1] == 5 + 10
    assert timeline.memory[2] == 10 + 10


def test_of_two_steps_the_second_is_issued_with_the_sums_of_the_first() -> None:
    second = CollectiveKind("net", 1.0, 0.05, copy_s_per_byte=0.005, wire_format="int4", wire=0.1)
    first = SLOW._replace(
        s_per_byte=0.02, copy_s_per_byte=0.01, shard=0.5, wire_format="int8", wire=0.2, all_reduce_after=second
    )
    graph = backward(first)._replace(reductions=backward(first).reductions[:1])
    timeline = replay(graph, Schedule((), (ScheduledBucket((0,), 1, 4, 2),)))
    inside, between = timeline.spans
    # 10 bytes are encoded in 0.1 s behind the first step, and on their way for 1.2 s, behind the second step.
    assert (inside.what, inside.issued, inside.finished, inside.awaited) == ("reduce", 3.1, 4.3, 6.1)
    # 2 bytes are read and added up in 0.01 s, 1 byte's worth of sums encoded in 0.0025 s; then 1.5 s on the way.
    assert (between.what, between.issued, between.finished) == ("between nodes", pytest.approx(6.1125), 7.6125)
    assert timeline.seconds == pytest.approx(9.1125 + 0.0025)
    # The gradient beside the buffer that is sent; buffers of 2 bytes each way and the shard; then, while sums are
    # encoded, also half a byte each way; the shard.
    assert timeline.memory == (10, 10 + 2, 5 + 1, 1)


def test_sums_of_each_replica_are_received_and_added_up() -> None:
    second = CollectiveKind("net", 1.0, 0.05, copy_s_per_byte=0.005, wire_format="int4", wire=0.4, received=3)
    first = SLOW._replace(
        s_per_byte=0.02, copy_s_per_byte=0.01, shard=0.5, wire_format="int8", wire=0.2, all_reduce_after=second
    )
    graph = backward(first)._replace(reductions=backward(first).reductions[:1])
    timeline = replay(graph, Schedule((), (ScheduledBucket((0,), 1, 4, 2),)))
    # Sums are encoded in 0.01 s; three times as many are read in 0.03 s.
    assert timeline.spans[1].issued == pytest.approx(6.1 + 0.01 + 0.01)
    assert timeline.seconds == pytest.approx(9.12 + 0.03)
    # Two buffers of 2 bytes and the shard; then, beside them, 2 bytes sent and 6 received.
    assert timeline.memory[2] == 5 + 2 + 6


def test_a_gradient_takes_no_memory_in_the_slot_before_the_step_that_makes_it() -> None:
    """In the slot 100 bytes are in use; in the step that makes 50 bytes of gradient, 60 besides."""
    reduction = Reduction("a", CollectiveKind("shard", 1.0, 0.0), 50, 1)
    graph = CostGraph((1.0,), (60,), (100, 60), (), (reduction,))
    found = replay(graph, Schedule((), (ScheduledBucket((0,), 1, 1),)))
    assert found.memory == (110, 110)
