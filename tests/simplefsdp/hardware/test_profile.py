import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from simplefsdp.hardware.profile import (
    KINDS,
    NETWORKS,
    HardwareProfile,
    Link,
    Network,
    flat,
    load,
    load_profile,
    network,
    save,
)

TWO_LEVELS = Network(
    "test",
    "made up",
    ranks_per_node=4,
    nodes=8,
    inside={kind: Link(100.0, 1.0, 0.1) for kind in KINDS},
    between={kind: Link(10.0, 2.0, 0.5) for kind in KINDS},
)


@pytest.mark.parametrize(
    ("kind", "ranks", "seconds"),
    [
        ("all_gather", range(4), 1 + 3 * 0.1 + 800 * 3 / 4 / 100),
        ("reduce_scatter", range(4, 6), 1 + 0.1 + 800 / 2 / 100),
        ("all_reduce", range(4), 1 + 2 * 3 * 0.1 + 2 * 800 * 3 / 4 / 100),
        ("all_gather", range(0, 32, 4), 2 + 7 * 0.5 + 800 * 7 / 8 / 10),  # one rank a node: each its own card
        ("all_gather", range(32), 2 + 24 * 0.1 + 7 * 0.5 + 800 * 31 / 32 / (4 * 10)),  # four cards a node
        ("all_reduce", range(8), 2 + 2 * (6 * 0.1 + 0.5) + 2 * 800 * 7 / 8 / (4 * 10)),
        ("all_to_all", range(8), 2 + 6 * 0.1 + 0.5 + 800 * 4 / 8 / 10),  # what is for ranks of other nodes
        ("broadcast", range(1), 1.0),
    ],
)
def test_seconds_of_a_collective(kind: str, ranks: range, seconds: float) -> None:
    assert TWO_LEVELS.seconds(kind, ranks, 800) == pytest.approx(seconds)
    assert TWO_LEVELS.alpha_s(kind, ranks) + TWO_LEVELS.transfer_s(kind, ranks, 800) == pytest.approx(seconds)


def test_where_a_fast_network_meets_slow_nodes_the_nodes_decide() -> None:
    slow_inside = replace(TWO_LEVELS, inside={kind: Link(5.0, 1.0) for kind in KINDS})
    assert slow_inside.transfer_s("all_gather", range(8), 800) == pytest.approx(800 * 7 / 8 / 5)


@pytest.mark.parametrize("field", ["bandwidth_bytes_per_s", "alpha_s"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "1", True])
def test_numbers_that_are_not_positive_are_named(field: str, value: Any) -> None:
    numbers: dict[str, Any] = {"bandwidth_bytes_per_s": 1e9, "alpha_s": 1e-6, field: value}
    with pytest.raises(ValueError, match=rf"network mine: inside\['all_gather'\].{field}: expected a positive number"):
        flat("mine", 8, **numbers)


def test_other_fields_are_checked_too() -> None:
    for changes, words in (
        ({"ranks_per_node": 0}, "ranks_per_node: expected a positive"),
        ({"nodes": -1}, "nodes: expected a positive"),
        ({"between": {"all_gather": Link(1, 1)}}, "between has no 'reduce_scatter'"),
        ({"ranks_per_node": 1.5}, "ranks_per_node: expected a whole number, found 1.5"),
        ({"inside": {**TWO_LEVELS.inside, "gossip": Link(1, 1)}}, "inside: unknown kind of collective 'gossip'"),
        ({"inside": {kind: Link(1, 1, -1) for kind in KINDS}}, "step_s: expected a positive number, found -1"),
        ({"inside": {kind: Link(1, 1, math.inf) for kind in KINDS}}, "step_s: expected a positive number, found inf"),
    ):
        with pytest.raises(ValueError, match=words):
            replace(TWO_LEVELS, **changes)


def test_built_in_networks_are_found_by_name_and_wrong_names_get_the_nearest() -> None:
    for name, found in NETWORKS.items():
        assert network(name) is found
        assert found.name == name
        assert found.source
    with pytest.raises(ValueError, match="unknown network 'h100-9-nodes'; did you mean 'h100-8-nodes'"):
        network("h100-9-nodes")


def test_an_8b_block_takes_about_as_long_on_eight_nodes_as_measured_there() -> None:
    """436 MB: NCCL's asymptote there is 345 to 360 GB/s a rank, so 1.2 ms and the latency of 63 steps of its ring."""
    seconds = NETWORKS["h100-8-nodes"].seconds("all_gather", range(64), 436_224_000)
    assert 1.2e-3 < seconds < 1.6e-3


def test_a_file_brings_a_network_back(tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    save(TWO_LEVELS, path)
    assert load(path) == TWO_LEVELS == network(str(path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda fields: fields.pop("inside"), "network.inside: missing"),
        (lambda fields: fields.update(speed=3), "network: unknown field 'speed'"),
        (lambda fields: fields["between"]["all_reduce"].update(alpha_s=0), r"between\['all_reduce'\].alpha_s"),
        (lambda fields: fields["between"]["all_reduce"].pop("alpha_s"), "network.between.all_reduce.alpha_s: missing"),
        (lambda fields: fields.update(between=7), "network.between: expected an object, found 7"),
    ],
)
def test_a_wrong_file_is_refused_with_its_path_and_field(tmp_path: Path, change: Any, words: str) -> None:
    path = tmp_path / "network.json"
    save(TWO_LEVELS, path)
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=rf"network file .*network.json: .*{words}"):
        load(path)
    with pytest.raises(ValueError, match=r"network file .*missing.json: FileNotFoundError"):
        load(tmp_path / "missing.json")


