"""``measure``: what it says of a step agrees with what ran, and with the plan; and the pictures of it."""

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from inductor_passes.runtime.record import Record, RecordedCollective
from simplefsdp import BucketPlan, Measurement, measure, rehearsal, simple_fsdp
from simplefsdp.analysis.explanation import Explanation
from simplefsdp.analysis.measurement import GraphRun
from simplefsdp.analysis.measuring import Event, runs_of, seen_in
from simplefsdp.cli import main as cli
from simplefsdp.cli.explain import read
from simplefsdp.hardware.profile import flat
from tests.models import PROFILE, batch, tiny_llama
from tests.ranks import Ranks

SLOW = flat("test", 8, alpha_s=0.02, bandwidth_bytes_per_s=1e8)
"""A network whose collectives are not all hidden, whenever this machine may be busy with something else."""


def stepped(folder: Path | None, **options: Any) -> Callable[[], Any]:
    """A step of a model, compiled and run twice."""
    model = simple_fsdp(tiny_llama(layers=2))
    chosen: Any = {"plan": "block", "profile": replace(PROFILE, network=SLOW), **options}
    chosen |= {"report_dir": str(folder)} if folder else {}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="simplefsdp", options=chosen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        compiled(*batch(0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    return step


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Measurement, list[Any]]:
    """Folder of a graph's report, what was measured in a rehearsal, and what the rehearsal has of the last step."""
    folder = tmp_path_factory.mktemp("measured")
    with rehearsal.world(8, SLOW) as world:
        step = stepped(folder)
        world.forget()
        found = measure(step, steps=1)
        went = world.collectives()
    (graph,) = folder.iterdir()
    return graph, found, went


@pytest.fixture(scope="module")
def explained(measured: tuple[Path, Measurement, list[Any]]) -> Explanation:
    (found,) = read(measured[0]).values()
    return found


def test_a_rehearsed_step_is_what_the_rehearsal_recorded(measured: tuple[Path, Measurement, list[Any]]) -> None:
    _, found, went = measured
    assert [run.direction for run in found.runs] == ["forward", "backward"]
    assert len(found.collectives) == len(went)
    assert [one.nbytes for one in found.collectives] == [one.nbytes for one in went]
    assert found.exposed_s == pytest.approx(sum(max(0.0, w.finished - w.waited) for w in went))
    assert found.communication_s == pytest.approx(sum(w.finished - w.started for w in went))
    assert 0 < found.exposed_s < found.step_s == found.steps_s[0]
    for run in found.runs:
        assert all(0 <= c.issued_s <= c.started_s < c.finished_s for c in run.collectives)
    first, second = found.runs
    assert second.began_s > first.began_s + max(one.awaited_s for one in first.collectives)


def test_each_bucket_of_the_plan_was_measured(
    measured: tuple[Path, Measurement, list[Any]], explained: Explanation
) -> None:
    graph, found, _ = measured
    plan = BucketPlan.load(graph / "plan.json")
    buckets = [*plan.forward, *plan.backward, *plan.reductions]
    assert sorted(sorted(c.parameters) for c in found.collectives) == sorted(sorted(b.fqns) for b in buckets)
    assert all(bucket.measured is not None for bucket in explained.buckets)
    exposed = sum(bucket.measured.exposed_s for bucket in explained.buckets if bucket.measured)
    assert exposed == pytest.approx(found.exposed_s)
    for bucket in explained.buckets:
        assert bucket.measured is not None
        assert bucket.measured.communication_s == pytest.approx(bucket.communication_s, rel=0.01)


def test_a_measurement_is_written_into_the_report(
    measured: tuple[Path, Measurement, list[Any]], explained: Explanation
) -> None:
    graph, found, _ = measured
    text = (graph / "measurement.json").read_text()
    read_again = Measurement.from_json(text)
    assert read_again.to_json() == text
    assert [run.collectives for run in read_again.runs] == [run.collectives for run in found.runs]
    events = json.loads((graph / "timeline.json").read_text())["traceEvents"]
    for process, exposed in ((0, explained.prediction.exposed_s), (1, found.exposed_s)):
        shown = [event for event in events if event["pid"] == process and event["ph"] == "X"]
        assert sum(e["dur"] for e in shown if e["cat"] == "exposed") == pytest.approx(1e6 * exposed)
        assert len([e for e in shown if e["cat"] in ("gather", "reduce")]) == len(found.collectives)
    assert f"measured     step {1e3 * found.step_s:.1f} ms" in explained.text()
    data = json.loads(explained.to_json())
    assert data["measured"]["exposed_s"] == found.exposed_s
    assert f"exposed {1e3 * found.exposed_s:.1f} ms of {1e3 * found.communication_s:.1f} ms comm" in explained.text()
    times = re.findall(r"\+ +([\d.]+) ms  measured", explained.text(rows=100))
    assert sorted(times) == sorted(f"{1e3 * bucket['measured']['exposed_s']:.2f}" for bucket in data["buckets"])


@pytest.mark.compile
def test_measuring_again_replaces_what_was_measured(tmp_path: Path) -> None:
    with rehearsal.world(8, SLOW):
        step = stepped(tmp_path)
        seconds = [measure(step, steps=3), measure(step)]
    (graph,) = tmp_path.iterdir()
    assert Measurement.from_json((graph / "measurement.json").read_text()).steps_s == seconds[1].steps_s
    assert len(seconds[0].steps_s) == 3
    assert seconds[0].step_s == sorted(seconds[0].steps_s)[1]
    events = json.loads((graph / "timeline.json").read_text())["traceEvents"]
    assert sum(event["pid"] == 1 and event["name"] == "process_name" for event in events) == 1


@pytest.mark.slow
def test_real_ranks_are_measured_by_the_profiler(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(_profiled, tmp_path)
    (graph,) = tmp_path.iterdir()
    assert Measurement.from_json((graph / "measurement.json").read_text()).runs


def _profiled(folder: Path) -> None:
    step = stepped(folder)
    loss = torch.ones(1)

    def with_more() -> None:
        dist.all_reduce(loss)  # somebody else's
        step()
        torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce(loss, "sum", dist.group.WORLD.group_name)
        )

    found = measure(with_more, steps=3)
    (plan,) = (BucketPlan.load(path) for path in folder.glob("*/plan.json")) if dist.get_rank() == 0 else (None,)
    assert [run.direction for run in found.runs] == ["forward", "backward"]
    if plan is not None:
        buckets = [*plan.forward, *plan.backward, *plan.reductions]
        assert sorted(sorted(c.parameters) for c in found.collectives) == sorted(sorted(b.fqns) for b in buckets)
    for run in found.runs:
        assert run.began_s >= 0
        for one in run.collectives:
            assert 0 <= one.issued_s <= one.started_s <= one.finished_s < found.step_s
            assert one.issued_s < one.awaited_s < math.inf
        last = {one.group: 0.0 for one in run.collectives}
        for one in run.collectives:  # a group does one after the other
            assert one.started_s >= last[one.group]
            last[one.group] = one.finished_s
    assert 0 <= found.exposed_s < found.step_s


ISSUED = tuple(RecordedCollective(f"all_{name}", "0", "", 4, (name,)) for name in ("gather", "reduce"))


def events_of(*steps: tuple[str, int, int], thread: int = 1) -> list[Event]:
    """Return the events of a step of 1000 s that begins at 100, its graph at 200."""
    named = {"wait": "_c10d_functional::wait_tensor", "agree": "simplefsdp::agree"}
    whole = [Event("simplefsdp.measure", 1, 100, 1100), Event("simplefsdp::agree", 1, 200, 210)]
    return whole + [Event(named.get(n, f"_c10d_functional::all_{n}"), thread, start, end) for n, start, end in steps]


def times_of(run: GraphRun) -> list[tuple[int, ...]]:
    """Return, for each collective, when it was issued, started, finished and awaited, and for how long it was exposed,
    in seconds since the graph began."""
    names = ("issued_s", "started_s", "finished_s", "awaited_s", "exposed_s")
    return [tuple(round(getattr(one, name)) for name in names) for one in run.collectives]


def test_profiler_events_are_matched_to_collectives_in_order() -> None:
    record = Record("forward", (), (), ISSUED, (0, 1, -1, -2))
    steps = [("gather", 300, 320), ("gather", 305, 315), ("reduce_", 330, 340), ("wait", 400, 450), ("wait", 500, 510)]
    carried = [("gather", 250, 290), ("gather", 310, 445), ("reduce", 445, 470), ("reduce", 600, 700)]
    gloo = [Event(f"gloo:all_{name}", 7, start, end) for name, start, end in carried]
    elsewhere = events_of(("wait", 350, 360), thread=2)[2:]
    (run,) = runs_of([record], [*events_of(*steps, ("wait", 600, 700)), *gloo, *elsewhere])
    assert run.began_s == 100
    assert times_of(run) == [(100, 110, 245, 200, 45), (130, 245, 270, 300, 0)]
    assert [c.parameters for c in run.collectives] == [("gather",), ("reduce",)]


def test_each_group_has_a_thread_of_its_own() -> None:
    record = Record("forward", (), (), (ISSUED[0], ISSUED[1]._replace(group="1")), (0, 1, -1, -2))
    steps = [("gather", 300, 320), ("reduce", 330, 340), ("wait", 400, 450), ("wait", 500, 510)]
    gloo = [Event("gloo:one", 7, 310, 445), Event("gloo:other", 8, 335, 350), Event("gloo:more", 7, 600, 700)]
    (run,) = runs_of([record], [*events_of(*steps), *gloo])
    assert times_of(run) == [(100, 110, 245, 200, 45), (130, 135, 150, 300, 0)]


def test_a_collective_is_done_when_a_wait_for_it_is_over() -> None:
    record = Record("forward", (), (), ISSUED[:1], (0, -1))
    noted_late = Event("gloo:one", 7, 310, 900)
    (run,) = runs_of([record], [*events_of(("gather", 300, 320), ("wait", 400, 450)), noted_late])
    assert times_of(run) == [(100, 110, 250, 200, 50)]


def test_of_another_backend_it_is_known_when_a_wait_was_over() -> None:
    record = Record("forward", (), (), ISSUED[:1], (0, -1))
    (run,) = runs_of([record], events_of(("gather", 300, 320), ("wait", 400, 450)))
    assert times_of(run) == [(100, 100, 250, 200, 50)]


def cuda_trace(*done: tuple[str, int, int, int, int]) -> list[dict[str, Any]]:
    """A step that gathers and waits, as torch's profiler writes it, and what the GPU did meanwhile: category, stream,
    when it was launched, start, end; in seconds."""

    def complete(category: str, name: str, start: int, end: int, thread: int = 1, **about: int) -> dict[str, Any]:
        times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
        return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, **times, "args": about}

    events = events_of(("gather", 300, 320), ("wait", 400, 405))
    trace = [complete("cpu_op", e.name, int(e.start), int(e.end), e.thread) for e in events[1:]]
    trace.append(complete("user_annotation", events[0].name, 100, 1100))
    # An annotation is repeated where the GPU did what was launched in it.
    trace.append(complete("gpu_user_annotation", events[0].name, 350, 900, thread=7, stream=7))
    for number, (category, stream, launched, start, end) in enumerate(done):
        trace.append(complete("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, correlation=number))
        trace.append(complete(category, "a kernel", start, end, stream, correlation=number, stream=stream))
    return [{"ph": "M", "name": "process_name", "args": {"name": "python"}}, *trace]


BUSY = [("kernel", 7, 150, 180, 250), ("kernel", 7, 250, 260, 480), ("gpu_memcpy", 7, 350, 480, 520)]
"""Compute that lies 60 s behind its launches when the graph begins, 160 when it gathers, 120 when it needs that."""


@pytest.mark.parametrize(
    ("network", "times"),
    [
        ([("kernel", 20, 310, 480, 600)], (230, 230, 350, 270, 80)),
        ([("kernel", 20, 310, 480, 500)], (230, 230, 250, 270, 0)),
        ([("kernel", 20, 310, 485, 500), ("gpu_memcpy", 21, 315, 490, 610)], (230, 235, 360, 270, 90)),
        # Somebody else's, launched later.
        ([("kernel", 20, 305, 490, 560), ("kernel", 20, 350, 560, 900)], (230, 240, 310, 270, 40)),
    ],
)
def test_a_gpu_is_held_up_where_its_stream_waits(
    network: list[tuple[str, int, int, int, int]], times: tuple[int, ...]
) -> None:
    record = Record("forward", (), (), ISSUED[:1], (0, -1))
    (run,) = runs_of([record], *seen_in(cuda_trace(*BUSY, *network)))
    assert run.began_s == 150  # at 250, when the GPU had done what was launched before
    assert times_of(run) == [times]


def test_kernels_still_queued_on_a_gpu_are_not_counted_as_waits() -> None:
    record = Record("forward", (), (), ISSUED[:1], (0, -1))
    idle = [("kernel", 7, 150, 160, 170), ("kernel", 7, 250, 260, 270), ("kernel", 20, 310, 312, 390)]
    (run,) = runs_of([record], *seen_in(cuda_trace(*idle)))
    assert times_of(run) == [(100, 112, 190, 200, 0)]


def test_a_collective_that_nobody_awaits_is_not_exposed() -> None:
    record = Record("backward", (), (), ISSUED[:1], (0,))
    (run,) = runs_of([record], events_of(("gather", 300, 320)))
    (one,) = run.collectives
    assert one.awaited_s == math.inf
    assert one.exposed_s == 0
    found = Measurement((1.0,), (run,))
    assert Measurement.from_json(found.to_json()) == found


@pytest.mark.parametrize("steps", [[("gather", 300, 310)], [("wait", 300, 310), ("gather", 320, 330)]])
def test_another_order_than_was_compiled_is_an_error(steps: list[tuple[str, int, int]]) -> None:
    record = Record("forward", (), (), ISSUED[:1], (0, -1))
    with pytest.raises(RuntimeError, match="forward graph did not issue, in the order that it was compiled with"):
        runs_of([record], events_of(*steps))


@pytest.mark.usefixtures("one_of_four")
def test_a_step_that_cannot_be_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="steps: expected a positive number, found 0"):
        measure(lambda: None, steps=0)
    with pytest.raises(RuntimeError, match="no graph compiled with backend='simplefsdp' has run in step_fn"):
        measure(lambda: nn.Linear(2, 2)(torch.ones(2)))


def pages(folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", ["simplefsdp", "explain", str(folder)])
    cli.main()
    return capsys.readouterr().out


def test_the_pictures_show_what_the_json_has(
    measured: tuple[Path, Measurement, list[Any]],
    explained: Explanation,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, _, _ = measured
    said = pages(graph, capsys, monkeypatch)
    assert said.endswith(f"in pictures: {graph / 'report.html'}, {graph / 'timeline.png'}\n")
    page = (graph / "report.html").read_text()
    rows = re.findall(r'<tr><td class="words">(\w+)</td>(.*?)</tr>', page, re.DOTALL)
    assert [direction for direction, _ in rows] == [bucket.direction for bucket in explained.buckets]
    for (_, row), bucket in zip(rows, explained.buckets, strict=True):
        assert bucket.measured is not None
        shown = [f"{1e3 * seconds:.2f}" for seconds in (bucket.exposed_s, bucket.measured.exposed_s)]
        cells = re.findall(r">([\d.]+)</td>", row)
        assert [cells[6], cells[8]] == shown
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="http', page), "it must need nothing else"
    assert (graph / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_text_is_there(
    measured: tuple[Path, Measurement, list[Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = pages(measured[0], capsys, monkeypatch)
    assert "measured     step" in said
    assert "in pictures, with pip install 'simplefsdp[report]': " in said


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_draws_every_span_without_complaint(
    measured: tuple[Path, Measurement, list[Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, _, _ = measured
    pages(graph, capsys, monkeypatch)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=20000"]
    command = ["chromium", *flags, "--dump-dom", (graph / "report.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    events = json.loads((graph / "timeline.json").read_text())["traceEvents"]
    assert len(re.findall(r'<g class="bar">', done.stdout)) == sum(event["ph"] == "X" for event in events)
    tracks = {f"{name}: {track}" for name, track in itertools.product(("predicted", "measured"), ("group 0",))}
    assert all(track in done.stdout for track in tracks)
