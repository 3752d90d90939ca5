"""``simplefsdp plan``: what is planned on a laptop is what the compilation plans."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import compile_fx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from simplefsdp import BucketPlan, rehearsal, simple_fsdp
from simplefsdp.cli import main as cli
from simplefsdp.cli.explain import read
from simplefsdp.hardware.catalog import built_in
from simplefsdp.hardware.profile import save
from simplefsdp.models import llama

pytestmark = pytest.mark.compile

SMALL = ("--model", "llama3-debug", "--ranks", "8", "--profile", "h100", "--seq", "128")


def plan(monkeypatch: pytest.MonkeyPatch, *args: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["simplefsdp", "plan", *map(str, args)])
    cli.main()


def stop(*_: Any, **__: Any) -> Any:
    """End a compilation in place of lowering its graphs."""
    raise RuntimeError("planned, and not lowered")


def compiled(folder: Path, tp: int = 1, keep_unsharded: str = "", **options: Any) -> BucketPlan:
    """Return the plan of a compilation on CPU for the same model."""
    with rehearsal.world(8, "h100-1-node"):
        model = llama.build("debug", layers=8, max_seq_len=1024)
        mesh = None
        if tp > 1:
            both = init_device_mesh("cpu", (8 // tp, tp), mesh_dim_names=("shard", "tp"))
            model.parallelize(both["tp"])
            mesh = both["shard"]
        reshard: Any = keep_unsharded or True
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        simple_fsdp(model, mesh, mp_policy=policy, reshard_after_forward=reshard)
        torch._dynamo.reset()
        chosen: Any = {"profile": "h100/h100-1-node", "report_dir": str(folder), "lower_with": "inductor", **options}
        tokens = torch.zeros((1, 128), dtype=torch.int64)
        with (
            mock.patch.object(compile_fx, "compile_fx_inner", stop),
            pytest.raises(BackendCompilerFailed, match="planned"),
        ):
            torch.compile(model, backend="simplefsdp", options=chosen)(tokens, tokens)
    (path,) = folder.glob("*/plan.json")
    return BucketPlan.load(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"keep_unsharded": "auto", "memory_budget": "16MiB"},
        {"tp": 2},
    ],
)
def test_the_plan_is_that_of_the_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    cpu = tmp_path / "cpu.json"  # a CPU's matmuls cast no gradients
    save(replace(built_in("h100/h100-1-node"), device_bytes=None), cpu)
    flags = [flag for name, value in options.items() for flag in (f"--{name.replace('_', '-')}", value)]
    plan(monkeypatch, *SMALL, "--profile", cpu, "--layers", 8, *flags, "--out", tmp_path / "planned")
    planned, compiled_plan = (
        BucketPlan.load(tmp_path / "planned" / "plan.json"),
        compiled(tmp_path / "compiled", **options),
    )
    assert planned == compiled_plan
    assert bool(planned.keep_unsharded) == ("keep_unsharded" in options)
    assert planned.hash == compiled_plan.hash
    (one,), (other,) = (read(tmp_path / name).values() for name in ("planned", "compiled"))
    if planned.keep_unsharded:  # here it is worked out what becomes of the graphs, there they are made
        assert one.prediction.step_s == pytest.approx(other.prediction.step_s)
        assert one.prediction.peak_bytes == pytest.approx(other.prediction.peak_bytes, rel=1e-3)
    else:
        assert one.costs == other.costs
        assert one.prediction == other.prediction


def test_plan_prints_what_a_step_takes_and_saves_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(monkeypatch, *SMALL, "--out", tmp_path)
    said = capsys.readouterr().out
    (explanation,) = read(tmp_path).values()
    tokens_per_s = 8 * 128 / explanation.prediction.step_s
    assert (
        f"llama3-debug, 1 x 128 tokens a rank, 8 ranks of h100/h100-1-node, bf16: {tokens_per_s:,.0f} tokens/s" in said
    )
    assert explanation.summary() in said
    assert explanation.costs.memory_limit_bytes < 79 * 2**30  # of the GPU's memory
    assert f"options={{'plan': '{tmp_path / 'plan.json'}'}} carries it out" in said
    assert {path.name for path in tmp_path.iterdir()} == {"plan.json", "costs.json", "prediction.json", "timeline.json"}


def test_matmuls_of_a_gpu_cast_large_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan(monkeypatch, "--model", "llama3-1b", "--layers", "1", "--ranks", "8", "--profile", "h100", "--out", tmp_path)
    (explanation,) = read(tmp_path).values()
    copied = {one.fqn: one.copied_from for one in explanation.costs.backward.reductions}
    assert copied["layers.0.feed_forward.w1.weight"] is None
    assert copied["layers.0.attention.wk.weight"] is not None  # a copy takes less than one more member of a group


@pytest.mark.slow
def test_a_sweep_is_a_table_and_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(monkeypatch, *SMALL, "--layers", 2, "--sweep", "ranks=8,64", "seq=64,128", "--out", tmp_path)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [tuple(row.split(" | ")[:2]) for row in rows[2:]] == [
        ("| 8", "64"),
        ("| 8", "128"),
        ("| 64", "64"),
        ("| 64", "128"),
    ]
    (explanation,) = read(tmp_path / "ranks_64" / "seq_128").values()
    assert f"| {1e3 * explanation.prediction.step_s:.1f} | " in rows[-1]
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = llama.CONFIGS["debug"]
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](tokens.float().unsqueeze(-1).expand(-1, -1, 4))
        torch._dynamo.graph_break()
        return self.layers[1](x)


class Alike(Breaks):
    """A model of somebody else, whose blocks are traced one by one."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](tokens.float().unsqueeze(-1).expand(-1, -1, 4)))


