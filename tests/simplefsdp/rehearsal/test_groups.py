"""Grouped buckets under TorchInductor on a slow network, which reads and writes memory when its time is over."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from simplefsdp import BucketPlan, rehearsal, simple_fsdp
from simplefsdp.hardware.profile import flat
from tests.models import batch, in_groups, tiny_llama

SLOW = flat("slow", 4, alpha_s=5e-3, bandwidth_bytes_per_s=1e7, member_s=1e-6)


def trained(plan: Any, folder: Path) -> list[Tensor]:
    """Losses and gradients of some steps."""
    torch._dynamo.reset()
    found = []
    with rehearsal.world(4, SLOW):
        model = simple_fsdp(tiny_llama(layers=2))
        step = torch.compile(model, backend="simplefsdp", options={"plan": plan, "report_dir": str(folder)})
        for i in range(2):
            loss = step(*batch(i, 0))
            loss.backward()
            found += [loss.detach().clone(), *(param.grad.to_local().clone() for param in model.parameters())]
            model.zero_grad()
    return found


@pytest.mark.slow
def test_memory_of_a_group_is_neither_read_nor_used_again_before_its_wait(tmp_path: Path) -> None:
    expected = trained("block", tmp_path / "packed")
    (path,) = tmp_path.rglob("plan.json")
    plan = in_groups(BucketPlan.load(path))
    torch.testing.assert_close(trained(plan, tmp_path / "grouped"), expected, rtol=0, atol=0)
    for direction, buckets in (("forward", plan.forward), ("backward", [*plan.backward, *plan.reductions])):
        (code,) = (tmp_path / "grouped").glob(f"*/*_{direction}_code.py")
        several = sum(len(bucket.fqns) > 1 for bucket in buckets)
        assert code.read_text().count("_coalesced.default(") == several
