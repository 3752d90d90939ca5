"""Ranger21 on shards: AdamW and eight more ideas, with one all-reduce a step.

Source: Wright and Demeure, "Ranger21: a synergistic deep learning optimizer" (arXiv 2106.13731), Algorithm 1. The mean
of the second moments, by which the decay is divided, is that before the maximum is taken, as in the authors' code.

[Note: units]
A unit is a row of a parameter of two dims or more (all that one output reads), or a whole vector. Clipping,
centralization and the norm loss need sums over units. Of a unit that one rank holds they are sums here; of a unit that
is split over ranks, parts of the sums are added up in one vector, together with the sum of all second moments. That sum
is needed before the clipped gradient of a split unit is known, but is linear in it: with the factor c of the unit,
sum(c^2 (g - mean g)^2) = c^2 (sum(g^2) - sum(g)^2 / n).
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from inductor_passes.torch_compat.dtensor import local_tensor
from simplefsdp.training.optimizers.claims import claim
from simplefsdp.training.optimizers.closure import loss_of
from simplefsdp.training.optimizers.exchange import local_gradient, mesh_device, process_group
from simplefsdp.training.optimizers.ownership import layout, name_of


class Ranger21(torch.optim.Optimizer):
    """AdamW with adaptive gradient clipping, gradient centralization, positive-negative momentum, norm loss, stable
    weight decay, linear warm-up, an explore-exploit schedule and lookahead.

    It is built on ``model.parameters()`` of a sharded model, or of one that is not. Every rank steps its shards, with
    one all-reduce: of a number for the model, three for each vector, and three for each row that is split over ranks.
    Values are those of one process, up to the order of sums. ``state_dict()`` has the count of steps, and state of the
    shape of parameters, so checkpoints load on any number of ranks.

    Args:
        params: parameters or groups of them. Plain ones, and those that are sharded over some of the ranks of others,
            are taken to be the same on all ranks.
        iterations: number of steps of the run, after which the learning rate is zero.
        lr: learning rate between warm-up and warm-down.
        betas: decay of first and second moments.
        momentum_noise: beta_0 of positive-negative momentum; zero is plain momentum.
        weight_decay: factor of norm loss and stable weight decay, which draw unit norms towards one.
        clipping: largest norm of a unit's gradient, as a part of the unit's norm.
        clipping_eps: least norm of a unit that clipping assumes.
        lookahead_steps: number of steps between averages with the slow weights.
        lookahead: share of the slow weights that is kept.
        warmup: number of steps of linear warm-up; ``None``: 22 % of all. It never lasts longer than 2 / (1 - betas[1]).
        warmdown: number of steps of linear warm-down; ``None``: 28 % of all.
        eps: is added to the root of the second moments.

    Raises:
        ValueError: a setting is out of range; no parameter is on all ranks on which there are others.
        RuntimeError: a parameter was taken before ``simple_fsdp``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        iterations: int,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        momentum_noise: float = 0.9,
        weight_decay: float = 1e-4,
        clipping: float = 1e-2,
        clipping_eps: float = 1e-3,
        lookahead_steps: int = 5,
        lookahead: float = 0.5,
        warmup: int | None = None,
        warmdown: int | None = None,
        eps: float = 1e-8,
    ):
        _check_settings({key: value for key, value in locals().items() if key not in ("self", "params", "__class__")})
        defaults = {
            "lr": lr,
            "betas": betas,
            "momentum_noise": momentum_noise,
            "weight_decay": weight_decay,
            "clipping": clipping,
            "clipping_eps": clipping_eps,
            "lookahead_steps": lookahead_steps,
            "lookahead": lookahead,
            "iterations": iterations,
            "warmup": max(1, round(0.22 * iterations)) if warmup is None else warmup,
            "warmdown": max(1, round(0.28 * iterations)) if warmdown is None else warmdown,
            "eps": eps,
            "step": 0,
        }
        super().__init__(params, defaults)
        sharded = [param for group in self.param_groups for param in group["params"] if isinstance(param, DTensor)]
        claim(sharded, self)
        # Beside tensor-parallel parameters there are some that only one row of their mesh is sharded over.
        self._widest = max(sharded, key=lambda param: len(layout(param).ranks), default=None)
        for param in sharded:
            widest = cast(DTensor, self._widest)
            if not set(layout(param).ranks) <= set(layout(widest).ranks):
                raise ValueError(f"params: {name_of(param)} is on ranks on which {name_of(widest)} is not")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step on this rank's shards; ``closure`` computes the loss before it. Every rank takes part."""
        loss = loss_of(closure)
        members = []
        for group in self.param_groups:
            group["step"] += 1
            params = [param for param in group["params"] if _has_gradient(param)]
            members += [_Member(param, group, self._state_of(param), self._widest) for param in params]
        if members:
            mean_variance = _reduce(members, self._widest)
            for member in members:
                member.update(mean_variance)
        return loss

    def _state_of(self, param: Tensor) -> dict[str, Tensor]:
        state = self.state[param]
        if not state:
            state.update({name: torch.zeros_like(param) for name in ("odd", "even", "variance", "max_variance")})
            state["slow"] = param.detach().clone()
        return {name: local_tensor(value) for name, value in state.items()}