def test_any_model_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan(monkeypatch, "--model", f"{__name__}:Alike", *SMALL[2:], "--out", tmp_path)
    found = BucketPlan.load(tmp_path / "plan.json")
    assert [fqn for fqn, _ in found.parameters] == [f"layers.{i}.{name}" for i in (0, 1) for name in ("weight", "bias")]


def test_the_memory_and_work_of_the_optimizer_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {}
    for name in ("sgd", "muon"):
        plan(monkeypatch, *SMALL, "--plan", "block", "--layers", 2, "--optimizer", name, "--out", tmp_path / name)
        (explanation,) = read(tmp_path / name).values()
        costs[name] = explanation.costs
    assert costs["sgd"].resident_bytes < costs["muon"].resident_bytes
    assert costs["sgd"].outside_bytes < costs["muon"].outside_bytes
    assert costs["sgd"].outside_s < costs["muon"].outside_s


@pytest.mark.slow
def test_wire_formats_are_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for name, args in {"none": [], "given": [], "auto": ["--wire-auto"]}.items():
        formats = [] if name == "none" else ["--wire-gather", "int8", "--wire-reduce", "int8"]
        plan(monkeypatch, *SMALL, "--layers", 2, *formats, *args, "--out", tmp_path / name)
        found[name] = BucketPlan.load(tmp_path / name / "plan.json")
    *_, given, auto = capsys.readouterr().out.split("predicted for")
    assert " reduced, sent as " in given
    (explanation,) = read(tmp_path / "given").values()
    kind = explanation.costs.forward.gathers[0].kind
    assert (kind.wire_format, kind.plain.wire_format) == ("int8", None)
    assert not found["none"].wire
    assert {each.formats for each in found["given"].wire} == {("int8", "int8")}
    assert len(found["given"].wire) == len(found["given"].parameters)
    assert set(found["auto"].wire) <= set(found["given"].wire)
    assert ("sent as" in auto) == bool(found["auto"].wire)


