"""Moments of a matrix's gradients, and the step that they make: whole, factored as Adafactor's, or in 8 bits.

Sources: Kingma and Ba, "Adam" (arXiv 1412.6980), algorithm 1; Shazeer and Stern, "Adafactor" (arXiv 1804.04235),
algorithm 4 with the momentum of section 3 and torch's constants; Dettmers et al., "8-bit Optimizers via Block-wise
Quantization" (arXiv 2110.02861), by the functions of torchao.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

Moments = Literal["full", "factored", "8bit"]
"""How an optimizer keeps moments; see ``GaLore``."""

BLOCK = 256
"""Values that have one scale in 8 bits, as in the paper's source."""

_SIGNED = {"exp_avg": True, "exp_avg_sq": False}
"""Adam's moments, and whether they have a sign."""


def check_moments(moments: Any) -> None:
    """Raise ``ValueError`` if there are no moments of that name, ``ImportError`` if they need what is not installed."""
    if moments not in get_args(Moments):
        raise ValueError(f"moments: expected one of {get_args(Moments)}, found {moments!r}")
    if moments == "8bit":
        _torchao()


def normalised(state: dict[str, Any], gradient: Tensor, group: dict[str, Any]) -> Tensor:
    """Add a gradient to the moments in ``state``, and return the step of learning rate 1 that they make.

    Args:
        state: of the matrix; ``step`` counts this gradient already. Moments are made of zeros where there are none.
        gradient: (rows, columns), real.
        group: settings ``moments``, ``betas`` and ``eps``.
    """
    step: Callable[..., Tensor] = {"full": _adam, "8bit": _adam_in_8_bits, "factored": _adafactor}[group["moments"]]
    return step(state, gradient, int(state["step"]), *group["betas"], group["eps"])


def _adam(state: dict[str, Any], gradient: Tensor, step: int, beta1: float, beta2: float, eps: float) -> Tensor:
    for name in _SIGNED:
        if name not in state:
            state[name] = torch.zeros_like(gradient, memory_format=torch.contiguous_format)
    first, second = state["exp_avg"], state["exp_avg_sq"]
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    return first / (second / (1 - beta2**step)).sqrt_().add_(eps) / (1 - beta1**step)


def _adam_in_8_bits(
    state: dict[str, Any], gradient: Tensor, step: int, beta1: float, beta2: float, eps: float
) -> Tensor:
    """Take the step of the moments before they are rounded, as torchao's optimizers do."""
    moments: dict[str, Any] = {}
    for name, signed in _SIGNED.items():
        if name in state:
            moments[name] = _decoded(state[name], state[f"{name}_scale"], signed).to(gradient.dtype)
    made = _adam(moments, gradient, step, beta1, beta2, eps)
    for name, signed in _SIGNED.items():
        state[name], state[f"{name}_scale"] = _encoded(moments[name], signed)
    return made


def _encoded(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return codes, uint8, in the shape of ``values``, and the largest magnitude of each block of 256 values in a row.

    Scales have the dtype of the values, as ``Optimizer.load_state_dict`` would give them that one.
    """
    flat = values.float().flatten()
    scaled, scale = _torchao().scale_tensor(pad(flat, (0, -flat.numel() % BLOCK)), BLOCK)
    codes = _torchao().quantize_8bit_with_qmap(scaled, _map(signed, values.device))
    return codes[: flat.numel()].view(values.shape), scale.to(values.dtype)


def _decoded(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    flat = codes.flatten().int()  # load_state_dict makes floats of them
    padded = pad(flat, (0, -flat.numel() % BLOCK))
    values: Tensor = _torchao().dequant_with_qmap(padded, _map(signed, codes.device), scale.float())
    return values[: flat.numel()].view(codes.shape)


@functools.cache
def _map(signed: bool, device: torch.device) -> Tensor:
    return torch.tensor(_torchao().create_dynamic_map(signed), device=device)


def _torchao() -> Any:
    try:
        return importlib.import_module("torchao.optim.quant_utils")
    except ImportError as error:
        raise ImportError(f"moments: '8bit' needs the package torchao ({error})") from error


def _adafactor(state: dict[str, Any], gradient: Tensor, step: int, beta1: float, _beta2: float, _eps: float) -> Tensor:
    """Second moments are a product of their means over columns and over rows; the step's root mean square is at most 1.

    Their decay is 1 - step^-0.8, and their least value the square of the dtype's ``eps``, as in ``torch.optim``.
    """
    new = step**-0.8
    rows, columns = gradient.square().mean(1, keepdim=True), gradient.square().mean(0, keepdim=True)
    state["row_var"] = rows if "row_var" not in state else state["row_var"].lerp_(rows, new)
    state["col_var"] = columns if "col_var" not in state else state["col_var"].lerp_(columns, new)
    least = torch.finfo(gradient.dtype).eps
    variance = state["row_var"] @ state["col_var"] / state["row_var"].mean().clamp_(min=least)
    made = gradient * variance.clamp_(min=least**2).rsqrt_()
    made /= made.square().mean().sqrt_().clamp_(min=1.0)
    if not beta1:
        return made
    if "exp_avg" not in state:
        state["exp_avg"] = torch.zeros_like(made)
    return state["exp_avg"].lerp_(made, 1 - beta1).clone()
