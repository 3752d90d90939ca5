"""Find out by trial whether an optimizer may step shards, or needs whole parameters.

A copy of the optimizer, with its settings and without state, takes a few steps on small parameters: all of them whole
in one process, then by parts as sharded ranks would, then each parameter whole but apart from the others as owners
would. Values that are the same to the bit show what the optimizer's arithmetic depends on, whatever its code is.
"""

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from simplefsdp.training.optimizers.substitutes import Substitute, substitution

Way = Literal["shards", "rows", "owners", "owners at once"]
"""Where parameters are stepped. ``"rows"``: on each rank by GaLore, which is given the ``DTensor``, or on owners.
``"owners at once"``: a rank must step all its parameters by one call, as the optimizer counts its calls."""

_SMALL: dict[int, tuple[int, ...]] = {0: (), 1: (11,), 2: (7, 5), 3: (7, 3, 2), 4: (7, 2, 3, 3)}
_LARGE: dict[int, tuple[int, ...]] = {1: (517,), 2: (161, 135), 3: (133, 6, 3), 4: (133, 5, 3, 3)}
"""Shapes by number of dims; the large ones pass the sizes from which optimizers factor, quantise or precondition."""

_STEPS = {"small": 60, "large": 12}
"""Some optimizers begin to precondition, or leave their warm-up, after some steps."""


def way_of(optimizer: torch.optim.Optimizer, group: int, *, whole_model: bool = False) -> Way:
    """Return where the parameters of one group of ``optimizer.param_groups`` may be stepped.

    Args:
        optimizer: an optimizer that has taken no step.
        group: index of the group.
        whole_model: whether all parameters may have one owner.

    Raises:
        TypeError: its step fails, needs a closure, draws random numbers, changes nothing, or depends on the other
            parameters.
    """
    name = type(optimizer).__name__
    params = optimizer.param_groups[group]["params"]
    ndims = sorted({min(param.ndim, 4) for param in params})
    trials: list[tuple[_Trial, list[Tensor]]] = []  # with the values that one process ends with
    for size in _STEPS:
        trial = _Trial(optimizer, group, ndims, size)
        try:
            expected, again = (trial.steps(_in_one_process, seed) for seed in (0, 1))
        except Exception as error:
            needs = "its step needs a closure" if _needs_closure(error) else f"its step fails: {error!r}"
            raise TypeError(f"optimizer: {name} cannot be distributed, {needs} (on a few small parameters)") from error
        if not _same(expected, again):
            raise TypeError(
                f"optimizer: {name} cannot be distributed, its step draws random numbers or is not repeatable"
            )
        if any(torch.equal(*pair) for pair in zip(expected, trial.values, strict=True)):
            raise TypeError(
                f"optimizer: {name} cannot be distributed, it leaves a parameter as it is in {_STEPS[size]} steps"
            )
        trials.append((trial, expected))
    splits = [0, *sorted({d for param in params if isinstance(param, DTensor) for d in _dims(param)} - {0})]

    def same(way: Callable[..., Any]) -> bool:
        try:
            return all(_same(expected, trial.steps(way, seed=0)) for trial, expected in trials)
        except Exception:
            return False

    if all(same(functools.partial(_by_parts, dim=dim)) for dim in splits):
        return "shards"
    if whole_model and same(_at_once):
        return "owners at once"
    if same(_apart):
        return "owners"
    if same(functools.partial(_apart, at_once=True)):
        return "owners at once"
    if whole_model:
        raise TypeError(f"optimizer: {name} cannot be distributed, it keeps parameters or gradients between its steps")
    raise TypeError(
        f"optimizer: {name} cannot be distributed, what its step does to a parameter depends on other parameters (a "
        "norm or mean over the model?). whole_model=True lets one rank step the whole model, if it has the memory"
    )


class _Trial:
    """A few steps of a copy of an optimizer on random parameters and gradients, always the same ones."""

    def __init__(self, optimizer: torch.optim.Optimizer, group: int, ndims: Sequence[int], size: str):
        self._optimizer, self._group, self._steps = optimizer, group, _STEPS[size]
        shapes = [_SMALL[ndim] if size == "small" or ndim == 0 else _LARGE[ndim] for ndim in ndims for _ in range(3)]
        generator = torch.Generator().manual_seed(0)
        self._device = device = optimizer.param_groups[group]["params"][0].device

        def draw(scale: float) -> list[Tensor]:
            return [(scale * torch.randn(shape, generator=generator)).to(device) for shape in shapes]

        self.values = draw(1.0)
        drift = draw(0.1)  # what estimates of a distance to the solution look for
        self._gradients = [
            [mean + noise for mean, noise in zip(drift, draw(0.1), strict=True)] for _ in range(self._steps)
        ]

    def steps(self, way: Callable[..., Any], seed: int) -> list[Tensor]:
        """Return values after all steps, taken by ``way``, with torch's generator seeded by ``seed``."""
        kind = self._device.type
        fork: Any = {"devices": []} if kind == "cpu" else {"devices": [self._device], "device_type": kind}
        with torch.random.fork_rng(**fork), torch.compiler.set_stance("force_eager"):
            torch.manual_seed(seed)
            take = way(self)
            values = [value.clone() for value in self.values]
            for gradients in self._gradients:
                values = take(values, gradients)
        return values

    def copy(self) -> torch.optim.Optimizer:
        """Return a copy of the optimizer, with the settings of one of its groups and nothing to step."""
        return fresh_copy(self._optimizer, self._group)


