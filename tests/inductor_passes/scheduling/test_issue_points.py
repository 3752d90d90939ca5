"""Issue and wait points are decided in ``issue_points.py`` alone: what is changed there changes everywhere."""

from collections.abc import Iterable, Mapping

import pytest

from inductor_passes.order import order
from inductor_passes.scheduling import issue_points
from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction
from inductor_passes.scheduling.issue_points import (
    Bucket,
    Phase,
    action_key,
    check_points,
    schedule_of,
)
from inductor_passes.scheduling.order_items import OrderItem
from inductor_passes.scheduling.replay import replay
from inductor_passes.scheduling.search import search_schedule

KIND = CollectiveKind("shard", alpha_s=1.0, s_per_byte=0.1)
GRAPH = CostGraph(
    (3.0, 3.0, 3.0),
    (0, 0, 0),
    (0, 0, 0, 0),
    tuple(Gather(fqn, KIND, 10, i, i) for i, fqn in enumerate("abc")),
    tuple(Reduction(fqn, KIND._replace(name="r"), 10, i + 1) for i, fqn in enumerate("xyz")),
)
"""Three steps; each reads a weight and makes a gradient."""
GATHERS = [Bucket(("a",), None, "a"), Bucket(("b",), "a", "b", position=1), Bucket(("c",), "b", "c", position=2)]
REDUCTIONS = [Bucket(("x",), "x", "y"), Bucket(("y",), "y", "z", position=1), Bucket(("z",), "z", None, position=2)]


def items() -> list[OrderItem]:
    """``GRAPH`` with the collectives of ``GATHERS`` and ``REDUCTIONS``, as ``order`` sees it."""
    found: list[OrderItem] = []
    waits = []
    for bucket in GATHERS:
        found.append(OrderItem(frozenset(), True, "gather", bucket.fqns, bucket))
        found.append(
            OrderItem(frozenset({len(found) - 1}), False, "gathered", bucket.fqns, bucket, weights=bucket.fqns)
        )
        waits.append(len(found) - 1)
    steps: list[int] = []
    for wait in waits:
        found.append(OrderItem(frozenset({wait, *steps[-1:]}), True))
        steps.append(len(found) - 1)
    for bucket, step in zip(REDUCTIONS, steps, strict=True):
        gradients = ((step, bucket.fqns[0]),)
        found.append(OrderItem(frozenset({step}), False, "reduction", bucket.fqns, bucket, gradients=gradients))
        found.append(OrderItem(frozenset({len(found) - 1}), False, "reduced", bucket.fqns, bucket))
    return found


def validation() -> str:
    """Return the verdicts of validation on plans for ``GRAPH``, one of them wrong in each kind of point."""
    uses = {"forward": ["a", "b", "c"]}
    said = []
    for gathers, reductions in (
        (GATHERS, REDUCTIONS),
        ([Bucket(("a",), "b", "a")], []),
        ([], [Bucket(("x",), "x", "x"), Bucket(("y",), "y", "x")]),
    ):
        try:
            check_points({"forward": gathers}, uses, reductions)
            said.append("fine")
        except ValueError as error:
            said.append(str(error))
    return "; ".join(said)


def decisions() -> dict[str, object]:
    """Return the decision of each user of ``issue_points`` on ``GRAPH``; an impossible plan is a decision too."""
    found = search_schedule(GRAPH)
    assert found is not None
    try:
        ordered: object = order(items())
    except issue_points.PlanError as error:
        ordered = str(error)
    return {
        "order": ordered,
        "replay": replay(GRAPH, schedule_of(GRAPH, GATHERS, REDUCTIONS)).spans,
        "search": found,
        "validation": validation(),
    }


def changed(before: dict[str, object]) -> set[str]:
    """The users of ``issue_points`` that decide something else than ``before``."""
    after = decisions()
    return {name for name in before if before[name] != after[name]}


def test_a_changed_meaning_of_a_point_changes_order_replay_search_and_validation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = issue_points.point_slots

    def a_slot_later(points: Iterable[str | None], slots: Mapping[str, int]) -> list[int]:
        return [min(slot + 1, max(slots.values())) for slot in right(points, slots)]

    before = decisions()
    monkeypatch.setattr(issue_points, "point_slots", a_slot_later)
    assert changed(before) == {"order", "replay", "search", "validation"}


def test_a_changed_meaning_of_named_reductions_changes_order_replay_and_validation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = decisions()
    monkeypatch.setattr(issue_points, "_named_reductions", lambda buckets: [(0, 0) for _ in buckets])
    assert changed(before) == {"order", "replay", "validation"}


def test_changed_phases_change_order_replay_and_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathers_first(phase: Phase, slot: int, issue_slot: int, position: int) -> issue_points.ActionKey:
        slot, key, *rest = action_key(phase, slot, issue_slot, position)
        return slot, -1 if phase == Phase.GATHER_ISSUE else key, position, rest[-1]

    before = decisions()
    monkeypatch.setattr(issue_points, "action_key", gathers_first)
    assert changed(before) >= {"order", "replay"}
