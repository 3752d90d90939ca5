"""Memory and work of an optimizer's step, by its name or as it is; the model is sharded, and may be on ``meta``."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from simplefsdp.analysis.prediction import StepState, step_state
from simplefsdp.training.optimizers.claims import optimizer_of
from simplefsdp.training.optimizers.distribute import EXCHANGE_BYTES, distribution_of
from simplefsdp.training.optimizers.hidden import hidden_matrices
from simplefsdp.training.optimizers.low_rank import GaLore
from simplefsdp.training.optimizers.moments import BLOCK
from simplefsdp.training.optimizers.newton_schulz import Muon
from simplefsdp.training.optimizers.ownership import Owned, cost, deal, exchange_groups, lanes, layout, sides
from simplefsdp.training.optimizers.ranger21 import Ranger21
from simplefsdp.training.optimizers.state_size import state_bytes

OPTIMIZERS = ("adamw", "sgd", "muon", "galore", "galore-8bit", "galore-factored")
"""Names of optimizers: ``sgd`` without momentum, ``galore`` at a quarter of the shorter side, as in its paper."""

_RANGER21_MOMENTS = 5
"""Tensors of a parameter's shape that ``Ranger21`` keeps."""
_ITERATIONS = 5
"""Newton-Schulz iterations of Muon."""
_SAMPLE = (64, 48)
"""Shape of a shard whose state is measured."""