PROFILE = HardwareProfile(
    "mine",
    "made up",
    matmul={"bfloat16": ((1e6, 1e9), (1e8, 3e9)), "float32": ((1.0, 5e8),)},
    attention={"bfloat16": ((1.0, 7e8),)},
    memory=((1e3, 1e6), (1e5, 2e6), (1e6, 4e6)),
    launch_s=1e-6,
    collective_launch_s=0.0,
    contention=0.1,
    network=TWO_LEVELS,
    matmul_contention=((1e6, 0.5), (1e8, 0.25)),
)


@pytest.mark.parametrize(
    ("kind", "dtype", "flops", "rate"),
    [
        ("matmul", torch.bfloat16, 1e6, 1e9),
        ("matmul", torch.bfloat16, 1e3, 1e9),  # below the curve, and above it, its ends
        ("matmul", torch.bfloat16, 1e9, 3e9),
        ("matmul", torch.bfloat16, 1e7, 2e9),  # halfway by logarithm
        ("matmul", torch.float32, 1e7, 5e8),
        ("matmul", torch.float16, 1e7, 5e8),  # as float32
        ("matmul", torch.float8_e4m3fn, 1e7, 4e9),  # twice as fast as bfloat16
        ("attention", torch.float32, 1e7, 7e8),  # as all there is
    ],
)
def test_seconds_of_compute_follow_the_curves(kind: str, dtype: torch.dtype, flops: float, rate: float) -> None:
    assert PROFILE.compute_s(kind, dtype, flops) == pytest.approx(flops / rate)


def test_contention_of_matmuls_depends_on_the_size_of_the_product() -> None:
    assert PROFILE.contention_of() == PROFILE.contention_of("attention", 1e6) == 0.1
    assert [PROFILE.contention_of("matmul", elements) for elements in (1, 1e7, 1e9)] == pytest.approx(
        [0.5, 0.375, 0.25]
    )
    assert replace(PROFILE, matmul_contention=()).contention_of("matmul", 1e6) == 0.1


def test_seconds_of_memory_and_collectives() -> None:
    assert PROFILE.memory_s(1e4) == pytest.approx(1e4 / 1.5e6)
    assert PROFILE.memory_s(1e5) == pytest.approx(1e5 / 2e6)
    assert PROFILE.collective_s("all_gather", range(4), 800) == TWO_LEVELS.seconds("all_gather", range(4), 800)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"launch_s": 0}, "profile mine: launch_s: expected a positive number, found 0"),
        ({"contention": -0.1}, "profile mine: contention: expected a positive number, found -0.1"),
        ({"collective_launch_s": math.nan}, "profile mine: collective_launch_s: expected a positive number, found nan"),
        ({"memory": ()}, r"profile mine: memory: expected \(size, rate\) pairs by size, found \(\)"),
        ({"memory": ((2.0, 1.0), (1.0, 1.0))}, "profile mine: memory: expected"),
        ({"memory": ((1.0, 0.0),)}, "profile mine: memory: rate: expected a positive number, found 0.0"),
        (
            {"matmul_contention": ((1.0, 1.0),)},
            "profile mine: matmul_contention: expected a part, less than 1, found 1.0",
        ),
        ({"matmul": {}}, "profile mine: matmul: expected a curve for each of some dtypes, found {}"),
        ({"attention": 3}, "profile mine: attention: expected a curve for each of some dtypes, found 3"),
        ({"matmul": {"bf16": ((1.0, 1.0),)}}, "profile mine: matmul: no dtype of torch's: 'bf16'"),
        ({"attention": {"float32": ((0, 1.0),)}}, r"profile mine: attention\['float32'\]: size: expected a positive"),
    ],
)
def test_profiles_that_cannot_be_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PROFILE, **change)


def test_profiles_are_saved_and_loaded_and_wrong_fields_are_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save(PROFILE, path)
    assert load_profile(path) == PROFILE
    fields = json.loads(path.read_text())
    for name, value, message in (
        ("matmul", None, "ValueError: profile.matmul: expected an object, found None"),
        ("matmul", {"float32": None}, r"profile.matmul.float32: expected a list of \[size, rate\], found None"),
        ("memory", [[1.0, 2.0, 3.0]], r"profile.memory: expected a list of \[size, rate\]"),
        ("memory", [["a", 2.0]], "profile.memory.size: expected a number, found 'a'"),
        ("launch_s", None, "profile.launch_s: expected a number, found None"),
        ("launch_s", True, "profile.launch_s: expected a number, found True"),
        ("name", 3, "profile.name: expected text, found 3"),
        ("lunch_s", 1.0, "profile: unknown field 'lunch_s'; did you mean 'launch_s'"),
        ("network", {}, "profile.network.name: missing"),
        ("network", 3, "profile.network: expected an object, found 3"),
        ("matmul_contention", 3, r"profile.matmul_contention: expected a list of \[size, rate\], found 3"),
        ("contention", 1.0, "profile mine: contention: expected a part, less than 1, found 1.0"),
    ):
        path.write_text(json.dumps(fields | {name: value}))
        with pytest.raises(ValueError, match=rf"profile file .*profile\.json: .*{message}"):
            load_profile(path)
    for missing in ("memory", "name", "contention"):
        path.write_text(json.dumps({name: value for name, value in fields.items() if name != missing}))
        with pytest.raises(ValueError, match=rf"profile file .*: profile\.{missing}: missing"):
            load_profile(path)
    path.write_text(json.dumps({name: value for name, value in fields.items() if name != "parameter_s"}))
    assert load_profile(path) == PROFILE
    network = fields["network"]
    network["inside"]["all_gather"]["alpha"] = network["inside"]["all_gather"].pop("alpha_s")
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"profile\.network\.inside\.all_gather: unknown field 'alpha'; did you mean"):
        load_profile(path)
