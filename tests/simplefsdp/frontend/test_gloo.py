"""Gloo groups that run one collective at a time."""

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from simplefsdp import simple_fsdp
from simplefsdp.frontend.gloo import run_in_order
from tests.ranks import Ranks

CPU = torch.device("cpu")
ROUNDS = 3000


@pytest.mark.slow
def test_many_gathers_in_flight_do_not_bring_a_rank_down(two_ranks: Ranks) -> None:
    """With gloo's two threads, a rank aborts within the first thousands."""
    two_ranks.run(_gathers)


def _gathers() -> None:
    mesh = init_device_mesh("cpu", (2,))
    simple_fsdp(nn.Linear(2, 2), mesh)
    funcol, group = torch.ops._c10d_functional, mesh.get_group().group_name
    for i in range(ROUNDS):
        pending = [funcol.all_gather_into_tensor(torch.full((n,), float(i)), 2, group) for n in (1, 8, 33)]
        pending.append(funcol.all_reduce(torch.full((4,), float(i)), "avg", group))
        for result in pending:
            assert (funcol.wait_tensor(result) == i).all()


def test_all_groups_of_the_mesh_get_one_thread_and_keep_their_settings(four_ranks: Ranks) -> None:
    four_ranks.run(_settings)


def _settings() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    outside = dist.new_group(range(4), timeout=timedelta(seconds=77))
    before = [mesh.get_group(i)._get_backend(CPU).options for i in range(2)]
    simple_fsdp(nn.Linear(2, 2), mesh, mode="hybrid_shard")
    for i, old in enumerate(before):
        backend = mesh.get_group(i)._get_backend(CPU)
        assert (backend.rank(), backend.size()) == (mesh.get_local_rank(i), 2)
        new = backend.options
        assert new._threads == 1 != old._threads
        assert (new._timeout, new.group_name, new.global_ranks_in_group) == (
            old._timeout,
            old.group_name,
            old.global_ranks_in_group,
        )
        simple_fsdp(nn.Linear(2, 2), mesh, mode="hybrid_shard")
        assert mesh.get_group(i)._get_backend(CPU) is backend
    assert outside._get_backend(CPU).options._threads == 2


def test_where_torch_checks_collectives_the_two_threads_are_mentioned(caplog):
    group = mock.Mock(_device_types=[CPU])
    group._get_backend.return_value = mock.Mock(spec=dist.distributed_c10d._ProcessGroupWrapper)
    run_in_order(group)
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL: gloo keeps its two threads" in caplog.text
    group._register_backend.assert_not_called()
