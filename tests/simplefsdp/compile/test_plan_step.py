"""``plan="auto"`` and ``"greedy"``: what they ask of a profile, and what they make of a model."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes.collectives import BUCKET, FQNS
from inductor_passes.scheduling.deviations import DEVIATIONS
from inductor_passes.scheduling.issue_points import Schedule, schedule_of
from inductor_passes.scheduling.replay import replay
from inductor_passes.scheduling.search import greedy_schedule
from inductor_passes.scheduling.search_step import search_step
from simplefsdp import BucketPlan, WireFormat, manual_plan, simple_fsdp
from simplefsdp.compile.context import compilation_context
from simplefsdp.compile.options import parse_options
from simplefsdp.compile.plan_step import SearchRequest, time_tolerance
from simplefsdp.frontend.sharding import Reshard
from simplefsdp.hardware.profile import Link, device_memory_bytes, flat, save
from simplefsdp.plan.grouping import BLOCK
from simplefsdp.text.units import parse_bytes
from tests.graphs import capture, whole_weights_among_outputs
from tests.models import PROFILE, batch, tiny_llama, train
from tests.ranks import Ranks, fake_group


def planned(
    folder: Path,
    plan: Any = "auto",
    model: nn.Module | None = None,
    reshard: Any = True,
    formats: WireFormat | None = None,
    **options: Any,
) -> BucketPlan:
    model = simple_fsdp(tiny_llama() if model is None else model, reshard_after_forward=reshard, wire=formats)
    options = {"profile": PROFILE} | options | {"plan": plan, "lower_with": "aot_eager", "report_dir": str(folder)}
    torch._dynamo.reset()
    torch.compile(model, backend="simplefsdp", options=options)(*batch(0, 0)).backward()
    (path,) = folder.glob("*/plan.json")
    return BucketPlan.load(path)


def predicted(folder: Path) -> tuple[float, int]:
    """Return the seconds and the peak in bytes of the step that was planned with this folder."""
    (path,) = folder.glob("*/prediction.json")
    found = json.loads(path.read_text())
    return found["step_s"], found["peak_bytes"]


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize("name", ["auto", "greedy"])
def test_each_parameter_is_in_one_bucket(tmp_path: Path, name: str) -> None:
    found = planned(tmp_path, name)
    fqns = [fqn for fqn, _ in tiny_llama().named_parameters()]
    for buckets in (found.forward, found.backward, found.reductions):
        used = [fqn for bucket in buckets for fqn in bucket.fqns]
        assert len(used) == len(set(used))
        assert all(list(bucket.fqns) == sorted(bucket.fqns, key=fqns.index) for bucket in buckets)  # packed as FSDP2
    assert sorted(fqn for bucket in found.forward for fqn in bucket.fqns) == sorted(fqns)
    assert sorted(fqn for bucket in found.reductions for fqn in bucket.fqns) == sorted(fqns)
    assert 1 < len(found.reductions) < len(fqns)


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_what_is_fused_is_put_together_where_there_is_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Any] = []
    monkeypatch.setattr("simplefsdp.compile.passes.put_fused_together", moved.append)
    for plan, graphs in (("none", 0), ("block", 2)):
        capture(simple_fsdp(tiny_llama(layers=1)), *batch(0, 0), plan=plan)
        assert len(moved) == graphs


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize(("checkpointing", "reshard"), [("selective", True), ("none", "auto")])
def test_all_ranks_plan_the_same_however_uneven_their_shards(checkpointing: str, reshard: Reshard) -> None:
    plans, unsharded = [], []
    for rank in (0, 6):
        with fake_group(7, rank):
            model = tiny_llama(dim=40, tie_embeddings=True, activation_checkpointing=checkpointing)
            model = simple_fsdp(model, reshard_after_forward=reshard)
            captured = capture(model, *batch(0, 0), plan="auto", profile=PROFILE)
            nodes = [*captured.forward.nodes, *captured.backward.nodes]
            plans.append([node.meta[BUCKET] for node in nodes if FQNS in node.meta])
            unsharded.append(len(whole_weights_among_outputs(captured.forward)))
    assert len(plans[0]) > 10
    assert plans[0] == plans[1]
    assert unsharded[0] == unsharded[1]
    assert bool(unsharded[0]) == (reshard == "auto")


@pytest.mark.slow
@pytest.mark.compile
def test_ranks_of_groups_on_more_nodes_than_others_plan_the_same() -> None:
    inside = dict.fromkeys(PROFILE.network.inside, Link(bandwidth_bytes_per_s=1e10, alpha_s=1e-6))
    uneven = replace(PROFILE.network, ranks_per_node=4, nodes=2, inside=inside)
    plans = []
    for rank in (0, 4):  # of a shard group on one node, and of one on two
        with fake_group(6, rank):
            mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("replicate", "shard"))
            model = simple_fsdp(tiny_llama(), mesh)
            captured = capture(model, *batch(0, 0), plan="auto", profile=replace(PROFILE, network=uneven))
            nodes = [*captured.forward.nodes, *captured.backward.nodes]
            plans.append([node.meta[BUCKET] for node in nodes if FQNS in node.meta])
    assert plans[0] == plans[1]


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_a_budget_that_cannot_be_met_says_what_can(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"option 'memory_budget'=1000: this step needs at least \d+ bytes") as error:
        planned(tmp_path / "none", memory_budget=1000)
    least = int(re.findall(r"at least (\d+)", str(error.value))[0])
    shards = sum(-(-p.shape[0] // 4) * math.prod(p.shape[1:]) * 12 for p in tiny_llama().parameters())
    assert f"of which {shards} for shards and the optimizer's state" in str(error.value)
    tight, free = planned(tmp_path / "tight", memory_budget=least), planned(tmp_path / "free")
    assert (tight.backward, tight.reductions) != (free.backward, free.reductions)
    with pytest.raises(Exception, match="needs at least"):
        planned(tmp_path / "under", memory_budget=least - 1)


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_auto_knows_of_block_and_greedy_and_gives_time_for_memory_without_a_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[Any, list[list[Schedule]], dict[str, Any]]] = []

    def spy(graphs: Any, memory_limit: float, proposals: Any, **given: Any) -> Any:
        told.append((graphs, proposals, given))
        return search_step(graphs, memory_limit, proposals, **given)

    monkeypatch.setattr("simplefsdp.compile.plan_step.search_step", spy)
    block = planned(tmp_path / "block", "block")
    planned(tmp_path / "free")
    planned(tmp_path / "budget", memory_budget="1GiB")
    monkeypatch.setattr("simplefsdp.compile.options.device_memory_bytes", lambda _device: 1 << 60)
    planned(tmp_path / "on a GPU")
    graphs, (of_block, _), _ = told[-1]
    peak = max(replay(graph, schedule).peak for graph, schedule in zip(graphs, of_block, strict=True))
    assert [given for *_, given in told] == [
        {"tolerance": tolerance, "modest_peak": modest_peak, "deviations": DEVIATIONS}
        for tolerance, modest_peak in ((0.005, math.inf), (0.0, math.inf), (0.03, peak))
    ]
    for graphs, proposals, _ in told:
        gathers = zip(graphs, (block.forward, block.backward), strict=True)
        assert proposals[0] == [schedule_of(graph, own, block.reductions) for graph, own in gathers]
        assert proposals[1] == [greedy_schedule(graph).schedule for graph in graphs]


@pytest.mark.usefixtures("one_of_four")
@pytest.mark.slow
def test_the_planner_keeps_what_it_is_left_to_decide_as_the_budget_allows(tmp_path: Path) -> None:
    def again(plan: BucketPlan) -> set[str]:
        return {fqn for bucket in plan.backward for fqn in bucket.fqns}

    needed = again(planned(tmp_path / "all"))
    everything = planned(tmp_path / "free", reshard="auto")
    assert (
        {"output.weight", "norm.weight"} < set(everything.keep_unsharded) < needed
    )  # the last ones hide under what is before
    assert again(everything) == needed - set(everything.keep_unsharded)
    some = planned(tmp_path / "some", reshard={"*": "auto", "output.*": True, "layers.0.*": False})
    assert "output.weight" in again(some)
    assert set(some.keep_unsharded) >= {fqn for fqn in needed if fqn.startswith("layers.0.")}
    with pytest.raises(Exception, match="needs at least") as error:
        planned(tmp_path / "none", reshard="auto", memory_budget=1)
    least = int(re.findall(r"at least (\d+)", str(error.value))[0])
    tight, loose = (
        set(planned(tmp_path / str(n), reshard="auto", memory_budget=least + n).keep_unsharded) for n in (0, 150_000)
    )
    assert tight < loose < needed  # with less memory gathers come later, and other weights are worth keeping
    (short, _), (enough, peak), (free, _) = (predicted(tmp_path / name) for name in ("0", "150000", "free"))
    assert short > enough > 0.995 * free
    assert peak <= least + 150_000
    quick = replace(
        PROFILE, network=flat("quick", 8, alpha_s=1e-9, bandwidth_bytes_per_s=1e15), collective_launch_s=0.0
    )
    assert planned(tmp_path / "quick", reshard="auto", profile=quick).keep_unsharded == ()


@pytest.mark.usefixtures("one_of_four")
@pytest.mark.slow
def test_without_a_budget_the_memory_of_a_gpu_is_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def peak(folder: str) -> int:
        return predicted(tmp_path / folder)[1]

    def bytes_of_a_device(nbytes: int) -> None:
        monkeypatch.setattr("simplefsdp.compile.options.device_memory_bytes", lambda _device: nbytes)

    assert device_memory_bytes(torch.device("cpu")) is None
    bytes_of_a_device(1 << 60)
    free = planned(tmp_path / "free", reshard="auto")
    for folder, nbytes in (("large", 2 * peak("free")), ("small", int(peak("free") / 0.95)), ("tiny", 1000)):
        bytes_of_a_device(nbytes)
        assert (planned(tmp_path / folder, reshard="auto") == free) == (folder == "large")
        assert (peak(folder) <= 0.92 * nbytes) == (folder != "tiny")
        assert ("bytes of a device of 1000; it is planned for the least memory" in caplog.text) == (folder == "tiny")
    with pytest.raises(Exception, match="needs at least") as error:
        planned(tmp_path / "none", memory_budget=1)
    least = int(re.findall(r"at least (\d+)", str(error.value))[0])
    assert peak("tiny") == pytest.approx(0.97 * least, abs=2)


@pytest.mark.usefixtures("one_of_four")
@pytest.mark.slow
def test_reshard_auto_follows_a_saved_plan_and_is_true_without_a_planner(tmp_path: Path) -> None:
    whole = planned(tmp_path / "free", reshard="auto")
    assert planned(tmp_path / "saved", whole, reshard="auto") == whole
    saved = planned(tmp_path / "block", "block")
    assert planned(tmp_path / "again", saved, reshard="auto") == saved
    for plan in ("block", "greedy"):
        assert planned(tmp_path / f"{plan} auto", plan, reshard="auto").keep_unsharded == ()
    with pytest.raises(Exception, match="kept unsharded after forward in the plan, not in the model"):
        planned(tmp_path / "refused", whole)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_greedy_under_a_budget_that_it_does_not_keep_is_what_needs_least(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="needs at least") as error:
        planned(tmp_path / "none", "greedy", memory_budget=1)
    least = int(re.findall(r"at least (\d+)", str(error.value))[0])
    found = planned(tmp_path / "least", "greedy", memory_budget=least)
    assert any(len(bucket.fqns) > 1 for bucket in planned(tmp_path / "free", "greedy").reductions)
    assert all(len(bucket.fqns) == 1 for bucket in (*found.backward, *found.reductions))


@pytest.mark.usefixtures("one_of_four")
def test_profile_budget_and_planner_are_in_the_cache_key_and_compared(tmp_path: Path) -> None:
    model = simple_fsdp(tiny_llama())
    path = tmp_path / "profile.json"
    save(PROFILE, path)
    other = replace(PROFILE, launch_s=2e-6)
    made = [
        compilation_context(list(model.parameters()), parse_options(options))
        for options in (
            {"plan": "auto", "profile": PROFILE},
            {"plan": "auto", "profile": path},
            {"plan": "auto", "profile": other},
            {"plan": "auto", "profile": PROFILE, "memory_budget": "1GiB"},
            {"plan": "greedy", "profile": PROFILE},
        )
    ]
    keys = [context.key for context in made]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 4
    assert len({context.common_facts for context in made}) == 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"plan": "greedy"}, ValueError, "option 'plan'='greedy': needs option 'profile', or `torchrun"),
        (
            {"plan": "auto", "memory_budget": 1},
            ValueError,
            "option 'memory_budget': needs option 'profile', or `torchrun",
        ),
        ({"plan": "block", "memory_budget": 1, "profile": PROFILE}, ValueError, "option 'memory_budget': needs plan="),
        (
            {"plan": manual_plan([]), "memory_budget": 1, "profile": PROFILE},
            ValueError,
            "option 'memory_budget': needs",
        ),
        ({"profile": 3}, TypeError, "option 'profile': expected a HardwareProfile, the path of one or a name, found 3"),
        ({"profile": PROFILE, "memory_budget": "60 gib b"}, ValueError, "option 'memory_budget': expected bytes, as"),
        ({"profile": PROFILE, "memory_budget": -1}, ValueError, "option 'memory_budget': expected bytes, as"),
        ({"profile": PROFILE, "memory_budget": True}, ValueError, "option 'memory_budget': expected bytes, as"),
        ({"profile": PROFILE, "memory_budget": 1.5}, ValueError, "option 'memory_budget': expected bytes, as"),
        ({"wire": "int8"}, ValueError, "option 'wire': unknown choice 'int8' (valid: 'given', 'auto')"),
        ({"wire": "auto", "plan": "block"}, ValueError, "option 'wire'='auto': needs plan='auto' or a saved plan"),
    ],
)
@pytest.mark.usefixtures("one_of_four")
def test_bad_options_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    parameters = list(simple_fsdp(nn.Linear(2, 8)).parameters())
    with pytest.raises(error, match=re.escape(message)):
        compilation_context(parameters, parse_options(options))


@pytest.mark.parametrize("plan", ["auto", "greedy"])
def test_where_nothing_is_sharded_nothing_is_searched(plan: str) -> None:
    assert compilation_context([], parse_options({"plan": plan})).request == BLOCK


def test_a_profile_that_is_not_there_or_not_valid_is_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(ValueError, match=r"profile file .*profile\.json: FileNotFoundError"):
        compilation_context([], parse_options({"profile": str(path)}))
    save(PROFILE, path)
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"launch_s": -1}))
    with pytest.raises(ValueError, match=r"profile\.json: ValueError: profile test: launch_s: expected a positive"):
        compilation_context([], parse_options({"profile": path}))


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [(7, 7), ("7", 7), ("60GiB", 60 * 2**30), ("1.5 kib", 1536), ("500 MB", 500 * 10**6), ("2B", 2)],
)
def test_bytes_are_numbers_with_units(value: Any, nbytes: int) -> None:
    assert parse_bytes(value) == nbytes


@pytest.mark.usefixtures("one_of_four")
@pytest.mark.slow
def test_hybrid_shards_and_weights_that_are_kept_are_planned_too() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    choices: list[tuple[dict[str, Any], bool]] = [
        ({"mesh": mesh}, False),
        ({"mesh": mesh, "reshard_after_forward": "auto"}, True),
        ({"reshard_after_forward": False}, True),
        ({"mesh": init_device_mesh("cpu", (4,)), "mode": "replicate", "reshard_after_forward": "auto"}, False),
    ]
    for options, keeps in choices:
        captured = capture(simple_fsdp(tiny_llama(), **options), *batch(0, 0), plan="auto", profile=PROFILE)
        assert len(captured.backward.nodes) > 100
        if "mode" not in options:  # replicated weights are whole anyway
            assert bool(whole_weights_among_outputs(captured.forward)) == keeps


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize("name", ["auto", "greedy"])
def test_evaluation_has_a_plan_of_its_own(tmp_path: Path, name: str) -> None:
    model = simple_fsdp(tiny_llama())
    options: Any = {"plan": name, "profile": PROFILE, "lower_with": "aot_eager", "report_dir": str(tmp_path)}
    with torch.no_grad():
        torch.compile(model, backend="simplefsdp", options=options)(*batch(0, 0))
    (path,) = tmp_path.glob("*/plan.json")
    found = BucketPlan.load(path)
    assert sum(len(bucket.fqns) for bucket in found.forward) == len(list(model.parameters()))
    assert found.backward == found.reductions == ()


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_only_what_cannot_be_hidden_travels_in_its_format(tmp_path: Path) -> None:
    formats = WireFormat(gather="int8", reduce="int8")
    found = {}
    for name, rate in (("slow", 1e6), ("fast", 1e13)):
        network = flat(name, 4, alpha_s=1e-6, bandwidth_bytes_per_s=rate, source="made up")
        options: Any = {"profile": replace(PROFILE, network=network), "wire": "auto"}
        found[name] = planned(tmp_path / name, formats=formats, **options)
    fqns = {fqn for fqn, _ in tiny_llama().named_parameters()}
    assert {each.fqn for each in found["slow"].wire} == fqns
    assert not found["fast"].wire
    for name, encoded in (("slow", True), ("fast", False)):
        (graph,) = (tmp_path / name).glob("*/*_forward_after_bucket.txt")
        assert ("encode_shards" in graph.read_text()) == encoded
    given = planned(tmp_path / "given", formats=formats)
    assert {each.formats for each in given.wire} == {("int8", "int8")}
    wire = tuple(each._replace(gather="bf16", reduce="bf16-fp32sum") for each in given.wire)
    assert planned(tmp_path / "mild", replace(given, wire=wire), formats=formats, wire="auto").wire == wire
    for direction, encoded_as in (("forward", "bf16"), ("backward", "bf16-fp32sum")):
        (graph,) = (tmp_path / "mild").glob(f"*/*_{direction}_after_bucket.txt")
        assert encoded_as in graph.read_text()
        assert not re.search(r"\bint8\b", graph.read_text())
    again = planned(tmp_path / "again", found["fast"], formats=formats, wire="auto")
    assert again == found["fast"]
    with pytest.raises(Exception, match=r"travels as None in the plan, as \('int8', 'int8'\) in the model"):
        planned(tmp_path / "refused", found["fast"], formats=formats)


class Scaled(nn.Module):
    """A weight and a bias that one operator reads, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.scale * x).sum()


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_a_saved_plan_is_accepted_again(tmp_path: Path, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    options: Any = {"plan": "auto", "profile": PROFILE, "lower_with": "aot_eager", "report_dir": str(tmp_path)}
    for plan in ("auto", "saved"):
        model = simple_fsdp(Scaled(), mesh)
        if plan == "saved":
            (path,) = tmp_path.glob("*/plan.json")
            options = {"plan": BucketPlan.load(path), "lower_with": "aot_eager"}
        torch._dynamo.reset()
        torch.compile(model, backend="simplefsdp", options=options)(torch.ones(2, 8)).backward()
        assert all(param.grad is not None for param in model.parameters())


def _same_training(lowering: str, tolerance: float) -> None:
    found = []
    plans: list[tuple[str, Reshard]] = [("none", True), ("auto", True), ("auto", "auto")]
    for plan, reshard in plans + ([("greedy", True)] if lowering == "aot_eager" else []):
        torch.manual_seed(0)
        model = simple_fsdp(tiny_llama(layers=2), reshard_after_forward=reshard)
        options: Any = {"plan": plan, "profile": PROFILE, "lower_with": lowering}
        compiled = torch.compile(model, backend="simplefsdp", options=options)
        found.append(train(model, compiled, 2, dist.get_rank()))
        torch._dynamo.reset()
    for losses, gradients, values in found[1:]:
        torch.testing.assert_close(losses, found[0][0], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(gradients, found[0][1], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(values, found[0][2], rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(("lowering", "tolerance"), [("aot_eager", 0.0), ("inductor", 1e-5)])
def test_training_is_that_without_a_plan(two_ranks: Ranks, lowering: str, tolerance: float) -> None:
    two_ranks.run(_same_training, lowering, tolerance)


def test_more_time_is_given_up_for_memory_where_it_is_predicted_less_exactly_and_none_within_a_budget() -> None:
    on_cpu = SearchRequest("auto", PROFILE, None)
    on_gpu = replace(on_cpu, device_bytes=80 << 30)
    within = replace(on_gpu, budget=40 << 30)
    assert time_tolerance(within) == 0.0 < time_tolerance(on_cpu) < time_tolerance(on_gpu) < 0.05
