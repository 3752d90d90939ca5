"""Buckets are grouped where copies cost more than further members of a group; what cannot be grouped is packed."""

from typing import Any

import pytest

from inductor_passes.scheduling.bucket_form import (
    cheapest_gather_form,
    cheapest_reduction_form,
    with_cheapest_forms,
)
from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction
from inductor_passes.scheduling.issue_points import Bucket, Form, Schedule, ScheduledBucket
from inductor_passes.scheduling.replay import Timeline, replay

KIND = CollectiveKind("shard", alpha_s=1.0, s_per_byte=0.1, copy_s_per_byte=0.01, shard=0.5, member_s=0.1)
"""Three gathers of 10 bytes cost 0.45 seconds of copies packed, and two further members 0.2 seconds grouped."""


def gathers(kind: CollectiveKind = KIND, **changes: Any) -> list[Gather]:
    return [Gather(fqn, kind, 10, 0, 0)._replace(**changes) for fqn in "abc"]


def reductions(*in_place: bool, kind: CollectiveKind = KIND) -> list[Reduction]:
    return [Reduction(fqn, kind, 10, 1, in_place=each) for fqn, each in zip("abc", in_place, strict=True)]


@pytest.mark.parametrize(
    ("members", "form"),
    [
        (gathers(), "grouped"),
        (gathers()[:1], "packed"),
        (gathers(KIND._replace(member_s=None)), "packed"),
        (gathers(KIND._replace(member_s=0.22)), "grouped"),
        (gathers(KIND._replace(member_s=0.23)), "packed"),
        (gathers(KIND._replace(member_s=0.18), prepared=5), "packed"),  # shards are cast, packed or not: 0.3 are saved
        ([*gathers()[:2], gathers(dtype="torch.uint8")[2]], "packed"),
        ([*gathers(), *gathers(KIND._replace(channel="other"), dtype="")], "grouped"),
    ],
)
def test_gathers_are_grouped_where_that_saves_time(members: list[Gather], form: Form) -> None:
    assert cheapest_gather_form(members) == form


@pytest.mark.parametrize(
    ("members", "form"),
    [
        (reductions(True, True, True), "grouped"),
        (reductions(True, True, True, kind=KIND._replace(member_s=0.14)), "grouped"),
        (reductions(True, True, True, kind=KIND._replace(member_s=0.16)), "packed"),
        (reductions(True, True, False, kind=KIND._replace(member_s=0.11)), "packed"),  # 0.2 saved, 0.22 more
        (reductions(False, False, False), "packed"),
        (reductions(True, True, True, kind=KIND._replace(member_s=None)), "packed"),
        (reductions(True, True, True)[:1], "packed"),
    ],
)
def test_reductions_are_grouped_where_that_saves_time(members: list[Reduction], form: Form) -> None:
    assert cheapest_reduction_form(members) == form


def test_the_form_of_a_plans_bucket_is_that_of_the_members_which_the_graph_has() -> None:
    graph = CostGraph((1.0,), (0,), (0, 0), tuple(gathers()), tuple(reductions(True, True, False)))
    gathering = [Bucket(("a", "b", "elsewhere"), None, "a"), Bucket(("c", "elsewhere"), None, "c", position=1)]
    reducing = [Bucket(("a", "b"), "a", None), Bucket(("b", "c"), "c", None, position=1)]
    found = with_cheapest_forms(graph, gathering, reducing)
    assert [[bucket.form for bucket in buckets] for buckets in found] == [["grouped", "packed"], ["grouped", "packed"]]


def replayed(form: Form, *in_place: bool) -> tuple[Timeline, Timeline]:
    """Three gathers that a step of 3 seconds reads, and three reductions of what it makes, awaited at once."""
    kind = KIND._replace(issue_s=0.5)
    forward = CostGraph((3.0,), (100,), (50, 60), tuple(gathers(kind, prepared=2)), ())
    backward = CostGraph((3.0,), (100,), (50, 60), (), tuple(reductions(*in_place, kind=kind)))
    return (
        replay(forward, Schedule((ScheduledBucket((0, 1, 2), 0, 0, form=form),), ())),
        replay(backward, Schedule((), (ScheduledBucket((0, 1, 2), 1, 1, form=form),))),
    )


def test_a_packed_bucket_is_copied_with_its_bytes_once_more_in_memory() -> None:
    gathering, reducing = replayed("packed", True, True, True)
    # 15 bytes are packed, 30 gathered in 1 + 3 seconds, and unpacked.
    assert gathering.seconds == pytest.approx(0.15 + 0.5 + 4.0 + 0.3 + 3.0)
    assert gathering.memory == (max(50 + 15 + 30, 50 + 30 + 30, 100 + 30), 60)
    assert reducing.seconds == pytest.approx(3.0 + 0.3 + 0.5 + 4.0)
    assert reducing.memory == (100 + 30, 60 + 30 + 30)


def test_a_grouped_bucket_is_not_copied_and_each_further_member_takes_time() -> None:
    gathering, reducing = replayed("grouped", True, True, True)
    # Three shards of 2 bytes are cast.
    assert gathering.seconds == pytest.approx(0.06 + 0.5 + 4.0 + 0.2 + 3.0)
    assert gathering.memory == (max(50 + 6 + 30, 100 + 30), 60)
    assert [span.parts for span in gathering.spans] == [3]
    assert reducing.seconds == pytest.approx(3.0 + 0.5 + 4.0 + 0.2)
    assert reducing.memory == (100 + 30, 60 + 30)


def test_reductions_of_a_group_that_are_not_in_place_are_packed_into_one_more_member() -> None:
    _, reducing = replayed("grouped", True, False, False)
    assert reducing.seconds == pytest.approx(3.0 + 0.2 + 0.5 + 4.0 + 0.1)
    assert reducing.memory == (100 + 30, 60 + 30 + 20)
    assert [span.parts for span in reducing.spans] == [2]
