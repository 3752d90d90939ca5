"""Muon: momentum that is made orthogonal by Newton-Schulz iterations, many matrices of a shape at once.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); the scale that matches AdamW is
that of Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982). ``torch.optim.Muon`` does the same to one
matrix after the other.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from inductor_passes.torch_compat.dynamo import compiled_for_each_shape
from simplefsdp.training.optimizers.matrix_optimizer import MatrixOptimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial that brings singular values near one; steep at zero, so five times suffice."""

Scale = Literal["original", "match_rms_adamw"]


class Muon(MatrixOptimizer):
    """Muon for matrices, and AdamW for the rest, by groups of parameters.

    A group with ``algorithm="muon"`` has parameters of two dims or more; trailing dims count as one. Its update is the
    momentum of the gradient, made orthogonal by ``newton_schulz``; on a GPU matrices of one shape are stacked, and go
    through the same products. A group with ``algorithm="adamw"`` is stepped by AdamW of torch, fused on a GPU. ``muon``
    makes both groups of a model.

    Args:
        params: parameters, or groups of them, as of any optimizer.
        lr: learning rate.
        algorithm: ``"muon"`` or ``"adamw"``.
        momentum: share of the last momentum in the next one (``muon``).
        nesterov: look ahead by one more step of momentum (``muon``).
        iterations: number of Newton-Schulz iterations (``muon``).
        scale: factor of the update of a matrix of a rows and b columns: ``"original"``: sqrt(max(1, a / b));
            ``"match_rms_adamw"``: 0.2 sqrt(max(a, b)), with which learning rates of AdamW fit (``muon``).
        split_rows: number of matrices, one below the other, that each parameter holds, such as heads (``muon``).
        compiled: whether TorchInductor compiles the iterations, once for each shape of what goes through them together
            (``muon``). The first step then takes seconds for each shape. Values differ by roundings.
        betas: of AdamW (``adamw``).
        eps: of AdamW (``adamw``).
        weight_decay: decoupled, multiplied by ``lr``.

    Raises:
        TypeError: ``compiled`` is not ``True`` or ``False``.
        ValueError: a setting is out of range; a parameter of ``"muon"`` has one dim or none, or rows that
            ``split_rows`` does not divide.
    """

    own = "muon"
    said = "muon steps"
    positive = ("iterations", "split_rows")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        *,
        algorithm: Literal["muon", "adamw"] = "muon",
        momentum: float = 0.95,
        nesterov: bool = True,
        iterations: int = 5,
        scale: Scale = "original",
        split_rows: int = 1,
        compiled: bool = False,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ):
        defaults = {
            "lr": lr,
            "algorithm": algorithm,
            "momentum": momentum,
            "nesterov": nesterov,
            "iterations": iterations,
            "scale": scale,
            "split_rows": split_rows,
            "compiled": compiled,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        if group["scale"] not in ("original", "match_rms_adamw"):
            raise ValueError(f"scale: expected 'original' or 'match_rms_adamw', found {group['scale']!r}")
        if not isinstance(group["compiled"], bool):
            raise TypeError(f"compiled: expected True or False, found {group['compiled']!r}")
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"momentum: expected from 0 to less than 1, found {group['momentum']}")
        for param in group["params"] if group["algorithm"] == self.own else ():
            if param.shape[0] % group["split_rows"]:
                pieces = group["split_rows"]
                raise ValueError(f"split_rows: {tuple(param.shape)} cannot be split into {pieces} equal matrices")

    def step_matrices(self, params: list[Tensor], group: dict[str, Any]) -> None:
        gradients: list[Any] = [param.grad for param in params]
        for param in params:
            if not self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        momenta = [self.state[param]["momentum_buffer"] for param in params]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        updates = momenta
        if group["nesterov"]:
            updates = list(torch._foreach_lerp(gradients, momenta, group["momentum"]))
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        batches: dict[Any, list[int]] = {}
        for i, param in enumerate(params):
            # On a CPU a batch of several would be taken apart again.
            batches.setdefault(i if param.device.type == "cpu" else param.shape, []).append(i)
        for members in batches.values():
            shape = params[members[0]].shape
            matrices = [updates[i].reshape(group["split_rows"], shape[0] // group["split_rows"], -1) for i in members]
            batch = torch.cat(matrices) if len(matrices) > 1 else matrices[0]
            orthogonal = newton_schulz(batch, group["iterations"], compiled=group["compiled"]).split(
                group["split_rows"]
            )
            step = -group["lr"] * _scale(group["scale"], *batch.shape[1:])
            for i, update in zip(members, orthogonal, strict=True):
                params[i].add_(update.reshape(shape), alpha=step)


def newton_schulz(matrices: Tensor, iterations: int = 5, *, compiled: bool = False) -> Tensor:
    """Return matrices with about the same singular vectors, and singular values between about 0.7 and 1.2.

    A matrix of zeros stays one. On a GPU all matrices go through the same products. On a CPU they go one by one, as
    rounding depends on the size of a batch there: which matrices a rank owns must not show in their values.

    Args:
        matrices: (number, rows, columns), of any floating dtype.
        iterations: how often the polynomial x (a + b x^2 + c x^4), of ``COEFFICIENTS``, is applied.
        compiled: whether ``torch.compile`` compiles the iterations, once for each shape.

    Returns:
        (number, rows, columns) in bfloat16.
    """
    apply = _compiled() if compiled else iterate
    if matrices.device.type == "cpu":
        orthogonal = [apply(each, iterations) for each in matrices]
        return torch.stack(orthogonal) if len(orthogonal) > 1 else orthogonal[0][None]
    return apply(matrices, iterations)


@functools.cache
def _compiled() -> Callable[[Tensor, int], Tensor]:
    """Return ``iterate`` as a function that is compiled for each shape."""
    return compiled_for_each_shape(iterate)


def iterate(matrices: Tensor, iterations: int) -> Tensor:
    """Apply ``newton_schulz`` to a matrix or a batch of them; each iteration is three products.

    Two of them begin with a copy of what they add to; a compiler has nothing to fuse but the norm and the first cast.
    A batch of one would take half as long again on a CPU, where batched products copy what is transposed.
    """
    a, b, c = COEFFICIENTS
    product = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if tall else matrices
    norms = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    x = (wide / norms.clamp(min=1e-7)).bfloat16()
    for _ in range(iterations):
        gram = x @ x.mT
        polynomial = product(gram, gram, gram, beta=b, alpha=c)
        x = product(x, polynomial, x, beta=a)
    return x.mT if tall else x


def _scale(scale: Scale, rows: int, columns: int) -> float:
    return math.sqrt(max(1, rows / columns)) if scale == "original" else 0.2 * math.sqrt(max(rows, columns))
