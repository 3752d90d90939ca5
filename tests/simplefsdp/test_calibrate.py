import sys
from pathlib import Path

import pytest
import torch

from simplefsdp import calibrate, cli
from simplefsdp.hardware import load_profile, network


def test_the_command_measures_this_device_and_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["simplefsdp", "calibrate", "--network", "cpu-latency", "--device", "cpu"])
    monkeypatch.setattr(calibrate, "_REPEATS", 1)
    cli.main()
    (path,) = (tmp_path / "simplefsdp").iterdir()
    assert f"kept in {path}" in capsys.readouterr().out
    profile = load_profile(path)
    assert profile.network == network("cpu-latency")
    assert list(profile.matmul) == list(profile.attention) == ["float32"]
    assert profile.compute_s("matmul", torch.float32, 1e9) > profile.compute_s("matmul", torch.float32, 1e6) > 0
    assert 0 < profile.launch_s < profile.collective_launch_s < 0.01
    assert 0 < profile.parameter_s < 0.1
    assert 0 <= profile.collective_s_per_byte < 1e-7
    # It is not measured again, and has whatever network is asked for.
    monkeypatch.setattr(calibrate, "calibrate", None)
    again = calibrate.kept(torch.device("cpu"), network("cpu-hybrid"))
    assert again.matmul == profile.matmul
    assert again.network == network("cpu-hybrid")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--threads 0", "--threads: expected a positive number, found 0"),
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
