"""``hadamard_transform``: rotate activations or weights so that outliers spread, as before quantisation."""

import torch
from torch import Tensor

from inductor_passes.ops.hadamard import HADAMARD, HADAMARD_

LARGEST = 32_768
"""The longest block."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def hadamard_transform(x: Tensor, block: int | None = None, normalize: bool = True, *, inplace: bool = False) -> Tensor:
    """Return the Walsh-Hadamard transform of ``x`` along its last dim.

    The order of the transform is Sylvester's, as in ``scipy.linalg.hadamard``. Products are taken in float32 and the
    result is rounded to the dtype of ``x`` once. Differentiable (not ``inplace``) and traced by ``torch.compile`` as
    one operator.

    Args:
        x: (..., n) in float32, bfloat16 or float16.
        block: transform each so many neighbours, a power of two from 2 to 32,768 that divides n; ``None``: n.
        normalize: divide by the square root of ``block``: the transform is then orthogonal, and its own inverse.
        inplace: write the result into ``x``, which is contiguous and needs no gradient, and return ``x``. Beside ``x``
            only some blocks are in memory.

    Raises:
        TypeError: ``x`` is no tensor, or of another dtype.
        ValueError: ``block`` is no power of two in that range, or does not divide n; ``x`` is not contiguous and is to
            be written.
        RuntimeError: ``x`` needs a gradient and is to be written.

    Source: HadaCore (arXiv 2412.08832).
    """
    if not isinstance(x, Tensor) or x.dtype not in DTYPES:
        found = x.dtype if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise TypeError(f"x: expected a tensor in float32, bfloat16 or float16, found {found}")
    if x.ndim == 0:
        raise ValueError("x: expected at least one dim, found a 0-dim tensor")
    size = x.shape[-1] if block is None else block
    name = "the last dim of x" if block is None else "block"
    if isinstance(size, bool) or size < 2 or size > LARGEST or size & (size - 1):
        raise ValueError(f"{name}: expected a power of two from 2 to {LARGEST}, found {size}")
    if x.shape[-1] % size:
        raise ValueError(f"block: {size} does not divide the last dim of x, which is {x.shape[-1]}")
    scale = size**-0.5 if normalize else 1.0
    if not inplace:
        transformed: Tensor = HADAMARD(x, size, scale)
        return transformed
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("inplace: x needs a gradient; transform it out of place, or under torch.no_grad()")
    if not x.is_contiguous():
        raise ValueError("inplace: expected a contiguous x")
    HADAMARD_(x, size, scale)
    return x
