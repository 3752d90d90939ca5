"""GaLore for a model: which parameters are projected, and who steps them."""

import logging
from collections.abc import Sequence
from typing import Any, Literal

from torch import nn

from simplefsdp.training.optimizers.distribute import EXCHANGE_BYTES, distribute_optimizer
from simplefsdp.training.optimizers.hidden import split_parameters
from simplefsdp.training.optimizers.low_rank import GaLore
from simplefsdp.training.optimizers.moments import Moments

log = logging.getLogger("simplefsdp")


def galore(
    model: nn.Module,
    rank: int,
    lr: float = 1e-3,
    *,
    on: Literal["owners", "rows"] = "owners",
    refresh: int = 200,
    scale: float = 0.25,
    moments: Moments = "full",
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adamw: Sequence[str] = (),
    seed: int = 0,
    exchange_bytes: int = EXCHANGE_BYTES,
) -> GaLore:
    """Return an optimizer that steps the hidden matrices of ``model`` by GaLore, and all else by AdamW.

    Hidden matrices are those of ``muon``. They are stepped whole, each by the rank that owns it, which alone has its
    moments and its projection; AdamW steps shards. With ``on="rows"`` those that have more rows than columns, and are
    sharded along rows, are stepped by rows instead: without any communication between two searches, but each rank
    has all projections of them.

    Args:
        model: a model, after ``simple_fsdp``. Parameters that need no gradient are left out.
        rank: see ``GaLore``; matrices with no side that is larger are stepped by AdamW.
        lr: learning rate of all parameters.
        on: ``"owners"``, or ``"rows"`` where that is possible: moments are ``"full"``, and the values those of one
            process up to the rounding of products.
        refresh: see ``GaLore``.
        scale: see ``GaLore``.
        moments: of projected gradients: ``"full"``, ``"8bit"`` or ``"factored"``, see ``GaLore``.
        betas: of AdamW, projected or not.
        eps: of AdamW, projected or not.
        weight_decay: decoupled, of all parameters.
        adamw: patterns (globs) of more parameters that are not to be projected.
        seed: see ``GaLore``.
        exchange_bytes: see ``distribute_optimizer``.

    Raises:
        ValueError: a pattern names no parameter; a setting is out of range; the model has no hidden matrix.
        ImportError: ``moments`` needs a package that is not installed.
        TypeError, RuntimeError: see ``distribute_optimizer``.
    """
    if not isinstance(rank, int):
        raise TypeError(f"rank: expected a number, found {rank!r}")
    hidden, rest = split_parameters(model, adamw, shortest_side=rank + 1)
    if not hidden:
        raise ValueError(f"rank: the model has no hidden matrix of a higher rank than {rank}")
    groups: list[dict[str, Any]] = [{"params": [*hidden.values()]}]
    if rest:
        groups.append({"params": [*rest.values()], "algorithm": "adamw"})
    log.info("GaLore projects %s; AdamW steps %s", ", ".join(hidden), ", ".join(rest) or "nothing else")
    settings: Any = {"refresh": refresh, "scale": scale, "betas": betas, "eps": eps, "seed": seed, "moments": moments}
    optimizer = GaLore(groups, rank, lr, on=on, weight_decay=weight_decay, **settings)
    return distribute_optimizer(optimizer, exchange_bytes=exchange_bytes)
