"""The trace of a predicted schedule agrees with the prediction."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from simplefsdp import BucketPlan, simple_fsdp
from tests.models import PROFILE, batch, tiny_llama

pytestmark = pytest.mark.compile


def written(folder: Path, plan: str, mesh: Any = None) -> tuple[list[dict[str, Any]], dict[str, Any], BucketPlan]:
    options: Any = {"plan": plan, "profile": PROFILE, "lower_with": "aot_eager", "report_dir": str(folder)}
    torch._dynamo.reset()
    torch.compile(simple_fsdp(tiny_llama(), mesh), backend="simplefsdp", options=options)(*batch(0, 0)).backward()
    (graph,) = folder.iterdir()
    events = json.loads((graph / "timeline.json").read_text())["traceEvents"]
    return events, json.loads((graph / "prediction.json").read_text()), BucketPlan.load(graph / "plan.json")


@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize("plan", ["auto", "block"])
def test_a_timeline_shows_predicted_compute_collectives_and_memory(tmp_path: Path, plan: str) -> None:
    events, prediction, chosen = written(tmp_path, plan)
    scheduled = [event for event in events if event["ph"] == "X"]
    sums = {cat: sum(e["dur"] for e in scheduled if e["cat"] == cat) for cat in ("compute", "exposed")}
    assert sums["exposed"] == pytest.approx(1e6 * prediction["exposed_s"])
    assert 0 < sums["compute"] < 1e6 * (prediction["forward_s"] + prediction["backward_s"])
    ends = [event["ts"] + event["dur"] for event in scheduled]
    assert max(ends) == pytest.approx(1e6 * (prediction["forward_s"] + prediction["backward_s"]))
    for cat, buckets in (("gather", chosen.forward + chosen.backward), ("reduce", chosen.reductions)):
        shown = [frozenset(event["args"]["parameters"]) for event in scheduled if event["cat"] == cat]
        assert sorted(map(sorted, shown)) == sorted(sorted(bucket.fqns) for bucket in buckets)
    memory = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
    assert max(memory) == prediction["peak_bytes"]


@pytest.mark.usefixtures("one_of_four")
def test_nothing_on_a_track_overlaps_and_each_group_has_its_own(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    events, _, chosen = written(tmp_path, "auto", mesh)
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert len(tracks) == 3
    assert len(set(tracks.values())) == 3
    for track in tracks:
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == track)
        assert spans
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(spans))
    all_reduces = [event for event in events if event.get("cat") == "all-reduce"]
    assert len(all_reduces) == len(chosen.reductions)
    assert {event["tid"] for event in all_reduces}.isdisjoint(e["tid"] for e in events if e.get("cat") == "gather")
    for event in events:
        if "args" in event and "issued_us" in event["args"]:
            assert event["args"]["issued_us"] <= event["ts"] + 1e-3
