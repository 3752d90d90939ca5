"""``wire_errors``: how far off weights and gradients are that travel in a wire format, while a model trains."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from inductor_passes.ops.encode import DECODE_SUMS, DECODE_WEIGHTS, ENCODE_GRADIENTS, ENCODE_SHARDS
from inductor_passes.torch_compat.dtensor import local_tensor
from simplefsdp.frontend.gradient_accumulation import sharded_attributes
from simplefsdp.text.messages import matching


class WireError(NamedTuple):
    """Errors that a wire format makes of a parameter: their norm over the norm of what is sent, 0 for zeros."""

    gather: float | None
    """Error of the weight; ``None`` without a format for gathers, or where this rank has no part of the weight."""
    reduce: float | None
    """Error of the gradient; ``None`` without a format for reductions, or where this rank has no gradient now."""


@torch.no_grad()
def wire_errors(model: nn.Module, parameters: str = "*") -> dict[str, WireError]:
    """Return the relative errors that wire formats make of parameters as they are now, by FQN.

    This rank's shard of each weight, and of its gradient, is encoded and decoded once more. That takes no collective,
    the time of a few copies of them and one wait for the device. So any rank can call it alone, for all parameters or a
    few, whenever gradients are there. The error of a gradient is an estimate: the mean over the ranks, each of whose
    gradients has been rounded once, is rounded again. Where ranks have different batches that is about the error which
    the mean has already. Rounding between nodes (``WireFormat.between_nodes``) is not counted. Formats are those of
    ``simple_fsdp(wire=...)``; with ``options={"wire": "auto"}`` the planner uses them, milder ones or none.

    Args:
        model: what ``simple_fsdp`` or ``torch.compile`` returned.
        parameters: a glob; only parameters that match it are looked at.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: no parameter of ``model`` travels in a wire format, or none of those matches ``parameters``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
    attributes = sharded_attributes(getattr(model, "_orig_mod", model))
    formats = {
        attribute.info.fqn: attribute
        for attribute in attributes
        if attribute.info.communication.gather_format or attribute.info.communication.reduce_format
    }
    if not formats:
        raise ValueError("model: no parameter travels in a wire format; see simple_fsdp(wire=...)")
    found = matching("parameters", "pattern", parameters, formats)
    norms: list[Tensor] = []  # of an error, and of what was sent
    places: dict[tuple[str, str], int] = {}
    for fqn in found:
        param, comm = formats[fqn].param, formats[fqn].info.communication
        sent = {"gather": (comm.gather_format, param, _gathered), "reduce": (comm.reduce_format, param.grad, _reduced)}
        for direction, (wire_format, value, decoded) in sent.items():
            if wire_format and value is not None and (own := local_tensor(value)).numel():
                flat = own.movedim(comm.dim or 0, 0).reshape(-1)
                places[fqn, direction] = len(norms)
                norms += _norms(flat, decoded, wire_format)
    numbers = torch.stack(norms).tolist() if norms else []
    return {
        fqn: WireError(*(_ratio(numbers, places.get((fqn, direction))) for direction in ("gather", "reduce")))
        for fqn in found
    }


def _norms(flat: Tensor, decoded: Callable[[Tensor, str], Tensor], wire_format: str) -> tuple[Tensor, Tensor]:
    wide = flat.float()
    return torch.linalg.vector_norm(decoded(flat, wire_format) - wide), torch.linalg.vector_norm(wide)


def _gathered(shard: Tensor, wire_format: str) -> Tensor:
    numels = [shard.numel()]
    return DECODE_WEIGHTS(ENCODE_SHARDS([shard], numels, wire_format), 1, numels, wire_format, torch.float32)[0]


def _reduced(gradient: Tensor, wire_format: str) -> Tensor:
    sent = ENCODE_GRADIENTS([gradient], 1, wire_format, torch.float32)
    return DECODE_SUMS(sent, 1, [gradient.numel()], wire_format, torch.float32, 1.0)


def _ratio(numbers: list[float], place: int | None) -> float | None:
    if place is None:
        return None
    error, sent = numbers[place : place + 2]
    return error / sent if sent else error
