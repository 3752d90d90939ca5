"""AdamW for the parameters that are no matrix, inside of optimizers of matrices."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


def step_by_adamw(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], group: dict[str, Any]) -> None:
    """Step parameters that have gradients as ``torch.optim.AdamW`` does, with its names of state.

    Args:
        optimizer: the optimizer whose ``state`` has the moments.
        params: plain tensors, or ``DTensor``.
        group: settings ``lr``, ``betas``, ``eps`` and ``weight_decay``.
    """
    for param in params:
        if not optimizer.state[param]:
            optimizer.state[param] |= {
                "step": torch.zeros((), dtype=torch.float32, device=param.device),
                "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
            }
    state = [optimizer.state[param] for param in params]
    gradients: list[Any] = [param.grad for param in params]
    beta1, beta2 = group["betas"]
    adamw(
        list(params),
        gradients,
        [each["exp_avg"] for each in state],
        [each["exp_avg_sq"] for each in state],
        [],
        [each["step"] for each in state],
        foreach=False,
        # On a CPU the fused kernel rounds the last values of a tensor otherwise, so of a shard other ones.
        fused=all(param.is_floating_point() and param.is_cuda for param in params),
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
