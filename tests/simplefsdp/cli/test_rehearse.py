import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock, Timeout
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from simplefsdp import rehearsal
from simplefsdp.calibration import calibrate
from simplefsdp.cli import main as cli
from simplefsdp.cli import rehearse as command
from simplefsdp.models import llama
from simplefsdp.rehearsal.systems import SYSTEMS, Parallelism
from simplefsdp.rehearsal.timing import estimated_step_bytes, flops_per_token
from simplefsdp.rehearsal.workload import Workload
from tests.simplefsdp.rehearsal import models

TINY = "--model tests.simplefsdp.rehearsal.models:Named --seq 8 --steps 2"
FAST = "--alpha 1e-5 --bandwidth 1e9"
SIMULATED = "--model llama3-debug --seq 8 --simulate"


def rehearse(arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["simplefsdp", "rehearse", *arguments.split()])
    cli.main()


@pytest.mark.slow
def test_every_system_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "_REPEATS", 1)
    systems = ["auto", "block", "greedy", "fsdp2", "fsdp2-compile", "inductor", "ddp", "single"]
    rehearse(f"{TINY} {FAST} --ranks 4 --json --plan auto --against {','.join(systems[1:])}", monkeypatch)
    found: Any = json.loads(capsys.readouterr().out)
    assert found["arguments"]["ranks"] == 4
    results = {result["system"]: result for result in found["results"]}
    assert list(results) == systems
    parameters = sum(p.numel() for p in models.Named().parameters())
    for name, result in results.items():
        assert result["step_s"] > 0
        assert result["tokens_per_s"] == pytest.approx(8 / result["step_s"])
        assert result["peak_bytes"] > sum(result["resident_bytes"].values())
        assert (result["communication_s"] > 0) == (result["collectives"] > 0) == (name != "single")
        assert result["l2_s"] >= result["l1_s"] - 1e-9 > 0
        assert result["mfu"] is None
        whole = name in ("ddp", "single")
        assert result["resident_bytes"]["parameters"] == 4 * parameters / (1 if whole else 4)
    assert results["block"]["collectives"] < results["inductor"]["collectives"]
    assert not dist.is_initialized()


@pytest.mark.subprocess
@pytest.mark.compile
def test_the_table_and_other_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--seq 8 --steps 1 --ranks 8 --network cpu-hybrid --hybrid --rank 5 --plan none --dtype bf16"
    rehearse(f"--model tests.simplefsdp.rehearsal.models:WithLogits {arguments}", monkeypatch)
    out = capsys.readouterr().out
    assert "1 x 8 tokens, as rank 5 of 8 on cpu-hybrid" in out
    assert out.count("| inductor |") == 1


def test_a_turn_is_held_from_the_first_collective_until_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lock = tmp_path / "turn"
    held = []
    measured = command.measure

    def measure(*args: Any) -> Any:
        gc.collect()
        with pytest.raises(Timeout):
            FileLock(lock).acquire(timeout=0)
        held.append(True)
        return measured(*args)

    monkeypatch.setattr(command, "measure", measure)
    rehearse(f"{TINY} {FAST} --ranks 2 --plan fsdp2 --turn {lock}", monkeypatch)
    assert held
    FileLock(lock).acquire(timeout=0)


@pytest.mark.compile
def test_a_profile_and_a_budget_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SIMPLEFSDP_REPORT_DIR", str(tmp_path))
    rehearse(f"{TINY} {FAST} --ranks 2 --plan auto --profile h200 --memory-budget 1GiB --trace {tmp_path}", monkeypatch)
    (path,) = tmp_path.glob("*/prediction.json")
    prediction = json.loads(path.read_text())
    assert prediction["profile"] == "h200/as given"
    assert (tmp_path / "auto.json.gz").exists()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="'memory_budget'=1024: this step needs at least"):
        rehearse(f"{TINY} {FAST} --ranks 2 --plan auto --profile h200 --memory-budget 1KiB", monkeypatch)