class _Matrix(NamedTuple):
    """A parameter that an owner steps, as a matrix of its first dim and all others."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def short(self) -> int:
        return min(sides(self.shape))

    @property
    def long(self) -> int:
        return max(sides(self.shape))

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


class _OfMatrix(NamedTuple):
    """Memory and work of an optimizer for a matrix, by the settings of its group."""

    state_bytes: Callable[[_Matrix, Mapping[str, Any]], int]
    products: Callable[[_Matrix, Mapping[str, Any]], list[float]] = lambda *_: []
    """Operations of each product of matrices."""


def _state_of_muon(of: _Matrix, _: Mapping[str, Any]) -> int:
    return of.itemsize * of.short * of.long


def _products_of_muon(of: _Matrix, _: Mapping[str, Any]) -> list[float]:
    wide = 2.0 * of.short**2 * of.long
    return _ITERATIONS * [wide, 2.0 * of.short**3, wide]


def _state_of_galore(of: _Matrix, group: Mapping[str, Any]) -> int:
    rank = min(group["rank"], of.short)
    low = rank * of.long
    moments = {
        "full": 2 * of.itemsize * low,
        "8bit": 2 * (low + of.itemsize * -(-low // BLOCK)),
        "factored": of.itemsize * (rank + of.long + low * (group["betas"][0] != 0)),
    }
    return of.itemsize * rank * of.short + moments[group["moments"]] + 4  # and the count of steps


def _products_of_galore(of: _Matrix, group: Mapping[str, Any]) -> list[float]:
    return 2 * [2.0 * min(group["rank"], of.short) * of.short * of.long]


_OF_MATRIX: Mapping[type, _OfMatrix] = {
    Muon: _OfMatrix(_state_of_muon, _products_of_muon),
    torch.optim.Muon: _OfMatrix(_state_of_muon, _products_of_muon),
    GaLore: _OfMatrix(_state_of_galore, _products_of_galore),
}
"""Optimizers whose products of matrices are known."""


def optimizer_state(model: nn.Module, optimizer: str) -> StepState:
    """Return the state of a step of a sharded model, with the memory and work of an optimizer by name.

    Args:
        model: a model after ``simple_fsdp``; every parameter is sharded.
        optimizer: one of ``OPTIMIZERS``.
    """
    named: dict[str, Any] = dict(model.named_parameters())
    name, _, moments = optimizer.partition("-")
    if name not in ("muon", "galore"):
        return _on_shards([*named.values()], moments_bytes=0 if name == "sgd" else 8)
    hidden = hidden_matrices(model, {name: param for name, param in named.items() if param.requires_grad})
    rest = [param for name, param in named.items() if name not in hidden]
    owned: list[Owned] = []
    for params in lanes([*hidden.values()]).values():
        dealt = deal([cost(param.shape) for param in params], [0.0] * len(layout(params[0]).ranks))
        owned += [Owned(param, layout(param), owner) for param, owner in zip(params, dealt, strict=True)]

    def settings(each: Owned) -> tuple[_OfMatrix, Mapping[str, Any]]:
        quarter = max(1, _matrix(each).short // 4)
        group = {"rank": quarter, "moments": moments or "full", "betas": (0.9, 0.999)}
        return _OF_MATRIX[Muon if name == "muon" else GaLore], group

    return _sum([_on_shards(rest), _of_owned(owned, exchange_groups(owned, EXCHANGE_BYTES), settings)])


def state_of_parameters(params: Iterable[Any]) -> StepState:
    """Return the state of a step of sharded parameters, each with the optimizer that this library has seen for it.

    Those are optimizers that this library has made or changed; for other parameters two float32 moments are assumed.

    Args:
        params: parameters after ``simple_fsdp``.
    """
    members: dict[int, list[Any]] = defaultdict(list)
    optimizers: dict[int, torch.optim.Optimizer | None] = {}
    for param in params:
        optimizer = optimizer_of(param)
        optimizers[id(optimizer)] = optimizer
        members[id(optimizer)].append(param)
    return _sum([_state_of(optimizers[key], of) for key, of in members.items()])


def _state_of(optimizer: torch.optim.Optimizer | None, params: Sequence[Any]) -> StepState:
    """Return the state of the parameters of one optimizer."""
    if optimizer is None:
        return _on_shards(params)
    group_of = {id(param): i for i, group in enumerate(optimizer.param_groups) for param in group["params"]}
    distribution = distribution_of(optimizer)
    owned = {id(each.param): each for each in distribution.owned} if distribution else {}

    @functools.cache
    def measured(group: int, of: _Matrix) -> int:
        return state_bytes(optimizer, group, of.shape, of.dtype)

    def moments_bytes(param: Any) -> int:
        if isinstance(optimizer, Ranger21):
            return _RANGER21_MOMENTS * param.element_size()
        sample = _Matrix(_SAMPLE, param.dtype)  # what an optimizer does to a shard, it does to each of its values
        return measured(group_of[id(param)], sample) // math.prod(_SAMPLE)

    def owned_costs(each: Owned) -> tuple[_OfMatrix, Mapping[str, Any]]:
        group = group_of[id(each.param)]
        settings = optimizer.param_groups[group]
        if type(optimizer) in _OF_MATRIX and settings.get("algorithm") != "adamw":
            return _OF_MATRIX[type(optimizer)], settings
        return _OfMatrix(lambda of, _: measured(group, of)), settings

    def on_this_rank(param: Any) -> StepState:
        group = group_of[id(param)]
        if distribution is not None and distribution.ways[group] == "rows" and param.requires_grad:
            return _of_rows(param, optimizer.param_groups[group])
        return _on_shards([param], moments_bytes=moments_bytes(param))

    found = [on_this_rank(param) for param in params if id(param) not in owned]
    if distribution is not None and (mine := [owned[id(param)] for param in params if id(param) in owned]):
        found.append(_of_owned(mine, [exchange.owned for exchange in distribution.exchanges], owned_costs))
    return _sum(found)


def _on_shards(params: Sequence[Any], **moments: Any) -> StepState:
    return step_state([(p.simple_fsdp_info, p.dtype, p.requires_grad) for p in params], **moments)


def _of_rows(param: Any, group: Mapping[str, Any]) -> StepState:
    """Return the state of a matrix that GaLore steps by rows: each rank has the projection, and moments of its rows."""
    shards = _on_shards([param], moments_bytes=0)
    _, columns = sides(param.shape)
    rank = min(group["rank"], columns)
    rows = shards.gradient_bytes // (columns * param.element_size())
    projection, moments = (param.element_size() * rank * side for side in (columns, 2 * rows))
    return shards._replace(
        resident_bytes=shards.resident_bytes + projection + moments,
        updated_bytes=shards.updated_bytes + projection + 2 * moments,
        products=tuple(2 * [2.0 * rank * columns * rows]),
    )


def _is_offloaded(param: Any) -> bool:
    return param.simple_fsdp_info.communication.device is not None


def _of_owned(
    owned: Sequence[Owned],
    exchanged: Sequence[Sequence[Owned]],
    kind_of: Callable[[Owned], tuple[_OfMatrix, Mapping[str, Any]]],
) -> StepState:
    """Return the state of owned parameters and of their shards, on the rank that has most of it.

    Args:
        exchanged: groups of them that are exchanged together, in this order.
        kind_of: what steps a parameter, and the settings of its group.
    """
    shards = _on_shards([each.param for each in owned], moments_bytes=0)
    owned, *exchanged = (
        [each for each in group if not _is_offloaded(each.param)]  # of which all is on CPU
        for group in (owned, *exchanged)
    )
    by_rank: dict[int, int] = defaultdict(int)
    products: dict[int, list[float]] = defaultdict(list)
    for each in owned:
        kind, settings = kind_of(each)
        by_rank[each.owner_rank] += kind.state_bytes(_matrix(each), settings)
        products[each.owner_rank] += kind.products(_matrix(each), settings)
    most = max(by_rank.values(), default=0)
    received = [_received(group) for group in exchanged]
    pairs = zip([0, *received], received, strict=False)  # two groups are under way
    return shards._replace(
        resident_bytes=shards.resident_bytes + most,
        updated_bytes=shards.updated_bytes + 2 * most,
        exchange_bytes=max((sum(pair) for pair in pairs), default=0),
        products=tuple(max(products.values(), key=sum, default=[])),
    )


def _matrix(each: Owned) -> _Matrix:
    return _Matrix(tuple(each.param.shape), each.param.dtype)


def _received(group: Sequence[Owned]) -> int:
    """Return the most bytes of values and gradients that an owner receives."""
    by_rank: dict[int, int] = defaultdict(int)
    for each in group:
        by_rank[each.owner_rank] += 2 * each.whole_bytes
    return max(by_rank.values(), default=0)


def _sum(states: Sequence[StepState]) -> StepState:
    """Return the state of several optimizers, or parts of one, which take their steps one after the other."""
    return StepState(
        sum(each.parameters for each in states),
        sum(each.resident_bytes for each in states),
        sum(each.updated_bytes for each in states),
        sum(each.gradient_bytes for each in states),
        max((each.exchange_bytes for each in states), default=0),
        tuple(flops for each in states for flops in each.products),
    )
