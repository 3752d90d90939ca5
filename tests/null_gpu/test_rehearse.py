"""``simplefsdp rehearse --simulate``, as its user runs it, on small models."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from simplefsdp.cli import main as cli
from simplefsdp.null_gpu.clock import SHORTEST_KERNEL_S
from simplefsdp.null_gpu.rank import communicators, null_rank

pytestmark = pytest.mark.compile
DEBUG = "--model llama3-debug --layers 2 --seq 256 --simulate"


def rehearse(arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["simplefsdp", "rehearse", *arguments.split()])
    cli.main()


def test_systems_are_simulated_with_traces_of_streams_waits_and_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rehearse(f"{DEBUG} --ranks 64 --against fsdp2 --json --trace {tmp_path}", monkeypatch)
    found: Any = json.loads(capsys.readouterr().out)
    rehearse(f"{DEBUG} --ranks 64 --json", monkeypatch)  # the caches are warm
    (again,) = json.loads(capsys.readouterr().out)["results"]
    assert again["predicted"] == found["results"][0]["predicted"]
    results = {result["system"]: result for result in found["results"]}
    assert (list(results), found["failed"]) == (["block", "fsdp2"], {})
    assert results["block"]["copies"] < results["fsdp2"]["copies"]
    assert results["block"]["copied_bytes"] < results["fsdp2"]["copied_bytes"]
    assert results["fsdp2"]["predicted"] is None
    assert results["block"]["predicted"]["step_s"] > 0
    assert results["block"]["predicted"]["peak_bytes"] > 0
    for name, result in results.items():
        assert result["host_waits"] == 0
        assert result["unknown"] == {}
        assert result["tokens_per_s"] == pytest.approx(256 / result["step_s"])
        with gzip.open(tmp_path / f"{name}.json.gz", "rt") as file:
            events = json.load(file)["traceEvents"]
        tracks = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
        assert {"stream 0", "waits"} < set(tracks)
        took = dict.fromkeys(tracks.values(), 0.0)
        for event in events:
            if event["ph"] == "X":
                took[event["tid"]] += 1e-6 * event["dur"]
                assert event["ts"] >= 0
        assert took[tracks["waits"]] == pytest.approx(result["exposed_s"])
        of_collectives = sum(took[number] for track, number in tracks.items() if track.startswith("communicator"))
        assert of_collectives == pytest.approx(result["communication_s"])
        memory = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
        assert max(memory) == pytest.approx(result["peak_bytes"], rel=1e-3)  # the trace does not round sizes up
    assert not dist.is_initialized()


def test_the_table_of_a_hybrid_tensor_parallel_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rehearse(f"{DEBUG} --ranks 16 --tp 2 --hybrid --plan fsdp2-compile --dtype fp32", monkeypatch)
    out = capsys.readouterr().out
    assert "as rank 0 of 16, tensor parallel over 2; simulated: structure of torch's own CUDA calls" in out
    assert "times of the profile h100/h100-8-nodes" in out
    assert out.count("| fsdp2-compile |") == 1


def test_encoding_takes_what_its_bytes_take_and_what_travels_is_less(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found, spans = [], []
    for wire in ("", "--wire-gather int8 --wire-reduce int8 --wire-between-nodes int4"):
        rehearse(f"{DEBUG} --ranks 64 --json --trace {tmp_path} {wire}", monkeypatch)
        found += json.loads(capsys.readouterr().out)["results"]
        with gzip.open(tmp_path / "block.json.gz", "rt") as file:
            spans.append([event for event in json.load(file)["traceEvents"] if event["ph"] == "X"])
    plain, encoded = found
    assert encoded["unknown"] == {}
    assert encoded["collectives"] > plain["collectives"]  # reductions have two steps
    gathered, gathered_encoded = (
        [event["args"]["bytes"] for event in events if event["name"].startswith("all_gather")] for events in spans
    )
    # Of bf16 a byte is left, and the scales: 4 bytes for 128 values at most.
    assert 0.5 * (1 + 4 / 128) < sum(gathered_encoded) / sum(gathered) < 0.6
    encoding = [event["name"] for event in spans[1] if event["cat"] == "format"]
    assert encoded["kernels_s"]["format"] >= len(encoding) * SHORTEST_KERNEL_S
    assert "format" not in plain["kernels_s"]
    # Each bucket is encoded and decoded, a gradient's sums over a node too.
    reduced = sum(event["name"] == "reduce_scatter" for event in spans[0])
    assert [encoding.count(name) for name in ("encode_kernel", "decode_kernel", "encode_sum_kernel")] == [
        len(gathered_encoded) + reduced,
        len(gathered_encoded),
        reduced,
    ]


@pytest.mark.subprocess
def test_the_benchmark_of_a_gpu_puts_what_is_simulated_beside_what_is_measured(tmp_path: Path) -> None:
    environment = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable}
    command = ["benchmarks/gpu.sh", "smoke", "--layers", "1", "--steps", "2", "--simulate"]
    command += ["--embedding-lookup", "exchange", "--systems"]
    subprocess.run([*command, "fsdp2,block"], check=True, env=environment)
    page = (tmp_path / "gpu-smoke.md").read_text()
    assert "simulated: a null GPU (NVIDIA H100 80GB HBM3), torch " in page
    measured, simulated = (page.count(row) for row in ("| 1 | fsdp2 |", "| 1 | block, exchange |"))
    assert (measured, simulated) == (2, 2)
    (runs,) = json.loads((tmp_path / "gpu-smoke.json").read_text())["runs"].values()
    for run in runs:
        row = next(line for line in page.splitlines()[::-1] if f"| {run['system']} |" in line)
        times = [1e3 * run["simulated"]["step_s"], 1e3 * run["step_s"]]
        assert row.split("|")[3:6] == [f" {each:.1f} " for each in times] + [f" {times[0] / times[1]:.3f}x "]
        del run["simulated"]
    # Rows that were measured on another day, without a simulation, are as good.
    (tmp_path / "gpu-smoke.json").write_text(json.dumps({"heading": "of another day", "runs": {"1": runs[1:]}}))
    subprocess.run([*command, "none of them", "--measured"], check=True, env=environment)
    again = (tmp_path / "gpu-smoke.md").read_text()
    assert again.startswith("of another day")
    assert again.splitlines()[-1].startswith("| 1 | block, exchange |")
    assert "fsdp2" not in again


def test_communicators_have_the_ranks_of_their_groups() -> None:
    with null_rank(16) as recorder:
        mesh = init_device_mesh("cuda", (2, 2, 4), mesh_dim_names=("replicate", "shard", "tp"))
        assert mesh.size() == 16
        found = communicators(recorder)
    assert set(found.values()) == {tuple(range(16)), (0, 8), (0, 4), (0, 1, 2, 3)}
    assert len(found) == 4