class _Sums(NamedTuple):
    """Sums over each unit of a parameter that this rank has a part of, with the dims of the parameter."""

    gradient: Tensor
    squared_gradient: Tensor
    squared_value: Tensor


class _Member:
    """A parameter with a gradient, in one step."""

    def __init__(self, param: Any, group: dict[str, Any], state: dict[str, Tensor], widest: DTensor | None):
        self.param, self.group, self.state = param, group, state
        self.value = local_tensor(param.detach())
        self.gradient = local_gradient(param)
        self.unit_dims = tuple(range(1 if param.ndim > 1 else 0, param.ndim))
        self.unit_size = math.prod(param.shape[dim] for dim in self.unit_dims)
        self.correction = 1 - group["betas"][1] ** group["step"]
        self.sums = self._unit_sums()
        self.counts = True  # whether this rank, of those that hold the same part, adds it to what is reduced
        self.rows: slice | None = None
        self.is_split = False
        if isinstance(param, DTensor):
            of = layout(param)
            me = of.ranks.index(dist.get_rank())
            self.counts = not any(of.replica[me]) and min(layout(cast(DTensor, widest)).ranks) in of.ranks
            self.rows = of.parts[me][0] if param.ndim > 1 else None
            self.is_split = any(
                not placement.is_replicate() and placement.dim in self.unit_dims  # type: ignore[attr-defined]
                for placement in param.placements
            )

    def _unit_sums(self) -> _Sums:
        def total(of: Tensor) -> Tensor:
            of = of.float()
            return of.sum(self.unit_dims, keepdim=True) if self.unit_dims else of

        return _Sums(total(self.gradient), total(self.gradient.float().square()), total(self.value.float().square()))

    def factor(self, sums: _Sums) -> Tensor:
        """Return the factor by which each unit's gradient is clipped."""
        largest = self.group["clipping"] * sums.squared_value.sqrt().clamp(min=self.group["clipping_eps"])
        return (largest / sums.squared_gradient.sqrt()).nan_to_num(nan=1.0).clamp(max=1.0)

    def mean(self, sums: _Sums) -> Tensor | float:
        """Return the mean of each unit's gradient, which centralization subtracts; vectors are not centralized."""
        return sums.gradient / self.unit_size if self.param.ndim > 1 else 0.0

    def clip(self, sums: _Sums) -> None:
        """Clip and centralize the gradient, and take it into the second moments."""
        self.sums = sums
        self.gradient = (self.factor(sums) * (self.gradient - self.mean(sums))).to(self.value.dtype)
        beta = self.group["betas"][1]
        self.state["variance"].mul_(beta).addcmul_(self.gradient, self.gradient, value=1 - beta)

    def update(self, mean_variance: Tensor) -> None:
        """Move the parameter, given the mean of all second moments."""
        group, state, t = self.group, self.state, self.group["step"]
        lr = group["lr"] * _schedule(group)
        beta, noise = group["betas"][0] ** 2, group["momentum_noise"]
        now, before = (state["odd"], state["even"]) if t % 2 else (state["even"], state["odd"])
        now.mul_(beta).add_(self.gradient, alpha=1 - beta)
        torch.maximum(state["max_variance"], state["variance"], out=state["max_variance"])
        denominator = (state["max_variance"] / self.correction).sqrt_().add_(group["eps"])
        momentum = ((1 + noise) * now).sub_(before, alpha=noise)
        norm = self.sums.squared_value.sqrt().clamp(min=group["eps"])
        decay = lr * group["weight_decay"] / mean_variance.sqrt().clamp(min=group["eps"]) * (1 - 1 / norm)
        self.value.mul_((1 - decay).to(self.value.dtype))
        step = lr / ((1 - group["betas"][0] ** t) * math.hypot(1 + noise, noise))
        self.value.addcdiv_(momentum, denominator, value=-step)
        if t % group["lookahead_steps"] == 0:
            state["slow"].lerp_(self.value, 1 - group["lookahead"])
            self.value.copy_(state["slow"])