@pytest.mark.slow
@pytest.mark.compile
def test_a_tensor_parallel_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"--seq 8 --steps 1 --ranks 8 --tp 2 {FAST} --plan none --layers 1 --json"
    rehearse(f"--model llama3-debug {arguments}", monkeypatch)
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["tokens_per_s"] == pytest.approx(8 / 2 / result["step_s"]), "two devices have the same tokens"
    config = llama.CONFIGS["debug"]
    every = sum(param.numel() for param in llama.build("debug", layers=1).parameters())
    norms = 3 * config.dim  # whole on both
    rope = 2 * config.max_seq_len * config.head_dim // 2
    assert result["resident_bytes"]["parameters"] == 4 * (((every - norms) / 2 + norms) / 4 + rope)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (f"{TINY} {FAST} --ranks 4 --tp 3", "--tp: 4 ranks are not several groups of 3"),
        (f"{TINY} {FAST} --ranks 4 --tp 4", "--tp: 4 ranks are not several groups of 4"),
        (f"{TINY} {FAST} --ranks 4 --tp 2", r"--tp: Named has no method parallelize\(mesh\)"),
        (
            f"--model llama3-debug {FAST} --ranks 16 --tp 8",
            "--tp: mesh: kv_heads = 4 cannot be dealt evenly to 8 ranks",
        ),
        (f"{TINY} {FAST} --ranks 0", "--ranks: expected a positive number, found 0"),
        (f"{TINY} {FAST} --ranks 4 --rank 4", "rank: 4 is outside of a world of 4"),
        (f"{TINY} {FAST} --ranks 4 --batch -1", "--batch: expected a positive number, found -1"),
        (f"{TINY} --ranks 4 --alpha 0 --bandwidth 1", "--alpha: expected a positive number, found 0"),
        (f"{TINY} --ranks 4 --alpha 1 --bandwidth nan", "--bandwidth: expected a positive number, found nan"),
        (f"{TINY} --ranks 4", "--network: missing"),
        pytest.param(
            f"{TINY} {FAST} --ranks 4 --device cuda",
            "--device: cuda, but torch sees no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        (f"{TINY} --ranks 4 --alpha 1", "--network: missing"),
        (f"{TINY} --ranks 4 --alpha 1 --network cpu-latency", "--network: says alpha and bandwidth itself"),
        (f"{TINY} --ranks 4 --network cpu-latencies", "unknown network 'cpu-latencies'; did you mean 'cpu-latency'"),
        (f"{TINY} --ranks 9 --network cpu-bandwidth", "ranks: 9, but network 'cpu-bandwidth' has 8"),
        (f"{TINY} {FAST} --ranks 4 --plan blok", "--plan: unknown system 'blok'; did you mean 'block'"),
        (f"{TINY} {FAST} --ranks 4 --against fsdp2,fsdp3", "--against: unknown system 'fsdp3'; did you mean 'fsdp2'"),
        (f"{TINY} {FAST} --ranks 4 --profile h300", "profile 'h300/h100-1-node': unknown device 'h300'; did you mean"),
        (f"{TINY} {FAST} --ranks 4 --plan auto --memory-budget 1XB", "option 'memory_budget': expected bytes"),
        (f"{TINY} {FAST} --ranks 4 --memory-budget 1GiB", "--memory-budget: needs --plan auto or greedy"),
        (f"{TINY} {FAST} --ranks 4 --layers 2", "--layers: .* has to see to that itself"),
        (f"{TINY} --ranks 6 --network cpu-hybrid --hybrid", "--hybrid: 6 ranks are not several nodes of 4"),
        (f"--model llama3-9b {FAST} --ranks 4", "--model: unknown model 'llama3-9b'; did you mean 'llama3-8b'"),
        (f"--model llama3-8b {FAST} --ranks 4 --layers 0", "--layers: expected a positive number, found 0"),
        (f"--model json:nothing {FAST} --ranks 4", "--model json:nothing: module 'json' has no attribute"),
        (f"--model no_such:model {FAST} --ranks 4", "--model no_such:model: No module named 'no_such'"),
        (f"--model tests.simplefsdp.rehearsal.models:Tagger {FAST} --ranks 4", "its config has no vocab_size"),
        (f"{TINY} {FAST} --ranks 4 --device h200", "--device: h200 needs --simulate"),
        (f"{TINY} {FAST} --ranks 4 --device gpu", "--device: unknown device 'gpu'"),
        (f"{SIMULATED} --ranks 4 --device cuda", "--device: unknown device to simulate 'cuda'"),
        (f"{SIMULATED} --ranks 4 --steps 3", "--steps: not with --simulate"),
        (f"{SIMULATED} --ranks 4 --rank 1", "--rank: not with --simulate"),
        (f"{SIMULATED} --ranks 4 --host-factor 0", "--host-factor: expected a positive number, found 0"),
        (f"{SIMULATED} --ranks 4 --against ddp", "--against: unknown system 'ddp'"),
        (f"{SIMULATED} --ranks 9 --network h100-1-node", "--ranks: 9, but network 'h100-1-node' has 8"),
        (f"{SIMULATED} --ranks 1000000", "--ranks: 1000000, and no built-in network is as large"),
        pytest.param(
            f"{SIMULATED} --ranks 4",
            "--simulate: null GPU: torch .* is no CUDA build",
            marks=pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA"),
        ),
        (
            f"--model llama3-405b {FAST} --ranks 2 --seq 4096",
            r"block: needs about [\d.]+ GiB \(state 3023.84, whole",
        ),
    ],
)
def test_bad_input_is_named(arguments: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=f"simplefsdp rehearse: .*{words}"):
        rehearse(arguments, monkeypatch)
    assert not dist.is_initialized()


