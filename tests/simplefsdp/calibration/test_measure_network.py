"""Networks that are measured: what is fitted, and to what."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from simplefsdp.calibration import measure_network as measure_network_module
from simplefsdp.calibration.measure_network import (
    SIZES,
    GroupSweep,
    LinkFit,
    _links,
    fit,
    group_member_s,
    measure_network,
)
from simplefsdp.hardware.profile import KINDS, Network
from tests.ranks import Ranks


def test_a_fit_finds_alpha_and_bandwidth_and_says_how_far_off_it_is() -> None:
    ranks, alpha, bandwidth = 4, 1e-4, 2e9
    exact = tuple(alpha + size * 0.75 / bandwidth for size in SIZES)
    twice = tuple(alpha + 2 * size * 0.75 / bandwidth for size in SIZES)
    found = fit(GroupSweep(ranks, SIZES, {"all_gather": exact, "all_reduce": twice}))
    for kind in ("all_gather", "all_reduce"):
        assert (found[kind].alpha_s, 1 / found[kind].s_per_byte) == pytest.approx((alpha, bandwidth))
        assert found[kind].error == pytest.approx(0.0, abs=1e-9)
    off = fit(GroupSweep(ranks, SIZES, {"all_gather": (2 * exact[0], *exact[1:])}))["all_gather"]
    assert 0.1 < off.error < 0.5


def test_a_fit_of_what_gets_no_slower_is_no_negative_number() -> None:
    found = fit(GroupSweep(2, SIZES, {"all_gather": tuple(1e-3 - 1e-5 * i for i in range(len(SIZES)))}))["all_gather"]
    assert found.alpha_s > 0
    assert found.s_per_byte > 0


def test_a_network_gives_back_the_times_that_were_measured_between_nodes() -> None:
    inside, between = LinkFit(1e-5, 1e-11, 0.0), LinkFit(1e-4, 1e-9, 0.0)
    levels = {"inside": _links({"all_gather": inside}, 1), "between": _links({"all_gather": between}, 2)}
    network = Network("measured", "here", 2, 2, levels["inside"], levels["between"])
    assert set(network.inside) == set(KINDS)
    assert network.seconds("all_gather", range(4), 1000) == pytest.approx(1e-4 + 750 * 1e-9)
    assert network.seconds("all_gather", range(2), 1000) == pytest.approx(1e-5 + 500 * 1e-11)


def _measured(ranks_per_node: int) -> tuple[Network, dict[str, dict[str, LinkFit]]]:
    return measure_network(torch.device("cpu"), ranks_per_node, repeats=1)


@pytest.mark.parametrize(("ranks_per_node", "levels"), [(4, {"inside"}), (2, {"inside", "between"}), (1, {"between"})])
def test_ranks_measure_the_same_network(four_ranks: Ranks, ranks_per_node: int, levels: set[str]) -> None:
    found = four_ranks.run(_measured, ranks_per_node)
    assert all(one == found[0] for one in found)
    network, fits = found[0]
    assert (network.ranks_per_node, network.nodes) == (ranks_per_node, 4 // ranks_per_node)
    assert set(fits) == levels
    assert network.member_s is None, "gloo copies the members of a group"
    assert all(set(of_level) == {"all_gather", "reduce_scatter", "all_reduce"} for of_level in fits.values())
    of_kind = fits["between" if "between" in levels else "inside"]["reduce_scatter"]
    expected = of_kind.alpha_s + 0.75 * 1e9 * of_kind.s_per_byte
    seconds = network.seconds("reduce_scatter", range(4), 10**9)
    if len(levels) == 1:
        assert seconds == pytest.approx(expected)
    else:  # here nodes are one machine, and the inside of them may be what is slow
        assert seconds > 0.999 * expected


def _member_s() -> float:
    world = dist.group.WORLD
    assert world is not None
    return group_member_s(world, torch.device("cpu"), 1)


def test_each_member_of_a_group_takes_what_a_group_takes_beyond_one_collective(
    four_ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(found >= 0 for found in four_ranks.run(_member_s))
    monkeypatch.setattr(measure_network_module, "_seconds", lambda shards, *_: 1e-3 + 2e-5 * (len(shards) - 1))
    four = mock.Mock(**{"size.return_value": 4})
    assert group_member_s(four, torch.device("cpu"), 1) == pytest.approx(2e-5)
    monkeypatch.setattr(measure_network_module, "_seconds", lambda shards, *_: 1e-3 - 2e-5 * len(shards))
    assert group_member_s(four, torch.device("cpu"), 1) == 0


def _refused() -> str:
    with pytest.raises(ValueError, match="whole nodes of 3, found 4 ranks") as error:
        measure_network(torch.device("cpu"), 3)
    return str(error.value)


def test_ranks_that_are_not_whole_nodes_are_refused_before_anything_is_measured(four_ranks: Ranks) -> None:
    assert len(set(four_ranks.run(_refused))) == 1