def fresh_copy(optimizer: torch.optim.Optimizer, group: int) -> torch.optim.Optimizer:
    """Return a copy of an optimizer, with the settings of one of its groups and nothing to step."""
    made = object.__new__(type(optimizer))
    no_params = {id(param): torch.empty(0) for each in optimizer.param_groups for param in each["params"]}
    settings = {key: value for key, value in optimizer.param_groups[group].items() if key != "params"}
    left_out = {"state", "param_groups", "step", "simple_fsdp_distribution"}
    mine = {key: value for key, value in vars(optimizer).items() if key not in left_out}
    made.__dict__.update(copy.deepcopy(mine, no_params))
    made.state = defaultdict(dict)
    made.param_groups = [{"params": [], **copy.deepcopy(settings, no_params)}]
    lr = made.param_groups[0].get("lr")
    if isinstance(lr, int | float) and lr == 0:  # a warm-up begins here
        made.param_groups[0]["lr"] = 0.01
    return made


Take = Callable[[list[Tensor], list[Tensor]], list[Tensor]]
"""One step: new values from values and gradients."""


class _Copy:
    """A copy of an optimizer with parameters to which its state belongs, whose values are elsewhere."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: int):
        self.optimizer = optimizer
        self.params = [torch.empty(0) for _ in range(params)]
        optimizer.param_groups[0]["params"] = self.params

    def step(self, *calls: Sequence[tuple[int, Tensor, Tensor]]) -> dict[int, Tensor]:
        """Return new values by index, from (index, value, gradient) of the parameters that each call steps."""
        found = {}
        with torch.no_grad(), substitution(self.optimizer) as call:
            for members in calls:
                mine = []
                for i, value, gradient in members:
                    tensor = value.clone(memory_format=torch.contiguous_format).requires_grad_()
                    tensor.grad = gradient.clone(memory_format=torch.contiguous_format)
                    mine.append(Substitute(self.params[i], tensor, is_shard=False))
                    found[i] = tensor.detach()
                call(mine)
        return found

    def check_state(self, shapes: Sequence[torch.Size]) -> None:
        """Raise if a parameter has state that is neither a number nor a tensor of its shape.

        State that is more, such as a matrix for preconditioning, may be used only after many steps, and could not be
        saved as parts of a whole.
        """
        for param, shape in zip(self.params, shapes, strict=True):
            for key, value in self.optimizer.state.get(param, {}).items():
                number = isinstance(value, int | float | str | None) or (isinstance(value, Tensor) and value.ndim == 0)
                if not number and not (isinstance(value, Tensor) and value.shape == shape):
                    raise ValueError(f"{key}: state of another shape than the parameter")


def _in_one_process(trial: _Trial) -> Take:
    """Parameters of the optimizer's own, as if it was not distributed."""
    optimizer = trial.copy()
    params = [value.clone().requires_grad_() for value in trial.values]
    optimizer.param_groups[0]["params"] = params

    def take(_: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.clone()
        with torch.no_grad():
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
        return [param.detach().clone() for param in params]

    return take


def _at_once(trial: _Trial) -> Take:
    """All parameters whole on one rank, by one call."""
    copy_ = _Copy(trial.copy(), len(trial.values))

    def take(values: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        found = copy_.step([(i, *pair) for i, pair in enumerate(zip(values, gradients, strict=True))])
        return [found[i] for i in range(len(values))]

    return take


def _by_parts(trial: _Trial, dim: int) -> Take:
    """Each parameter in three parts on three ranks, the last of which has none."""
    copies = [_Copy(trial.copy(), len(trial.values)) for _ in range(3)]

    def parts(value: Tensor) -> list[Tensor]:
        if value.ndim <= dim:
            return [value] * 3
        size = value.shape[dim]
        first = -(-size * 3 // 5)
        return list(value.split([first, size - first, 0], dim))

    def take(values: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        pairs = [(parts(value), parts(gradient)) for value, gradient in zip(values, gradients, strict=True)]
        found = [
            each.step([(i, value[rank], gradient[rank]) for i, (value, gradient) in enumerate(pairs)])
            for rank, each in enumerate(copies)
        ]
        for rank, each in enumerate(copies):
            each.check_state([value[rank].shape for value, _ in pairs])
        return [
            torch.cat([of[i] for of in found], dim) if value.ndim > dim else found[0][i]
            for i, value in enumerate(values)
        ]

    return take


def _apart(trial: _Trial, at_once: bool = False) -> Take:
    """Each parameter whole on one of three ranks, one of which has none, by several calls for a step or by one."""
    copies = [_Copy(trial.copy(), len(trial.values)) for _ in range(3)]

    def take(values: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        members = [(i, *pair) for i, pair in enumerate(zip(values, gradients, strict=True))]
        first, second, third = (members[i::3] for i in range(3))
        calls: list[list[list[Any]]] = [[[], first, second], [[], [], third], [[], [], []]]
        if at_once:
            calls = [[[*first, *second]], [third], [[]]]
        found: dict[int, Tensor] = {}
        for each, of in zip(copies, calls, strict=True):
            found |= each.step(*of)
        return [found[i] for i in range(len(values))]

    return take


def _same(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether all values are the same to the bit."""
    return all(
        torch.equal(*(each.reshape(-1).view(torch.uint8) for each in pair)) for pair in zip(ones, others, strict=True)
    )


def _dims(param: DTensor) -> list[int]:
    """Return the dims along which a parameter is sharded."""
    return [getattr(placement, "dim", 0) for placement in param.placements if not placement.is_replicate()]


def _needs_closure(error: Exception) -> bool:
    return isinstance(error, TypeError) and "closure" in str(error)