@pytest.mark.slow
@pytest.mark.compile
def test_matmuls_cast_gradients_that_a_plan_may_leave_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient that is encoded for certain is read in bfloat16, which is fewer bytes."""
    cast = {}
    for name, args in {"given": [], "auto": ["--wire-auto"]}.items():
        wide = ["--model", "llama3-1b", "--layers", 2, "--ranks", 8, "--profile", "h100", "--seq", 128]
        plan(monkeypatch, *wide, "--wire-reduce", "int8", *args, "--out", tmp_path / name)
        (explanation,) = read(tmp_path / name).values()
        cast[name] = {each.fqn: each.copied_from is None for each in explanation.costs.backward.reductions}
    assert cast["auto"]["layers.0.feed_forward.w1.weight"]
    assert not cast["given"]["layers.0.feed_forward.w1.weight"]


def test_over_several_nodes_gradients_in_a_format_are_planned_in_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    formats = ["--wire-reduce", "int8", "--wire-between-nodes", "int4", "--network", "h100-8-nodes"]
    plan(monkeypatch, *SMALL, "--ranks", 16, "--layers", 2, *formats, "--out", tmp_path)
    found = BucketPlan.load(tmp_path / "plan.json")
    assert ", sent between nodes " in found.explain()
    assert {each.formats for each in found.wire} == {(None, "int8", "int4")}
    (explanation,) = read(tmp_path).values()
    assert explanation.costs.backward.reductions[0].kind.wire_formats == ("int8", "int4")


def test_ranks_that_leave_a_node_in_part_are_planned_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan(monkeypatch, *SMALL, "--ranks", 12, "--layers", 2, "--wire-reduce", "int8", "--out", tmp_path)
    assert {each.formats for each in BucketPlan.load(tmp_path / "plan.json").wire} == {(None, "int8")}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--model", "llama3-9b", "--ranks", 8, "--profile", "h100"], "--model: unknown model 'llama3-9b'"),
        (["--model", "llama3-8b", "--profile", "h100"], "--ranks: missing"),
        ([*SMALL, "--batch", 0], "--batch: expected a positive number, found 0"),
        ([*SMALL, "--profile", "h101"], "unknown device 'h101'; did you mean 'h100'"),
        ([*SMALL, "--network", "h100-9-nodes"], "unknown network 'h100-9-nodes'"),
        ([*SMALL, "--ranks", 4096], "--network: none that is built in has 4096 ranks"),
        ([*SMALL, "--ranks", 64, "--network", "h100-1-node"], "--ranks: 64, but network 'h100-1-node' has 8"),
        ([*SMALL, "--hybrid"], "--hybrid: 8 ranks are not several nodes of 8"),
        ([*SMALL, "--memory-budget", "75GiB", "--plan", "block"], "--memory-budget: needs --plan auto or greedy"),
        ([*SMALL, "--keep-unsharded", "auto", "--plan", "greedy"], "--keep-unsharded: auto needs --plan auto"),
        ([*SMALL, "--wire-auto", "--plan", "block"], "--wire-auto: needs --plan auto"),
        ([*SMALL, "--wire-auto"], "--wire-auto: needs --wire-gather or --wire-reduce, the formats that are allowed"),
        ([*SMALL, "--wire-between-nodes", "int4"], "--wire-between-nodes: needs --wire-reduce"),
        ([*SMALL, "--wire-error-feedback"], "--wire-error-feedback: needs --wire-reduce"),
        (
            [*SMALL, "--wire-error-feedback", "--wire-reduce", "int8"],
            "wire: tok_embeddings.weight: error_feedback needs mode 'hybrid_shard', where replicas round sums of their",
        ),
        ([*SMALL, "--memory-budget", "much"], "expected bytes, as 60_000_000 or '60GiB', found 'much'"),
        ([*SMALL, "--memory-budget", "1MiB"], "this step needs at least"),
        ([*SMALL, "--sweep", "rank=8"], "--sweep: unknown argument 'rank'; did you mean 'ranks'"),
        ([*SMALL, "--sweep", "seq=many"], "--sweep seq=many: expected seq=A,B with numbers"),
        (["--model", f"{__name__}:Breaks", *SMALL[2:]], "has a graph break, and each graph a plan of its own"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[Any], expected: str) -> None:
    with pytest.raises(SystemExit) as error:
        plan(monkeypatch, *args, "--out", tmp_path)
    assert str(error.value).startswith("simplefsdp plan: ")
    assert expected in str(error.value)
    assert not list(tmp_path.iterdir())
