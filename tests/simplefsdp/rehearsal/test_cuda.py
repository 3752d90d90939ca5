"""Rehearsals on a GPU, where there is one."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from simplefsdp import rehearsal, simple_fsdp
from simplefsdp.hardware.profile import flat
from tests.models import fsdp2, tiny_llama

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FAST = flat("fast", 8, alpha_s=100e-6, bandwidth_bytes_per_s=1e9)
SLOW = flat("slow", 8, alpha_s=0.05, bandwidth_bytes_per_s=1e9)


def test_collectives_give_what_a_world_of_clones_would() -> None:
    x = torch.arange(8.0, device="cuda")
    with rehearsal.world(4, FAST, rank=1):
        dist.all_gather_into_tensor(whole := x.new_empty(32), x)
        dist.reduce_scatter_tensor(part := x.new_empty(2), x)
        dist.all_reduce(total := x.clone(), dist.ReduceOp.AVG)
        dist.all_to_all_single(exchanged := torch.empty_like(x), x)
        dist.all_reduce(cost_graphs := x.bfloat16())
        everybodys: list[Any] = [None] * 4
        dist.all_gather_object(everybodys, 7)
    assert torch.equal(whole, x.repeat(4))
    assert torch.equal(part, 4 * x[2:4])
    assert torch.equal(total, x)
    assert torch.equal(exchanged, x[2:4].repeat(4))
    assert torch.equal(cost_graphs, 4 * x.bfloat16())
    assert everybodys == [7] * 4


def test_the_device_waits_and_the_host_does_not() -> None:
    source, whole = torch.ones(8, device="cuda"), torch.zeros(32, device="cuda")
    with rehearsal.world(4, SLOW) as world:
        dist.all_gather_into_tensor(whole, source)
        torch.cuda.synchronize()
        world.forget()
        works = [dist.all_gather_into_tensor(whole, source, async_op=True) for _ in range(2)]
        for work in works:
            work.wait()
        assert not works[0].is_completed()
        torch.cuda.synchronize()
        assert works[1].is_completed()
        first, second = world.collectives()
    modelled = SLOW.seconds("all_gather", range(4), whole.nbytes)
    for collective in (first, second):
        assert collective.finished - collective.started == pytest.approx(modelled, rel=0.02)
    assert second.started == pytest.approx(first.finished, abs=1e-3)
    assert first.blocked + second.blocked == pytest.approx(2 * modelled, rel=0.02)


def test_a_buffer_used_again_too_early_is_a_wrong_number() -> None:
    source, whole = torch.ones(8, device="cuda"), torch.zeros(32, device="cuda")
    whole.sum()  # CUDA loads a kernel when it is first used, and waits until the device is idle
    with rehearsal.world(4, SLOW):
        work = dist.all_gather_into_tensor(whole, source, async_op=True)
        source.fill_(5)
        early = whole.sum()
        work.wait()
        assert early.item() == 0
        assert whole.sum().item() == 5 * 32


@pytest.mark.parametrize("system", ["fsdp2", "eager"])
def test_slow_and_free_networks_give_the_same_bits(system: str) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    results = []
    for network in (None, flat("2 ms", 4, alpha_s=0.002, bandwidth_bytes_per_s=1e9)):
        with rehearsal.world(4, network):
            model: Any = tiny_llama(dim=48, heads=6).cuda()
            model = fsdp2(model, policy) if system == "fsdp2" else simple_fsdp(model, mp_policy=policy)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            tokens = torch.arange(34, device="cuda").remainder(30).view(2, 17)
            for _ in range(3):
                loss = model(tokens[:, :-1], tokens[:, 1:])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append([loss.detach(), *(p.detach().to_local() for p in model.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
