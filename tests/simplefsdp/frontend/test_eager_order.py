"""Ranks whose eager code issues different collectives are told before an optimizer steps."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes.runtime.agreement import agreed_stores, forget_failures
from simplefsdp import simple_fsdp
from simplefsdp.frontend import eager_order
from simplefsdp.frontend.eager_order import compare_order
from tests.ranks import Ranks


class Blocks(nn.Module):
    """Blocks of one shape, of which each call runs those that are named."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor, numbers: Sequence[int]) -> Tensor:
        for number in numbers:
            x = self.layers[number](x)
        return x


def trainer(**settings: Any) -> tuple[Any, Callable[[Sequence[int]], None]]:
    model: Any = simple_fsdp(Blocks(), **settings)
    optimizer = optim.SGD(model.parameters(), lr=0.1)

    def step(numbers: Sequence[int]) -> None:
        model(torch.ones(2, 8), numbers).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def told(step: Callable[[Sequence[int]], None], numbers: Sequence[int]) -> str:
    try:
        step(numbers)
    except RuntimeError as error:
        return str(error)
    return ""


def skips_another_block(rank: int) -> str:
    _, step = trainer()
    step([0, 1, 2])
    return told(step, [0, 1 + rank])


def runs_blocks_in_another_order(rank: int) -> str:
    _, step = trainer()
    return told(step, [[0, 1, 2], [0, 2, 1]][rank])


def skips_another_block_in_the_second_micro_batch(rank: int) -> str:
    model, step = trainer()
    model(torch.ones(2, 8), [0, 1, 2]).sum().backward()
    return told(step, [0, 1 + rank])


def divides_gradients_by_another_factor(rank: int) -> str:
    model, step = trainer()
    step([0, 1, 2])
    if rank:
        model.set_gradient_divide_factor(8.0)
    return told(step, [0, 1, 2])


DIFFERENCES = {
    skips_another_block: (1, "'all-gather of layers.1.weight'", "'all-gather of layers.2.weight'"),
    runs_blocks_in_another_order: (1, "'all-gather of layers.1.weight'", "'all-gather of layers.2.weight'"),
    skips_another_block_in_the_second_micro_batch: (
        9,
        "'all-gather of layers.1.weight'",
        "'all-gather of layers.2.weight'",
    ),
    divides_gradients_by_another_factor: (
        4,
        "'reduction of the gradient of layers.2.weight'",
        "'reduction of the gradient of layers.2.weight, divided by 8'",
    ),
}


def _told_of(way: Callable[[int], str]) -> str:
    found = way(dist.get_rank())
    dist.barrier()
    forget_failures()
    return found


@pytest.mark.parametrize("way", DIFFERENCES)
def test_a_difference_is_an_error_on_all_ranks_before_the_step(two_ranks: Ranks, way: Callable[[int], str]) -> None:
    number, *issued = DIFFERENCES[way]
    found = two_ranks.run(_told_of, way)
    views = [
        f"ranks {me} and {other} have issued different collectives of parameters since the last step of an optimizer, "
        f"so gradients are mixtures. The first difference is collective {number}: on rank {me} {issued[me]}, on rank "
        f"{other} {issued[other]}."
        for me, other in ((0, 1), (1, 0))
    ]
    for text in found:
        assert text.startswith(tuple(views)), text


def _told_on_a_mesh() -> tuple[str, bool]:
    """Let the last rank of a 2 x 2 mesh divide gradients by another factor; return what is told, and whether it
    stepped."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, step = trainer(mesh=mesh)
    step([0, 1, 2])
    if dist.get_rank() == 3:
        model.set_gradient_divide_factor(8.0)
    before = [param.to_local().clone() for param in model.parameters()]
    found = told(step, [0, 1, 2])
    pairs = zip(before, model.parameters(), strict=True)
    dist.barrier()
    forget_failures()
    return found, not all(torch.equal(old, param.to_local()) for old, param in pairs)


def test_ranks_of_another_row_of_the_mesh_are_told_before_their_step(four_ranks: Ranks) -> None:
    for rank, (found, steps) in enumerate(four_ranks.run(_told_on_a_mesh)):
        assert "have issued different collectives of parameters" in found, rank
        assert ", divided by 8'" in found
        assert not steps


def _goes_on() -> list[int]:
    """Train with blocks that are skipped, the same on all ranks; return numbers of keys in the store.

    A rank that waits publishes what it has issued at once, and later not at all.
    """
    found = []
    for patience in (0.0, 60.0):
        with mock.patch.object(eager_order, "_PATIENCE_S", patience):
            _, step = trainer()
            step([0, 1, 2])
            (store,) = agreed_stores().values()
            dist.barrier()
            found.append(store.num_keys())
            for numbers in [[0, 2], [1], [0, 1, 2]] * 4:
                time.sleep(0.01 * dist.get_rank())
                step(numbers)
            dist.barrier()
            found.append(store.num_keys())
    return found


def test_ranks_that_decide_alike_go_on_and_leave_no_keys_behind(two_ranks: Ranks) -> None:
    begin, end, later_begin, later_end = two_ranks.run(_goes_on)[0]
    assert end <= begin + 3  # of the last comparison
    assert later_end <= later_begin + 3


@pytest.mark.usefixtures("one_of_four")
def test_ranks_compare_at_each_step_on_shards_outside_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[None] = []
    monkeypatch.setattr(eager_order, "compare_order", lambda: compared.append(None))
    _, step = trainer()
    for _ in range(2):
        step([0, 1, 2])
    assert len(compared) == 2
    optim.SGD(nn.Linear(2, 2).parameters()).step()  # not sharded
    assert len(compared) == 2
    model, _ = trainer()
    for param in model.parameters():
        optimizer = optim.SGD([param], lr=0.1)
        param.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    model(torch.ones(2, 8), [0, 1, 2]).sum().backward()
    assert len(compared) == 2


def _waits_in_vain() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _, step = trainer(mesh=mesh)
    step([0, 1])
    for group in mesh.get_all_groups():
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2), group)
    if dist.get_rank() == 3:
        time.sleep(4)
        return ""
    return told(lambda _: compare_order(), [])


def test_a_rank_that_does_not_come_to_the_step_is_named(four_ranks: Ranks) -> None:
    *found, _ = four_ranks.run(_waits_in_vain)
    reason = "s, the timeout of the process group, before a step of the optimizer for rank 3, which did not come to one"
    assert all(reason in text for text in found), found
