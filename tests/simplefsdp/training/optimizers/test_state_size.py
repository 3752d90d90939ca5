"""Bytes of state, from a step on fake tensors, beside those of a step."""

from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_leaves

from simplefsdp.training.optimizers.state_size import state_bytes

UNKNOWN = {"Magma", "SaRA"}
"""Optimizers whose step fails on fake tensors, of which two moments are assumed; neither can be distributed."""


def kinds() -> dict[str, Any]:
    found = {**vars(pytorch_optimizer), **vars(optim)}
    return {name: kind for name, kind in found.items() if isinstance(kind, type) and issubclass(kind, optim.Optimizer)}


def param_of(shape: tuple[int, ...]) -> nn.Parameter:
    param = nn.Parameter(torch.randn(shape))
    param.grad = torch.randn(shape)
    return param


def bytes_after_a_step(optimizer: Any) -> int:
    optimizer.step()
    leaves = tree_leaves([dict(of) for of in optimizer.state.values()])
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))


@pytest.mark.parametrize("shape", [(24, 40), (30,)])
def test_state_of_each_optimizer_is_that_of_a_step(shape: tuple[int, ...]) -> None:
    compared, wrong = [], set()
    for name, kind in kinds().items():
        try:
            optimizer = kind([param_of(shape)])
            predicted = state_bytes(optimizer, 0, shape, torch.float32)
            found = bytes_after_a_step(kind([param_of(shape)]))  # after it, in case that anything was left behind
        except Exception:  # it needs more arguments, a closure, or parameters of another kind
            continue
        compared.append(name)
        if predicted != found:
            wrong.add(name)
    assert wrong == UNKNOWN
    assert len(compared) > 100


def test_a_copy_takes_the_step_and_the_optimizer_is_left_as_it_is() -> None:
    param = param_of((8, 8))
    before = param.detach().clone()
    optimizer = optim.AdamW([param], amsgrad=True)
    assert state_bytes(optimizer, 0, (2048, 2**20), torch.bfloat16) == 3 * 2048 * 2**20 * 2 + 4
    assert torch.equal(param, before)
    assert not optimizer.state
