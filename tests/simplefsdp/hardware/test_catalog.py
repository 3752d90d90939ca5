"""The GPUs that are built in."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from simplefsdp import simple_fsdp
from simplefsdp.compile.context import compilation_context
from simplefsdp.compile.options import _say_what_is_built_in, parse_options, profile_of
from simplefsdp.hardware.catalog import DEVICES, built_in, device_profile, is_built_in
from simplefsdp.hardware.profile import load_profile, network, save
from tests.graphs import capture
from tests.models import batch, tiny_llama
from tests.ranks import fake_group


@pytest.mark.parametrize("device", DEVICES)
def test_each_says_where_its_numbers_are_from_and_is_below_its_data_sheet(device: str, tmp_path: Any) -> None:
    profile = built_in(f"{device}/h100-8-nodes")
    assert len(profile.source) > 100
    assert profile.network == network("h100-8-nodes")
    bf16, fp32, memory = {
        "a100": (312e12, 19.5e12, 2.04e12),
        "h100": (989e12, 67e12, 3.35e12),
        "h200": (989e12, 67e12, 4.8e12),
        "b200": (2250e12, 80e12, 8e12),
    }[device]
    for dtype, peak in (("bfloat16", bf16), ("float32", fp32)):
        rates = [rate for _, rate in profile.matmul[dtype]]
        assert 0.5 * peak < max(rates) < peak
    # Half of what causal attention is counted with is not computed.
    assert 0.3 * bf16 < max(rate for _, rate in profile.attention["bfloat16"]) < 2 * bf16
    assert 0.75 * memory < 1e9 / profile.memory_s(1e9) < memory
    save(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile


def test_a_rate_is_that_of_forward_and_backward_together() -> None:
    profile = built_in("a100/cloud-100g")
    # 64 heads of two sequences of 4096, 128 wide: the forward at 204, the backward, 2.5 times as much, at 168 TFLOP/s.
    flops = 4 * 128 * 128 * 4096**2
    forward, backward = flops / 2 / 204e12, 2.5 * flops / 2 / 168e12
    seconds = profile.compute_s("attention", torch.bfloat16, flops)
    assert 3.5 * seconds == pytest.approx(forward + backward)
    assert profile.compute_s("matmul", torch.bfloat16, 2 * 4096**3) == pytest.approx(2 * 4096**3 / 228e12)


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_a_name_is_enough() -> None:
    options: Any = {"plan": "auto", "profile": "h200/h100-8-nodes"}
    passes = compilation_context([], parse_options(options))
    assert passes.profile == built_in("h200/h100-8-nodes")
    captured = capture(simple_fsdp(tiny_llama()), *batch(0, 0), **options)
    assert len(captured.backward.nodes) > 100


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h300/h100-8-nodes", r"profile 'h300/h100-8-nodes': unknown device 'h300'; did you mean"),
        ("h100", r"profile 'h100': no network; the name of one follows, as in 'h100/h100-8-nodes'"),
        ("h100/h100-8-node", r"profile 'h100/h100-8-node': unknown network 'h100-8-node'; did you mean"),
    ],
)
def test_a_name_that_is_not_there_is_an_error_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compilation_context([], parse_options({"profile": name}))


@pytest.mark.parametrize(
    ("gpu", "ranks", "name"),
    [
        ("NVIDIA H200", 8, "h200/h100-1-node"),
        ("NVIDIA H100 80GB HBM3", 9, "h100/h100-8-nodes"),
        ("NVIDIA H100 80GB HBM3", 512, "h100/h100-64-nodes"),
        ("NVIDIA H100 80GB HBM3", 513, None),
        ("NVIDIA GH200 480GB", 8, None),
        ("NVIDIA A100-SXM4-80GB", 8, None),
    ],
)
def test_a_gpu_that_was_not_measured_is_taken_for_what_is_built_in(
    gpu: str, ranks: int, name: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("simplefsdp.compile.options.cached_profile_path", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: gpu)
    _say_what_is_built_in.cache_clear()
    with fake_group(ranks):
        found = profile_of(parse_options({}), torch.device("cuda"))
        assert profile_of(parse_options({"plan": "block"}), torch.device("cuda")) is None
        assert profile_of(parse_options({}), torch.device("cpu")) is None
    assert found == (built_in(name) if name else None)
    assert (f"profile {name!r} is taken for this GPU and its network" in caplog.text) == (name is not None)


def test_paths_are_not_names() -> None:
    assert is_built_in("h100/h100-1-node")
    assert not any(map(is_built_in, ("profile.json", "out/profile.json", "./profile", "/tmp/profile", "~/profile")))
    assert math.isfinite(built_in("h100/h100-1-node").contention)


def test_the_profile_of_a_device_is_named_by_the_network_that_it_is_given(tmp_path: Path) -> None:
    here = network("h100-16-nodes")
    found = device_profile("h200", here)
    assert (found.name, found.network) == ("h200/h100-16-nodes", here)
    assert found == built_in("h200/h100-16-nodes")
    path = tmp_path / "measured.json"
    save(built_in("a100/cloud-100g"), path)
    assert device_profile(str(path), here) == replace(built_in("a100/cloud-100g"), network=here)
