"""The Walsh-Hadamard transform of blocks, as matrix products.

The Hadamard matrix of order 2^k (Sylvester's) is a Kronecker product of smaller ones, so a block is seen as a box whose
sides are 128 or less, and multiplied along each side: few passes over the data, each a product that matrix units are
made for (HadaCore, arXiv 2412.08832). Some blocks go through all products before the next do, so that what is between
two products stays in a cache; it is in float32, and rounded to the dtype of the data once. On a GPU it is one kernel
(``hadamard_triton.py``).
"""

import functools
import math

import torch
from torch import Tensor

from inductor_passes.ops.pack import LIBRARY

_LARGEST = 128
"""The longest side of a box: the order of the largest matrix."""
_TOGETHER = 1 << 19
"""Number of values that go through all products together."""


@functools.cache
def hadamard_matrix(order: int, device: torch.device) -> Tensor:
    """Return Sylvester's Hadamard matrix of a power of two, (order, order) of 1 and -1 in float32; symmetric."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def hadamard(x: Tensor, block: int, scale: float) -> Tensor:
    """Return the transform of each ``block`` neighbours along the last dim, times ``scale``: new memory, contiguous.

    ``block`` is a power of two that divides the last dim, in which neighbours are contiguous or are copied.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _transform(x.reshape(-1, block), out.view(-1, block), scale)
    return out


def hadamard_(x: Tensor, block: int, scale: float) -> None:
    """Replace the contiguous ``x`` by its transform; beside ``x`` only some blocks are in memory."""
    _transform(x.view(-1, block), x.view(-1, block), scale)


def _transform(x: Tensor, out: Tensor, scale: float) -> None:
    if x.is_cuda:
        from inductor_passes.ops import hadamard_triton  # Triton is not there without a GPU

        hadamard_triton.transform(x, out, x.shape[1], scale)
        return
    rows = max(1, _TOGETHER // x.shape[1])
    for start in range(0, len(x), rows):
        some = x[start : start + rows].float().contiguous()
        inner = 1
        for side in _sides(x.shape[1]):
            matrix = hadamard_matrix(side, x.device)
            along = some.view(-1, side, inner)
            some = along.squeeze(-1) @ matrix if inner == 1 else torch.matmul(matrix, along)
            inner *= side
        out[start : start + rows] = some.view(-1, x.shape[1]).mul_(scale)


def _sides(block: int) -> list[int]:
    """Return the sides of the box that a block is seen as, about equally long, the innermost first."""
    count = max(1, math.ceil(math.log2(block) / math.log2(_LARGEST)))
    powers = [(block.bit_length() - 1 + i) // count for i in range(count)]
    return [2**power for power in reversed(powers)]


LIBRARY.define("hadamard(Tensor x, int block, float scale) -> Tensor")
LIBRARY.impl("hadamard", hadamard, "CompositeExplicitAutograd")
torch.library.register_fake(
    "simplefsdp::hadamard", lambda x, _block, _scale: torch.empty(x.shape, dtype=x.dtype, device=x.device), lib=LIBRARY
)
LIBRARY.define("hadamard_(Tensor(a!) x, int block, float scale) -> ()")
LIBRARY.impl("hadamard_", hadamard_, "CompositeExplicitAutograd")
torch.library.register_fake("simplefsdp::hadamard_", lambda _x, _block, _scale: None, lib=LIBRARY)

HADAMARD = torch.ops.simplefsdp.hadamard.default
HADAMARD_ = torch.ops.simplefsdp.hadamard_.default


def _setup_context(ctx, inputs, output) -> None:  # noqa: ARG001  # torch names its arguments
    _, ctx.block, ctx.scale = inputs


def _backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
    return HADAMARD(grad, ctx.block, ctx.scale), None, None  # the matrix is symmetric


torch.library.register_autograd("simplefsdp::hadamard", _backward, setup_context=_setup_context, lib=LIBRARY)
