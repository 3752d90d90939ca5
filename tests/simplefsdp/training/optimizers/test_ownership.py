"""Dealing parameters to owners, and grouping them for exchanges."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from simplefsdp import simple_fsdp
from simplefsdp.training.optimizers.exchange import Exchange
from simplefsdp.training.optimizers.ownership import Owned, cost, deal, exchange_groups, lanes, layout
from tests.ranks import fake_group


class Holds(nn.Module):
    """A module with parameters of these values."""

    def __init__(self, *values: torch.Tensor) -> None:
        super().__init__()
        self.params = nn.ParameterList(values)

    def forward(self) -> None: ...


@given(st.lists(st.floats(0, 1e12), max_size=40), st.integers(1, 9))
def test_no_rank_has_more_than_four_thirds_of_what_it_must_have(costs: list[float], ranks: int) -> None:
    owners = deal(costs, [0.0] * ranks)
    loads = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks)]
    dearest = sorted(costs, reverse=True)
    pair = sum(dearest[ranks - 1 : ranks + 1]) if len(costs) > ranks else 0.0  # two of them share a rank
    least = max([sum(costs) / ranks, pair, *costs])
    assert max(loads) <= (4 / 3 * least if max(loads) > max([*costs, 0.0]) else least) * (1 + 1e-9)


def test_who_has_less_already_gets_more() -> None:
    assert deal([1.0, 1.0, 3.0], [5.0, 0.0]) == [1, 1, 1]
    assert deal([2.0, 2.0, 2.0, 2.0], [0.0, 0.0]) == [0, 1, 0, 1]
    assert deal([], [0.0]) == []


def test_the_cost_of_a_matrix_is_that_of_a_product_with_itself() -> None:
    assert cost((4, 6)) == cost((6, 4)) == 4 * 6 * 4
    assert cost((4, 3, 2)) == cost((4, 6))
    assert cost((7,)) == 7
    assert cost(()) == 1
    assert cost((0, 3)) == 0


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 1000))
def test_exchanges_hold_every_parameter_once_and_no_owner_more_than_the_limit(rows: list[int], limit: int) -> None:
    with fake_group(4):
        model = simple_fsdp(Holds(*(torch.zeros(n, 3) for n in rows)))
        params: list[Any] = list(model.parameters())
        owners = deal([cost(param.shape) for param in params], [0.0] * 4)
        owned = [Owned(param, layout(param), owner) for param, owner in zip(params, owners, strict=True)]
        groups = exchange_groups(owned, limit)
        assert sorted(id(each.param) for group in groups for each in group) == sorted(map(id, params))
        for group in groups:
            for rank in range(4):
                mine = [each for each in group if each.owner == rank]
                assert len(mine) < 2 or sum(2 * each.whole_bytes for each in mine) <= limit
        received = [Exchange(group).received_bytes for group in groups]
        assert sum(received) == sum(2 * each.whole_bytes for each in owned if each.owner == 0)


def test_parts_of_a_layout_are_the_parts_that_ranks_hold() -> None:
    for rank in range(8):
        with fake_group(8, rank):
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
            model = nn.Linear(6, 7)
            whole = model.weight.detach().clone()
            simple_fsdp(model, mesh, mode="hybrid_shard", shard_placement_fn=lambda _: Shard(0))
            weight: Any = model.weight if isinstance(model.weight, DTensor) else next(iter(model.parameters()))
            found = layout(weight)
            assert torch.equal(whole[found.parts[rank]], weight._local_tensor)
            assert found.holders(rank) == [r for r in range(8) if r // 4 == rank // 4]


@pytest.mark.usefixtures("one_of_four")
def test_a_parameter_that_is_dealt_by_other_rules_is_refused_by_name() -> None:
    model = simple_fsdp(nn.Linear(6, 7))
    bias: Any = dict(model.named_parameters())["bias"]
    bias._local_tensor = torch.zeros(3)
    with pytest.raises(ValueError, match=r"bias: \(7,\) on .*: this rank holds \(3,\), expected \(2,\)"):
        layout(bias)


@pytest.mark.usefixtures("one_of_four")
def test_parameters_of_several_dtypes_are_exchanged_apart_and_plain_ones_not_at_all() -> None:
    plain = nn.Parameter(torch.zeros(2))
    model = simple_fsdp(Holds(torch.zeros(4), torch.zeros(4).bfloat16(), torch.zeros(5)))
    params = list(model.parameters())
    assert [[tuple(p.shape) for p in lane] for lane in lanes([*params, plain]).values()] == [[(4,), (5,)], [(4,)]]
