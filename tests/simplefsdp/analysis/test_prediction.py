"""Predictions: what they count, and what they leave out."""

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction
from inductor_passes.scheduling.issue_points import Bucket
from simplefsdp import BucketPlan, HardwareProfile, simple_fsdp
from simplefsdp.analysis.prediction import Prediction, StepState, predict, step_costs, step_state, timelines
from tests.models import PROFILE, batch, tiny_llama

KIND = CollectiveKind("shard", alpha_s=1.0, s_per_byte=0.1)
"""A collective of 10 bytes takes 2 seconds."""
FORWARD = CostGraph((3.0,), (100,), (0, 0), (Gather("a", KIND, 10, 0, 0),), ())
BACKWARD = CostGraph((4.0,), (50,), (0, 0), (), (Reduction("a", KIND, 10, 1, 1),))
PLAN = BucketPlan((Bucket(("a",), None, "a"),), (), (Bucket(("a",), None, None),), (), (("a", (10,)),))


def predicted(
    plan: BucketPlan, cost_graphs: tuple[CostGraph, CostGraph], state: StepState, profile: HardwareProfile = PROFILE
) -> Prediction:
    return predict(plan, step_costs(cost_graphs, state, profile, math.inf), timelines(plan, cost_graphs))


def test_a_step_is_its_graphs_and_what_is_outside_of_them() -> None:
    profile = replace(PROFILE, parameter_s=0.25)
    found = predicted(PLAN, (FORWARD, BACKWARD), StepState(2, 1000, 10**9), profile)
    assert (found.forward_s, found.backward_s, found.exposed_s) == pytest.approx((2 + 3, 4 + 2, 4))
    assert found.outside_s == pytest.approx(2 * 0.25 + 10**9 / 1e10)
    assert found.step_s == pytest.approx(11 + 0.6)
    assert (found.bound_s, found.gap) == pytest.approx((11.0, 0.0))
    assert (found.peak_bytes, found.resident_bytes) == (1000 + 110, 1000)
    assert (found.plan, found.profile) == (PLAN.hash, "test")
    assert str(found).startswith("11600.0 ms a step, of which 4000.0 exposed communication; 0.0 % above the least")


def test_the_gap_is_what_another_plan_could_save() -> None:
    # Two gradients, reduced one after the other at the end, could have been reduced together, or the first one earlier.
    graph = CostGraph(
        (4.0, 4.0), (0, 0), (0, 0, 0), (), tuple(Reduction(f, KIND, 10, i + 1, 1) for i, f in enumerate("ab"))
    )
    buckets = (Bucket(("a",), "b", None), Bucket(("b",), "b", None, position=1))
    plan = BucketPlan((), (), buckets, (), (("a", (10,)), ("b", (10,))))
    found = predicted(plan, (CostGraph((), (), (0,), (), ()), graph), StepState())
    assert found.backward_s == pytest.approx(8 + 4)
    assert found.bound_s == pytest.approx(8 + 2)
    assert found.gap == pytest.approx(0.2)


def test_evaluation_has_no_optimizer() -> None:
    nothing = CostGraph((), (), (0,), (), ())
    assert predicted(PLAN, (FORWARD, nothing), StepState(2, 1000, 10**9)).outside_s == 0


@pytest.mark.usefixtures("one_of_four")
def test_frozen_parameters_have_no_optimizer_state() -> None:
    info = next(simple_fsdp(nn.Linear(6, 10, bias=False)).parameters()).simple_fsdp_info
    shard = 3 * 6
    assert step_state([(info, torch.float32, True)]) == StepState(1, shard * (4 + 8), shard * 28, shard * 4)
    assert step_state([(info, torch.bfloat16, False)]) == StepState(1, shard * 2, 0)
    assert step_state([(info, torch.bfloat16, True), (info, torch.float32, False)]) == StepState(
        2, shard * 14, shard * 22, shard * 2
    )


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_plan_and_prediction_are_artifacts_of_torchs_own_trace(caplog: pytest.LogCaptureFixture) -> None:
    options: Any = {"plan": "block", "profile": PROFILE, "lower_with": "aot_eager"}
    trace_log = logging.getLogger("torch.__trace")
    trace_log.addHandler(caplog.handler)
    try:
        torch._dynamo.reset()
        torch.compile(simple_fsdp(tiny_llama()), backend="simplefsdp", options=options)(*batch(0, 0))
    finally:
        trace_log.removeHandler(caplog.handler)
    traced: list[Any] = [record for record in caplog.records if "artifact" in getattr(record, "metadata", {})]
    payloads = {record.metadata["artifact"]["name"]: record.payload for record in traced}
    plan = BucketPlan.from_json(payloads["simplefsdp_plan"])
    assert json.loads(payloads["simplefsdp_prediction"])["plan"] == plan.hash


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize("plan", ["auto", "block"])
def test_a_prediction_is_logged_and_written_into_the_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, plan: str
) -> None:
    model = simple_fsdp(tiny_llama())
    options: Any = {"plan": plan, "profile": PROFILE, "lower_with": "aot_eager", "report_dir": str(tmp_path)}
    with caplog.at_level(logging.INFO, "simplefsdp"):
        torch.compile(model, backend="simplefsdp", options=options)(*batch(0, 0)).backward()
    (logged,) = (record.message for record in caplog.records if record.levelname == "INFO")
    (folder,) = tmp_path.iterdir()
    written = json.loads((folder / "prediction.json").read_text())
    made = BucketPlan.load(folder / "plan.json")
    count = len(made.forward) + len(made.backward) + len(made.reductions)
    each = sum(len(b.fqns) for b in (*made.forward, *made.backward, *made.reductions))
    assert written["plan"] == made.hash
    assert logged.startswith(f"plan {made.hash}: {each} -> {count} collectives, predicted to take ")
    assert f"{1e3 * written['step_s']:.1f} ms a step, of which {1e3 * written['exposed_s']:.1f} exposed" in logged
    assert written["step_s"] > written["bound_s"] > 0
    assert (
        written["peak_bytes"]
        > written["resident_bytes"]
        == step_state((param.simple_fsdp_info, param.dtype, True) for param in model.parameters()).resident_bytes
    )
