"""Memory and work of a step's optimizer, by its name, for a model that is sharded and may be on ``meta``."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from simplefsdp.analysis.prediction import StepState, step_state
from simplefsdp.training.optimizers.distribute import EXCHANGE_BYTES
from simplefsdp.training.optimizers.hidden import hidden_matrices
from simplefsdp.training.optimizers.ownership import Owned, cost, deal, exchange_groups, lanes, layout

OPTIMIZERS = ("adamw", "sgd", "muon", "galore")
"""Names of optimizers: ``sgd`` without momentum, ``galore`` at a quarter of the shorter side, as in its paper."""

_ITERATIONS = 5
"""Newton-Schulz iterations of Muon."""


class _OfMatrix(NamedTuple):
    """Memory and work of an optimizer for a matrix, from its shorter and its longer side."""

    state_bytes: Callable[[int, int], int]
    products: Callable[[int, int], list[float]]
    """Operations of each product of matrices."""


_OF_MATRIX = {
    "muon": _OfMatrix(
        lambda short, long: 4 * short * long,
        lambda short, long: _ITERATIONS * [2.0 * short * short * long, 2.0 * short**3, 2.0 * short * short * long],
    ),
    "galore": _OfMatrix(
        lambda short, long: 4 * (_rank(short) * short + 2 * _rank(short) * long + 1),
        lambda short, long: 2 * [2.0 * _rank(short) * short * long],
    ),
}


def optimizer_state(model: nn.Module, optimizer: str) -> StepState:
    """Return the state of a step of a sharded model, with this optimizer's memory and work.

    Args:
        model: a model after ``simple_fsdp``; every parameter is sharded.
        optimizer: one of ``OPTIMIZERS``.
    """
    named: dict[str, Any] = dict(model.named_parameters())

    def of(params: Sequence[Any], **moments: Any) -> StepState:
        return step_state([(p.simple_fsdp_info, p.dtype, p.requires_grad) for p in params], **moments)

    if optimizer not in _OF_MATRIX:
        return of([*named.values()], moments_bytes=0 if optimizer == "sgd" else 8)
    trained = {name: param for name, param in named.items() if param.requires_grad}
    hidden = hidden_matrices(model, trained)
    rest = of([param for name, param in named.items() if name not in hidden])
    shards = of([*hidden.values()], moments_bytes=0)
    owned: list[Owned] = []
    for params in lanes([*hidden.values()]).values():
        dealt = deal([cost(param.shape) for param in params], [0.0] * len(layout(params[0]).ranks))
        owned += [Owned(param, layout(param), owner) for param, owner in zip(params, dealt, strict=True)]
    kind = _OF_MATRIX[optimizer]
    state_bytes: dict[int, int] = defaultdict(int)
    products: dict[int, list[float]] = defaultdict(list)
    for each in owned:
        rank = each.layout.ranks[each.owner]
        sides = sorted((each.param.shape[0], math.prod(each.param.shape[1:])))
        state_bytes[rank] += kind.state_bytes(sides[0], sides[1])
        products[rank] += kind.products(sides[0], sides[1])
    most = max(state_bytes.values(), default=0)
    received = [_received(group) for group in exchange_groups(owned, EXCHANGE_BYTES)]
    pairs = zip([0, *received], received, strict=False)  # two groups are under way
    return StepState(
        rest.parameters + shards.parameters,
        rest.resident_bytes + shards.resident_bytes + most,
        rest.updated_bytes + shards.updated_bytes + 2 * most,
        gradient_bytes=rest.gradient_bytes + shards.gradient_bytes,
        exchange_bytes=max((sum(pair) for pair in pairs), default=0),
        products=tuple(max(products.values(), key=sum, default=[])),
    )


def _received(group: Sequence[Owned]) -> int:
    """Return the most bytes of values and gradients that an owner receives."""
    by_rank: dict[int, int] = defaultdict(int)
    for each in group:
        by_rank[each.layout.ranks[each.owner]] += 2 * each.whole_bytes
    return max(by_rank.values())


def _rank(shorter: int) -> int:
    return max(1, shorter // 4)
