"""Clipping: what ``torch.nn.utils.clip_grad_norm_`` makes of the whole gradients, on every kind of mesh."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from simplefsdp import clip_grad_norm_, simple_fsdp
from tests.compare import whole
from tests.models import local
from tests.ranks import Ranks
from tests.simplefsdp.frontend.test_tensor_parallel import branches, mesh_of, vectors
from tests.watch import Collectives


def models(kind: str) -> nn.Module:
    """With gradients that are not the same for all parameters; some have none."""
    torch.manual_seed(0)
    if kind == "tensor parallel":
        mesh = mesh_of(2, 2)
        model = nn.Sequential(nn.Linear(6, 6), *branches(mesh["tp"]).children())
        return simple_fsdp(model, mesh["dp"], ignored_params=[model.get_parameter("0.bias")])
    unused = nn.ParameterDict({"unused": nn.Parameter(torch.ones(3)), "empty": nn.Parameter(torch.ones(0, 2))})
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6), nn.Sequential(unused))
    model[0].requires_grad_(False).weight.requires_grad_(True)
    model.forward = lambda x: model[1](model[0](x))  # type: ignore[method-assign]
    if kind == "hybrid":
        return simple_fsdp(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return simple_fsdp(model, mode="replicate" if kind == "replicate" else None)


@pytest.mark.parametrize("kind", ["tensor parallel", "hybrid", "replicate", "fully"])
def test_the_norm_is_that_of_the_whole_gradients(four_ranks: Ranks, kind: str) -> None:
    assert len(set(four_ranks.run(_clip, kind))) == 1


def _clip(kind: str) -> tuple[float, ...]:
    model = models(kind)
    found = []
    for order, foreach, limit in ((2.0, None, 0.5), (1.0, False, 0.5), (math.inf, True, 0.1), (3.0, None, 1e9)):
        model.zero_grad()
        rank = 0 if kind == "tensor parallel" else dist.get_rank()
        model(*vectors(0, rank)).square().sum().backward()
        plain = [nn.Parameter(whole(p).clone()) for p in model.parameters()]
        for one, param in zip(plain, model.parameters(), strict=True):
            one.grad = None if param.grad is None else whole(param.grad).clone()
        expected = torch.nn.utils.clip_grad_norm_(plain, limit, order)
        total = clip_grad_norm_(model.parameters(), limit, order, foreach=foreach)
        torch.testing.assert_close(total, expected)
        for one, param in zip(plain, model.parameters(), strict=True):
            assert (one.grad is None) == (param.grad is None)
            if one.grad is not None:
                torch.testing.assert_close(whole(param.grad), one.grad)
        found.append(total.item())
    assert any(param.grad is None for param in model.parameters()) == (kind != "tensor parallel")
    return tuple(found)


def test_each_dimension_of_a_mesh_is_reduced_over_once(four_ranks: Ranks) -> None:
    four_ranks.run(_count)


def _count() -> None:
    model = models("tensor parallel")
    model(*vectors(0, 0)).sum().backward()
    with Collectives() as collectives:
        clip_grad_norm_(model.parameters(), 1.0)
    assert len(collectives.seen) == 2


def test_one_rank_may_have_no_gradient_and_a_norm_that_is_not_finite_is_told_to_all(four_ranks: Ranks) -> None:
    four_ranks.run(_not_finite)


def _not_finite() -> None:
    model = simple_fsdp(nn.Linear(6, 8))
    for param in model.parameters():
        if dist.get_rank():
            param.grad = torch.ones_like(param)
    total = clip_grad_norm_(model.parameters(), 1e9)
    torch.testing.assert_close(total, torch.tensor(math.sqrt(0.75 * 56)))
    if dist.get_rank() == 1:
        param.grad._local_tensor[0] = math.nan
    before = [None if p.grad is None else local(p.grad).clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"error_if_nonfinite: the norm of order 2\.0 of all gradients is nan"):
        clip_grad_norm_(model.parameters(), 0.1, error_if_nonfinite=True)
    for param, value in zip(model.parameters(), before, strict=True):
        if value is not None:
            torch.testing.assert_close(local(param.grad), value, rtol=0, atol=0, equal_nan=True)
    assert clip_grad_norm_(model.parameters(), 0.1).isnan()


@pytest.mark.usefixtures("one_of_four")
def test_clipping_one_parameter_none_and_bad_arguments() -> None:
    model = simple_fsdp(nn.Linear(6, 8))
    assert clip_grad_norm_([], 1.0) == 0
    assert clip_grad_norm_(model.parameters(), 1.0) == 0
    with pytest.raises(ValueError, match="norm_type: expected a positive number or infinity, found 0"):
        clip_grad_norm_(model.weight, 1.0, 0)
    param = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    param.grad = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    assert clip_grad_norm_(param, 1.0) == 5.0
    torch.testing.assert_close(param.grad, torch.tensor([0.6, 0.8], dtype=torch.bfloat16))
    mesh = init_device_mesh("cpu", (4,))
    summed = nn.Parameter(DTensor.from_local(torch.ones(2), mesh))
    summed.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(ValueError, match=r"parameters: a gradient is placed as \(Partial\(sum\),\)"):
        clip_grad_norm_(summed, 1.0)
