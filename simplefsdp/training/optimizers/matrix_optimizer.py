"""The common part of optimizers of matrices: groups that AdamW steps beside their own, and checks of settings."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from simplefsdp.training.optimizers.closure import loss_of


class MatrixOptimizer(torch.optim.Optimizer):
    """An optimizer whose groups say by ``algorithm`` whether its own step or AdamW is for them."""

    own: str
    """The value of ``algorithm`` for groups of matrices."""
    said: str
    """The optimizer's name in errors, as the subject of a sentence."""
    at_least_zero: tuple[str, ...] = ("lr", "weight_decay", "eps")
    positive: tuple[str, ...] = ()
    """Settings that are positive whole numbers."""

    @abstractmethod
    def step_matrices(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """Step the parameters of a group that have gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step; ``closure`` computes the loss before it."""
        loss = loss_of(closure)
        for group in self.param_groups:
            if params := [param for param in group["params"] if param.grad is not None]:
                if group["algorithm"] == self.own:
                    self.step_matrices(params, group)
                else:
                    step_by_adamw(self, params, group)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; see the class for its settings."""
        super().add_param_group(param_group)
        try:
            self.check(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def check(self, group: dict[str, Any]) -> None:
        """Raise ``ValueError`` if a setting is out of range, or a parameter of a group of matrices is none."""
        for name in self.at_least_zero:
            if isinstance(group[name], int | float) and not group[name] >= 0:
                raise ValueError(f"{name}: expected a number of at least 0, found {group[name]}")
        if group["algorithm"] not in (self.own, "adamw"):
            raise ValueError(f"algorithm: expected {self.own!r} or 'adamw', found {group['algorithm']!r}")
        if not all(0 <= beta < 1 for beta in group["betas"]):
            raise ValueError(f"betas: expected from 0 to less than 1, found {group['betas']}")
        for name in self.positive:
            if isinstance(group[name], bool) or not isinstance(group[name], int) or group[name] < 1:
                raise ValueError(f"{name}: expected a positive number, found {group[name]!r}")
        for param in group["params"] if group["algorithm"] == self.own else ():
            if param.ndim < 2 or not param.is_floating_point():
                raise ValueError(f"params: {self.said} real matrices, found {tuple(param.shape)} of {param.dtype}")


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
