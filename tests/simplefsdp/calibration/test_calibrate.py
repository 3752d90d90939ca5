import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from simplefsdp import simple_fsdp
from simplefsdp.analysis.prediction import collected_predictions
from simplefsdp.calibration import calibrate
from simplefsdp.cli import main as cli
from simplefsdp.compile.options import parse_options, profile_of
from simplefsdp.hardware import cache
from simplefsdp.hardware.profile import load_profile, network
from tests.models import PROFILE, batch, tiny_llama
from tests.ranks import METHOD


@pytest.mark.compile
def test_the_command_measures_this_device_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["simplefsdp", "calibrate", "--network", "cpu-latency", "--device", "cpu"])
    monkeypatch.setattr(calibrate, "_REPEATS", 1)
    cli.main()
    (path,) = (tmp_path / "simplefsdp").iterdir()
    assert f"cached in {path}" in capsys.readouterr().out
    profile = load_profile(path)
    assert profile.network == network("cpu-latency")
    assert list(profile.matmul) == list(profile.attention) == ["float32"]
    assert profile.compute_s("matmul", torch.float32, 1e9) > profile.compute_s("matmul", torch.float32, 1e6) > 0
    # Bounds that a wrong unit exceeds, and this machine's noise, measured once here, does not: calls cost less than
    # moving 1 GB does, and a byte of a collective less than a hundred of a copy.
    assert profile.launch_s > 0
    for call_s in (profile.launch_s, profile.collective_launch_s, profile.parameter_s):
        assert 0 <= call_s < profile.memory_s(1e9)
    assert 0 <= profile.collective_s_per_byte < 100 * profile.memory_s(1e7) / 1e7
    # It is not measured again, and has whatever network is asked for.
    monkeypatch.setattr(calibrate, "calibrate", None)
    again = calibrate.calibrated_profile(torch.device("cpu"), network("cpu-hybrid"))
    assert again.matmul == profile.matmul
    assert again.network == network("cpu-hybrid")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--threads 0", "--threads: expected a positive number, found 0"),
        ("--device cpu", "--network: missing \\(it is measured under torchrun"),
        ("--network cpu-latencies", "unknown network 'cpu-latencies'; did you mean 'cpu-latency'"),
        pytest.param(
            "--device cuda",
            "--device: cuda, but torch sees no GPU",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_bad_input_is_named(arguments: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["simplefsdp", "calibrate", *arguments.split()])
    with pytest.raises(SystemExit, match=f"simplefsdp calibrate: .*{message}"):
        cli.main()


def _as_torchrun_would(rank: int, cache_folder: str, port: str) -> None:
    """Compile with ``plan="auto"``. What that starts is real, but for what the device itself is measured at."""
    torch.set_num_threads(1)
    os.environ |= {"XDG_CACHE_HOME": cache_folder, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": port}
    dist.init_process_group("gloo")
    run = subprocess.run

    def run_with_a_device_made_up(arguments: list[str], **kwargs: Any) -> Any:
        Path(cache_folder, f"run by {rank}").touch()
        return run([__name__ if word == "simplefsdp" else word for word in arguments], **kwargs)

    model = simple_fsdp(tiny_llama())
    with mock.patch.object(cache.subprocess, "run", run_with_a_device_made_up), collected_predictions() as predictions:
        torch.compile(model, backend="simplefsdp", options={"lower_with": "aot_eager"})(*batch(0, 0)).backward()
    (prediction,) = predictions
    assert prediction.profile == "test"
    dist.destroy_process_group()


@pytest.mark.slow
def test_the_first_compilation_of_auto_on_a_cpu_measures_it_and_the_network_once(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    mp.start_processes(_as_torchrun_would, (str(tmp_path), port), nprocs=2, start_method=METHOD)
    assert len(list(tmp_path.glob("run by *"))) == 1
    (path,) = (tmp_path / "simplefsdp").glob("*.json")
    assert path.name.endswith("2-ranks.json")
    profile = load_profile(path)
    assert profile.matmul == PROFILE.matmul
    assert profile.network.name == "measured"
    assert (profile.network.ranks_per_node, profile.network.nodes) == (2, 1)


def test_where_nothing_can_be_kept_nothing_is_measured_and_a_failure_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    failed = subprocess.CompletedProcess([], 1, stderr="no port is free")
    monkeypatch.setattr(cache.subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for elsewhere in ("", "1"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", elsewhere)
        assert cache.measure_on_first_use(cpu, 2) is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(
        RuntimeError, match=r"option 'plan': measuring this CPU failed[^$]*--threads 1:\nno port is free"
    ):
        cache.measure_on_first_use(cpu, 2)
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    for rank in (0, 1):
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        for _ in range(2):
            assert profile_of(parse_options({"plan": "auto"}), cpu) is None
    (warning,) = (message for message in caplog.messages if message.startswith("plan='auto'"))
    assert re.search(r"before \(no profile can be cached: .*a file", warning)


if __name__ == "__main__":
    with mock.patch.object(calibrate, "calibrate", return_value=PROFILE):
        cli.main()
