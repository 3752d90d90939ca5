"""``simplefsdp explain``: what it says of a real report agrees with the plan and the prediction."""

import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings

from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather
from inductor_passes.scheduling.issue_points import Bucket, Form
from simplefsdp import BucketPlan
from simplefsdp.analysis import explanation
from simplefsdp.analysis.explanation import Explanation, explain
from simplefsdp.analysis.prediction import StepCosts
from simplefsdp.cli import main as cli
from simplefsdp.cli.explain import read
from tests.inductor_passes.scheduling.chains import cost_graphs
from tests.simplefsdp.compile.test_plan_step import planned

pytestmark = pytest.mark.usefixtures("one_of_four")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders of a report for each of some plans."""
    from tests.ranks import fake_group

    root = tmp_path_factory.mktemp("reports")
    with fake_group(4, 0):
        for name in ("block", "auto"):
            planned(root / name, name)
        planned(root / "unsharded", "auto", reshard="auto")
    return root


@pytest.fixture(scope="module")
def explained(reports: Path) -> dict[str, Explanation]:
    """The explanation of each report, by name."""
    return {folder.name: next(iter(read(folder).values())) for folder in reports.iterdir()}


def test_a_screen_says_how_a_graph_was_compiled(
    reports: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(reports / "block", tmp_path / "report")
    (folder,) = (tmp_path / "report").iterdir()
    (folder / "first_step.txt").write_text("3.0 s: tracing 1.0 s, partitioning and planning 2.0 s\n")
    (folder / "backward_bodies.txt").write_bytes(b"\xff")
    (folder / "traced_once.txt").unlink()
    lines = printed(capsys, monkeypatch, folder).splitlines()
    assert "  first step   3.0 s: tracing 1.0 s, partitioning and planning 2.0 s" in lines
    assert any(line.startswith("  forward      compiled once: ") for line in lines)
    assert "  backward     backward_bodies.txt cannot be read: UnicodeDecodeError" in lines
    assert not any(line.startswith("  blocks ") for line in lines)


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: Any) -> str:
    monkeypatch.setattr(sys, "argv", ["simplefsdp", "explain", *map(str, args)])
    cli.main()
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["block", "auto", "unsharded"])
def test_an_explanation_agrees_with_the_plan_and_the_prediction(
    reports: Path, explained: dict[str, Explanation], name: str
) -> None:
    found, (folder,) = explained[name], (reports / name).iterdir()
    prediction = json.loads((folder / "prediction.json").read_text())
    assert json.loads(found.prediction.to_json()) == prediction
    assert sum(bucket.exposed_s for bucket in found.buckets) == pytest.approx(prediction["exposed_s"])
    for direction in ("forward", "backward", "reductions"):
        buckets = getattr(found.plan, direction)
        shown = [bucket for bucket in found.buckets if bucket.direction == direction]
        assert sorted(sorted(bucket.parameters) for bucket in shown) == sorted(sorted(b.fqns) for b in buckets)
        assert all(bucket.exposed_s == 0 for bucket in shown if bucket.bound == "nothing")
        assert all(bucket.exposed_s > 0 for bucket in shown if bucket.bound != "nothing")
        assert all(bucket.issued_s <= bucket.started_s < bucket.finished_s for bucket in shown)
    for bucket in found.buckets:
        assert bucket.held_s >= max(bucket.finished_s, bucket.awaited_s) - bucket.issued_s
        assert bucket.nbytes <= bucket.held_bytes <= 2 * bucket.nbytes
        assert 0 <= bucket.hidden_s <= bucket.communication_s <= bucket.hidden_s + bucket.exposed_s + 1e-12
    assert 0 <= found.overhead_s < found.compute_s
    parts = found.compute_s + found.overhead_s + prediction["exposed_s"] + prediction["outside_s"]
    assert parts == pytest.approx(prediction["step_s"])
    assert found.before == sum(len(bucket.parameters) for bucket in found.buckets) > found.collectives
    trace = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    exposed = sum(event["dur"] for event in trace if event.get("cat") == "exposed")
    assert exposed == pytest.approx(1e6 * prediction["exposed_s"])


def test_the_text_has_what_the_json_has(
    reports: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (data,) = json.loads(printed(capsys, monkeypatch, reports / "block", "--json")).values()
    text = printed(capsys, monkeypatch, reports / "block", "--all")
    for said in (
        f"plan {data['plan']}, predicted for test",
        f"{data['collectives_before']} -> {data['collectives']};",
        f"step         {1e3 * data['prediction']['step_s']:.1f} ms",
        f"of it        compute {1e3 * data['compute_s']:.1f} ms, lost to collectives "
        f"{1e3 * data['overhead_s']:.1f} ms, exposed {1e3 * data['prediction']['exposed_s']:.1f} ms",
        f"{data['changes'][0]['gain']:+7.1%} throughput  {data['changes'][0]['what']}",
    ):
        assert said in text
    for bucket in data["buckets"]:
        assert f"{bucket['bound']}: {bucket['where']}; {bucket['closed']}" in text
        assert f"{1e3 * bucket['hidden_s']:7.2f} + {1e3 * bucket['exposed_s']:6.2f} ms" in text


def test_a_screen_shows_what_is_exposed_longest(explained: dict[str, Explanation]) -> None:
    found = explained["block"]
    lines = found.text(rows=2).splitlines()
    rows = [line for line in lines if re.search(r" MiB +[\d.]+ ms  ", line)]
    longest = sorted(found.buckets, key=lambda bucket: bucket.exposed_s)[-2:]
    assert len(rows) == 2
    assert all(any(f"+ {1e3 * bucket.exposed_s:6.2f} ms" in row for row in rows) for bucket in longest)
    assert len(found.text().splitlines()) <= 50


def test_a_suggested_change_brings_the_gain_that_is_stated(
    explained: dict[str, Explanation], monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than auto gives up for memory and where hardware deviates from its profile.
    monkeypatch.setattr(explanation, "_WORTH", 0.008)
    names = ("block", "auto", "unsharded")
    block, auto, unsharded = (explain(explained[name].plan, explained[name].costs) for name in names)
    changes = {change.what: change for change in block.changes}
    assert [change.gain for change in block.changes] == sorted((c.gain for c in block.changes), reverse=True)
    assert changes["plan='auto', as much memory"].step_s == pytest.approx(auto.prediction.step_s, rel=0.01)
    assert not any(change.what.startswith("plan=") for change in auto.changes)
    (whole,) = (change for change in auto.changes if change.what.startswith("reshard_after_forward=False for "))
    assert whole.step_s == pytest.approx(unsharded.prediction.step_s, rel=0.01)
    assert whole.gain == pytest.approx(auto.prediction.step_s / whole.step_s - 1)


def test_why_weights_are_kept_or_gathered_again_is_said(explained: dict[str, Explanation]) -> None:
    auto, unsharded = explained["auto"], explained["unsharded"]
    saved = auto.gathered_bytes - unsharded.gathered_bytes
    assert saved > 0
    assert f"({len(unsharded.plan.keep_unsharded)}): {saved / 2**20:.1f} MiB, which save " in unsharded.text()
    assert "kept unsharded until backward" not in auto.text()
    assert auto.keeping is not None
    again = len(auto.costs.backward.gathers)
    assert f"gathered again in backward: output.weight .. layers.0.attention_norm.weight ({again}); " in auto.text()
    assert f"{auto.keeping.what}: step {1e3 * auto.keeping.step_s:.1f} ms" in auto.text()
    full = explain(auto.plan, auto.costs._replace(memory_limit_bytes=0.0))
    assert full.keeping is None
    assert "kept unsharded, none would save time that is worth its memory" in full.text()


def test_more_memory_is_proposed_where_it_helps(explained: dict[str, Explanation]) -> None:
    free = explained["auto"]
    assert not any(change.what.startswith("a memory budget") for change in free.changes)
    memory_limit = explained["block"].prediction.peak_bytes - free.costs.resident_bytes
    tight = explain(explained["block"].plan, free.costs._replace(memory_limit_bytes=memory_limit - 1))
    assert any(change.what.startswith("a memory budget of") for change in tight.changes)
    assert all(
        change.peak_bytes < memory_limit + free.costs.resident_bytes
        for change in tight.changes
        if "as much" in change.what
    )
    limit = f"MiB of {tight.memory_limit_bytes / 2**20:.1f} MiB, "
    assert limit in tight.text(0)
    assert limit not in free.text(0)


def test_two_reports_are_compared(
    reports: Path,
    explained: dict[str, Explanation],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    same = printed(capsys, monkeypatch, reports / "block", "--against", reports / "block")
    assert same.count("(+0.0%)") == 4
    assert "@@" not in same
    text = printed(capsys, monkeypatch, reports / "auto", "--against", reports / "block")
    auto, block = explained["auto"], explained["block"]
    assert f"collectives  {auto.collectives}, against {block.collectives}" in text
    gain = auto.prediction.step_s / block.prediction.step_s - 1
    assert f"({gain:+.1%})" in text
    assert f"-plan {block.plan.hash}" in text


@pytest.mark.compile
def test_a_folder_without_a_report_is_named(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"simplefsdp explain: .*: no report here"):
        printed(capsys, monkeypatch, tmp_path)
    planned(tmp_path, "block", profile=None)
    with pytest.raises(SystemExit, match=r"no costs\.json: compiled without a profile"):
        printed(capsys, monkeypatch, tmp_path)


@given(cost_graphs(gathers=4, reductions=0), cost_graphs(gathers=4, reductions=4, channels=2))
@settings(max_examples=100, deadline=None)
def test_costs_are_read_as_they_were_written(forward: Any, backward: Any) -> None:
    for memory_limit in (7.0, float("inf")):
        costs = StepCosts("p", forward, backward, 5, 0.25, memory_limit)
        assert StepCosts.from_json(costs.to_json()) == costs


def test_a_weight_is_held_until_it_was_read_for_the_last_time() -> None:
    kind = CollectiveKind("0", 1.0, 0.0)
    weights = [Gather(f"w{i}", kind, 8, first_use_slot=i, last_use_slot=last) for i, last in ((0, 1), (1, 2), (2, 3))]
    forward = CostGraph((4.0, 4.0, 4.0), (0, 0, 0), (0, 0, 0, 0), tuple(weights), ())
    costs = StepCosts("test", forward, CostGraph((), (), (0,), (), ()), 0, 0.0, math.inf)
    buckets = tuple(Bucket((w.fqn,), None, w.fqn, position=i) for i, w in enumerate(weights))
    plan = BucketPlan(buckets, (), (), (), tuple((w.fqn, (2,)) for w in weights))
    found = explain(plan, costs).buckets
    assert [bucket.held_s for bucket in found] == [9, 13, 13]
    assert [bucket.held_bytes for bucket in found] == [8, 8, 8]


def test_a_group_of_collectives_is_shown_as_one() -> None:
    kind = CollectiveKind("0", 1.0, 0.0, member_s=0.5)
    weights = tuple(Gather(f"w{i}", kind, 8, first_use_slot=0, last_use_slot=0) for i in range(3))
    costs = StepCosts(
        "test", CostGraph((4.0,), (0,), (0, 0), weights, ()), CostGraph((), (), (0,), (), ()), 0, 0.0, 1e9
    )
    fqns = tuple(weight.fqn for weight in weights)
    for form, members, seconds in (("packed", 1, 1.0), ("grouped", 3, 2.0)):
        bucket = Bucket(fqns, None, "w0", form=cast(Form, form))
        found = explain(BucketPlan((bucket,), (), (), (), tuple((fqn, (2,)) for fqn in fqns)), costs)
        assert [(one.group, one.communication_s) for one in found.buckets] == [(members, seconds)]
        assert ("a group of 3" in found.text()) == (form == "grouped")


def test_exchanges_of_embeddings_are_counted() -> None:
    kind = CollectiveKind("0", 1.0, 0.0)
    weight = Gather("w", kind, 8, first_use_slot=1, last_use_slot=1)
    plan = BucketPlan((Bucket(("w",), None, "w"),), (), (), (), (("w", (2,)),))
    for exchanges in ((), (0,)):
        forward = CostGraph((4.0, 4.0), (0, 0), (0, 0, 0), (weight,), (), exchanges=exchanges)
        costs = StepCosts("test", forward, CostGraph((), (), (0,), (), ()), 0, 0.0, 1e9)
        assert ("  exchanges    1 of an embedding's tokens" in explain(plan, costs).summary()) == bool(exchanges)