def test_memory_of_a_step_is_known_before_anything_is_allocated() -> None:
    with rehearsal.world(4, None):
        mesh = init_device_mesh("cpu", (4,))
        workload = Workload(
            lambda: llama.build("debug", dim=32, layers=3, ffn_dim=64),
            batch=2,
            seq=16,
            vocab_size=256,
            device=torch.device("cpu"),
            parallelism=Parallelism(mesh, MixedPrecisionPolicy(torch.bfloat16), True),
        )
        needed = estimated_step_bytes(workload, SYSTEMS["block"])
        whole = estimated_step_bytes(workload, SYSTEMS["ddp"])
    parameters = sum(p.numel() for p in workload.build().parameters())
    assert needed["state"] == 16 * parameters / 4
    assert whole["state"] == 16 * parameters
    block = sum(p.numel() for p in workload.build().get_submodule("layers.0").parameters())
    assert (needed["whole"], whole["whole"]) == (2 * (block + 2 * 256 * 32 + 32), 0)
    assert needed["saved"] == whole["saved"]
    # Of a block at least: inputs of two norms (and in fp32), q, k, v, attention, three of the feed-forward, in bf16.
    block_saves = 2 * 16 * 2 * (2 * 32 + 2 * 2 * 32 + 32 + 2 * 16 + 32 + 3 * 64)
    assert 3 * block_saves < needed["saved"] < 2 * 3 * block_saves + 2 * 16 * 256 * 8


def test_flops_are_those_of_the_formula() -> None:
    for name, parameters in (("8B", 8_030_261_248), ("1B", 1_235_814_400)):
        with torch.device("meta"):
            model = llama.build(name)
        config = model.config
        embedding = 0 if config.tie_embeddings else config.vocab_size * config.dim
        attention = 6 * config.layers * config.heads * 2 * config.head_dim * 8192
        assert flops_per_token(model, 8192) == 6 * (parameters - embedding) + attention
    assert flops_per_token(models.Tagger(), 8) is None