def _reduce(members: Sequence[_Member], widest: DTensor | None) -> Tensor:
    """Give every member the sums of its units over all ranks, and return the mean of all second moments."""
    for member in members:
        if not member.is_split:
            member.clip(member.sums)
    total = torch.zeros((), device=members[0].value.device)
    here = torch.zeros_like(total)  # of parameters that are the same on every rank, which are not reduced
    parts: list[Tensor] = []
    for member in members:
        variance = member.state["variance"].float().sum() / member.correction
        if not isinstance(member.param, DTensor):
            here += variance
        elif member.counts:
            total += member.group["betas"][1] * variance if member.is_split else variance
        if member.is_split:
            for of in member.sums:
                units = torch.zeros(member.param.shape[0] if member.rows else 1, device=total.device)
                if member.counts:
                    units[member.rows if member.rows else slice(None)] = of.flatten()
                parts.append(units)
    vector = _all_reduce(torch.cat([total.reshape(1), *parts]), widest)
    total, *reduced = vector.split([1, *(part.numel() for part in parts)])
    total = total[0] + here
    for member in members:
        if member.is_split:
            whole = _Sums(*(reduced.pop(0) for _ in range(3)))
            squares = whole.squared_gradient - member.mean(whole) * whole.gradient
            added = (member.factor(whole).square() * squares).sum()
            total = total + (1 - member.group["betas"][1]) * added / member.correction
            rows = member.rows if member.rows else slice(None)
            member.clip(_Sums(*(of[rows].reshape(mine.shape) for of, mine in zip(whole, member.sums, strict=True))))
    return total / sum(member.param.numel() for member in members)


def _all_reduce(vector: Tensor, widest: DTensor | None) -> Tensor:
    if widest is None:
        return vector
    total = vector.to(mesh_device(widest.device_mesh))
    dist.all_reduce(total, group=process_group(widest.device_mesh))
    return total.to(vector.device)


def _schedule(group: dict[str, Any]) -> float:
    """Return the factor of the learning rate: linear warm-up, ones, linear warm-down."""
    t = group["step"]
    up = max(t * (1 - group["betas"][1]) / 2, t / group["warmup"])
    return max(0.0, min(1.0, up, (group["iterations"] - t) / group["warmdown"]))


def _has_gradient(param: Tensor) -> bool:
    if param.grad is not None and (param.is_complex() or param.grad.is_sparse):
        raise TypeError(f"{name_of(param)}: Ranger21 steps real parameters with dense gradients")
    return param.grad is not None


def _check_settings(settings: dict[str, Any]) -> None:
    for name in ("lr", "weight_decay", "clipping", "clipping_eps", "eps", "momentum_noise"):
        if not settings[name] >= 0:
            raise ValueError(f"{name}: expected a number of at least 0, found {settings[name]}")
    for name, values in (("lookahead", [settings["lookahead"]]), ("betas", settings["betas"])):
        if not all(0 <= value < 1 for value in values):
            raise ValueError(f"{name}: expected from 0 to less than 1, found {settings[name]}")
    for name in ("iterations", "lookahead_steps", "warmup", "warmdown"):
        value = settings[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}: expected a positive number of steps, found {value!r}")
