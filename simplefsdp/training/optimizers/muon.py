"""Muon for a model: which parameters are hidden matrices, and who steps them."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from simplefsdp.text.messages import matching
from simplefsdp.training.optimizers.distribute import EXCHANGE_BYTES, distribute_optimizer
from simplefsdp.training.optimizers.hidden import split_parameters
from simplefsdp.training.optimizers.newton_schulz import Muon, Scale

log = logging.getLogger("simplefsdp")


def muon(
    model: nn.Module,
    lr: float = 0.02,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    iterations: int = 5,
    scale: Scale = "original",
    weight_decay: float = 0.1,
    adamw: Sequence[str] = (),
    adamw_lr: float = 3e-4,
    adamw_betas: tuple[float, float] = (0.9, 0.95),
    adamw_weight_decay: float | None = None,
    split_rows: Mapping[str, int] | None = None,
    compiled: bool = False,
    exchange_bytes: int = EXCHANGE_BYTES,
) -> Muon:
    """Return an optimizer that steps the hidden matrices of ``model`` by Muon, and all else by AdamW.

    ::

        optimizer = muon(model, lr=0.02, adamw_lr=3e-4, split_rows={"*.wq.weight": 32})

    Hidden matrices are parameters of two dims or more, without embeddings (the parameters of ``nn.Embedding``) and
    output layers (matrices of the shape of an embedding that are in no numbered block, or the last of the model). They
    are stepped whole, each by the rank that owns it; AdamW steps shards. The log (``simplefsdp``, INFO) has the names.

    Args:
        model: a model, after ``simple_fsdp``. Parameters that need no gradient are left out.
        lr: learning rate of Muon. With ``scale="match_rms_adamw"`` one of AdamW's fits.
        momentum: see ``Muon``.
        nesterov: see ``Muon``.
        iterations: see ``Muon``.
        scale: see ``Muon``.
        weight_decay: decoupled, of hidden matrices.
        adamw: patterns (globs) of more parameters that AdamW is to step.
        adamw_lr: learning rate of AdamW.
        adamw_betas: of AdamW.
        adamw_weight_decay: of AdamW; ``None``: as ``weight_decay``.
        split_rows: how many matrices, one below the other, a parameter holds, by pattern: heads of a query projection,
            two for gate and up in one weight. Each is made orthogonal by itself. Others are taken as they are stored.
        compiled: see ``Muon``.
        exchange_bytes: see ``distribute_optimizer``.

    Raises:
        ValueError: a pattern names no parameter that it could apply to; a setting is out of range; the model has no
            hidden matrix.
        TypeError: ``compiled`` is not ``True`` or ``False``; and see ``distribute_optimizer``.
        RuntimeError: see ``distribute_optimizer``.
    """
    hidden, rest = split_parameters(model, adamw)
    if not hidden:
        raise ValueError("model: it has no hidden matrix that muon could step")
    pieces = dict.fromkeys(hidden, 1)
    for pattern, count in (split_rows or {}).items():
        pieces |= dict.fromkeys(matching("split_rows", "parameter", pattern, hidden), count)
    groups: list[dict[str, Any]] = [
        {
            "params": [hidden[name] for name in hidden if pieces[name] == count],
            "algorithm": "muon",
            "split_rows": count,
            "weight_decay": weight_decay,
        }
        for count in sorted(set(pieces.values()))
    ]
    decay = weight_decay if adamw_weight_decay is None else adamw_weight_decay
    if rest:
        groups.append({"params": [*rest.values()], "algorithm": "adamw", "lr": adamw_lr, "weight_decay": decay})
    log.info("muon steps %s; AdamW steps %s", ", ".join(hidden), ", ".join(rest) or "nothing")
    optimizer = Muon(
        groups,
        lr,
        momentum=momentum,
        nesterov=nesterov,
        iterations=iterations,
        scale=scale,
        compiled=compiled,
        betas=adamw_betas,
    )
    return distribute_optimizer(optimizer, exchange_bytes=exchange_bytes)
