"""Any optimizer on sharded parameters: its step on shards, or on whole parameters, each on the rank that owns it.

::

    gradients, shards - all-to-all -> whole parameters on their owners - step - all-to-all -> shards      (of a group)

Owned parameters are stepped in groups. While the wrapped optimizer steps one group, the next one is on its way to the
owners, and the last one on its way back.
"""

import gc
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from inductor_passes.runtime.agreement import Subject, compare
from inductor_passes.torch_compat.checkpoint import options_of_full_state
from simplefsdp.training.optimizers.claims import claim, optimizer_of
from simplefsdp.training.optimizers.exchange import Exchange
from simplefsdp.training.optimizers.low_rank import GaLore, has_rows
from simplefsdp.training.optimizers.newton_schulz import Muon
from simplefsdp.training.optimizers.on_shards import ELEMENTWISE, replace_step
from simplefsdp.training.optimizers.owned_state import place_state, state_of_all
from simplefsdp.training.optimizers.ownership import Owned, cost, deal, exchange_groups, lanes, layout, name_of
from simplefsdp.training.optimizers.probe import Way, way_of
from simplefsdp.training.optimizers.ranger21 import Ranger21
from simplefsdp.training.optimizers.substitutes import Substitute, on_shard, substitution

log = logging.getLogger("simplefsdp")

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)

EXCHANGE_BYTES = 2**24
"""More, smaller exchanges hide better under the steps between them; a matrix of a large model is one by itself."""

PER_PARAMETER = (torch.optim.Adafactor, torch.optim.Muon)
"""Optimizers of torch's in which a value of a parameter depends on other values of the same parameter only."""

REFUSED: dict[type, str] = {
    torch.optim.LBFGS: "its step needs a closure that computes the loss several times",
    torch.optim.SparseAdam: "it needs sparse gradients",
    Ranger21: "it steps shards by itself",
}

_SUBJECT = Subject(
    differ="have distributed different optimizers, whose exchanges would hang or mix up parameters",
    awaited="distribute_optimizer() or the next step after parameters were added",
    late="",
    remedy="Build the optimizer alike on all ranks: class, settings, parameters and their order",
    every_time=True,
)


def distribute_optimizer(
    optimizer: Optimizer,
    on: Literal["auto", "shards", "owners"] = "auto",
    *,
    exchange_bytes: int = EXCHANGE_BYTES,
    whole_model: bool = False,
) -> Optimizer:
    """Let ``optimizer.step()`` do to sharded parameters what it would do to whole ones, and return ``optimizer``.

    ::

        optimizer = distribute_optimizer(torch.optim.Muon(matrices, lr=0.02))
        print(optimizer.simple_fsdp_distribution)

    *On shards*, each rank steps its parts of all parameters as plain tensors (``step_on_shards``); nothing is
    communicated. *On owners*, each parameter has one owner among the ranks of its mesh, data parallel and tensor
    parallel ones. The owners get values and gradients by an all-to-all for each group of parameters, step them whole,
    and send the new values back by another. An owner alone has the state of a parameter, as plain tensors. Owners are
    balanced by what the product of a matrix with itself costs. Values are those of the same optimizer in one process
    on the same gradients, to the bit. Plain parameters are stepped on every rank.

    Clipping, schedulers (built afterwards), a ``GradScaler``, hooks and ``zero_grad`` work as before; a closure is
    called once, before the step. New parameter groups are dealt to owners at the next step. Checkpoints go through
    ``torch.distributed.checkpoint.state_dict``: they load on any number of ranks, and in one process without this
    function. ``set_optimizer_state_dict`` needs ``StateDictOptions(strict=False)``, as a rank has the state of its own
    parameters only.

    Args:
        optimizer: an optimizer of parameters that ``simple_fsdp`` has sharded, built alike on every rank. Each group of
            its parameters may go another way.
        on: ``"auto"`` knows torch's optimizers and tries others on a few small parameters: on shards if parts are
            stepped as they are in the whole, on owners if each parameter is stepped alone as it is among the others.
            ``"shards"`` and ``"owners"`` try the same, and raise if that way is not right.
        exchange_bytes: limit of values and gradients that a rank receives at once, in bytes. Two groups may be
            under way. A parameter that is larger has a group of its own.
        whole_model: let one rank step all parameters, for an optimizer that takes a norm or a mean over the model. That
            rank needs the memory of the model three times, and of all state.

    Raises:
        TypeError: the optimizer cannot go any way, or not the one that ``on`` says; the message says what its step
            depends on.
        ValueError: an option is out of range; a parameter already belongs to a distributed optimizer.
        RuntimeError: the ranks have different optimizers; the parameters were taken before ``simple_fsdp``.
    """
    _check_options(optimizer, on, exchange_bytes, whole_model)
    distribution = Distribution(optimizer, on, exchange_bytes, whole_model)
    distribution.deal()
    optimizer.simple_fsdp_distribution = distribution  # type: ignore[attr-defined]
    optimizer.register_load_state_dict_post_hook(lambda _: distribution.state_was_loaded())
    optimizer.register_state_dict_post_hook(lambda _, state_dict: distribution.state_to_save(state_dict))
    replace_step(optimizer, lambda _: distribution.step())
    log.info("%s", distribution)
    return optimizer


def _check_options(optimizer: Any, on: Any, exchange_bytes: Any, whole_model: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, found {type(optimizer).__name__}")
    if (reason := REFUSED.get(type(optimizer))) is not None:
        raise TypeError(f"optimizer: {type(optimizer).__name__} cannot be distributed, {reason}")
    if distribution_of(optimizer) is not None:
        raise ValueError("optimizer: it is distributed already")
    if on not in ("auto", "shards", "owners"):
        raise ValueError(f"on: expected 'auto', 'shards' or 'owners', found {on!r}")
    if isinstance(exchange_bytes, bool) or not isinstance(exchange_bytes, int):
        raise TypeError(f"exchange_bytes: expected a number of bytes, found {exchange_bytes!r}")
    if exchange_bytes < 1:
        raise ValueError(f"exchange_bytes: expected a positive number, found {exchange_bytes}")
    if not isinstance(whole_model, bool):
        raise TypeError(f"whole_model: expected True or False, found {whole_model!r}")
    if whole_model and on == "shards":
        raise ValueError("whole_model: a whole model has an owner, but on='shards'")


@dataclass(eq=False)
class Distribution:
    """How an optimizer is distributed; as text, a summary."""

    optimizer: torch.optim.Optimizer
    on: Literal["auto", "shards", "owners"]
    exchange_bytes: int
    whole_model: bool
    ways: list[Way] = field(default_factory=list)
    """One for each group of parameters."""
    owned: list[Owned] = field(default_factory=list)
    """Parameters that have an owner."""
    exchanges: list[Exchange] = field(default_factory=list)
    """Groups of owned parameters, in the order in which they are exchanged."""
    _dealt: list[Tensor] = field(default_factory=list)
    _state_is_placed: bool = False

    @property
    def at_once(self) -> bool:
        """Whether one call of the optimizer's step must step all parameters of this rank."""
        return "owners at once" in self.ways

    def deal(self) -> None:
        """Choose a way for every group and an owner for every parameter that needs one; those that have one keep it."""
        groups = self.optimizer.param_groups
        params = self._trainable()
        _check_claims(params, self.optimizer)
        self.ways += [self._way(i) for i in range(len(self.ways), len(groups))]
        by_lane = lanes(
            [
                param
                for group, way in zip(groups, self.ways, strict=True)
                for param in group["params"]
                if _place(param, way).startswith("owners") and param.requires_grad
            ]
        )
        if self.whole_model and (len(by_lane) > 1 or not all(isinstance(param, DTensor) for param in params)):
            raise TypeError("whole_model: expected all parameters sharded over one mesh, of one dtype and device")
        self._compare(params)
        before = {id(each.param): each for each in self.owned}
        self.owned, self.exchanges = [], []
        loads: dict[tuple[int, ...], list[float]] = {}
        for (ranks, *_), members in by_lane.items():
            load = loads.setdefault(ranks, [0.0] * len(ranks))
            dealt = [before[id(param)] for param in members if id(param) in before]
            for each in dealt:
                load[each.owner] += cost(each.param.shape)
            new = [param for param in members if id(param) not in before]
            owners = [0] * len(new) if self.whole_model else deal([cost(param.shape) for param in new], load)
            for member, owner in zip(new, owners, strict=True):
                load[owner] += cost(member.shape)
                dealt.append(Owned(member, layout(member), owner))
            together = [dealt] if self.at_once else exchange_groups(dealt, self.exchange_bytes)
            self.exchanges += [Exchange(each) for each in together]
            self.owned += dealt
        self._dealt = params
        claim(params, self.optimizer)
        self._state_is_placed = False

    def step(self) -> None:
        """Take one step, in which every rank takes part, with no gradient tracked.

        The exchanges do not depend on what this rank's parameters have for gradients, nor on an error of its step: that
        is raised at the end, when the other ranks have what they wait for.
        """
        if [*map(id, self._trainable())] != [*map(id, self._dealt)]:
            self.deal()
        self._place_state()
        rounds = iter([self.exchanges] if self.at_once else [[each] for each in self.exchanges])
        failure: Exception | None = None
        with substitution(self.optimizer) as call:

            def attempt(substitutes: Sequence[Substitute]) -> None:
                nonlocal failure
                try:
                    if failure is None:
                        call(substitutes)
                except Exception as error:
                    failure = error

            here = self._here()
            coming, returning = _fetch(rounds), list[Exchange]()
            if not (self.at_once and coming):
                attempt(here)
            while exchanges := coming:
                coming = _fetch(rounds)
                owned = [exchange.receive() for exchange in exchanges]
                whole = [Substitute(*pair, is_shard=False) for pairs in owned for pair in pairs]
                attempt([*here, *whole] if self.at_once else whole)
                for exchange, pairs in zip(exchanges, owned, strict=True):
                    exchange.send_back([value for _, value in pairs])
                for exchange in returning:
                    exchange.store()
                returning = exchanges
            for exchange in returning:
                exchange.store()
        if failure is not None:
            raise failure
        if self.owned and not self.optimizer.state:
            # Torch lets an optimizer that has no state take a step before it reads it, and others would wait for that.
            self.optimizer.state[self.owned[0].param] = {}

    def state_was_loaded(self) -> None:
        """Place the state on the owners before the next step."""
        self._state_is_placed = False

    def state_to_save(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state dict of the optimizer: of what this rank owns, or of all if torch's caller asks for that.

        With ``StateDictOptions(full_state_dict=True)`` torch gathers ``DTensor``s, and no plain tensors.
        """
        state: dict[int, Any] = {number: of for number, of in state_dict["state"].items() if of}
        if self.owned and (options := options_of_full_state()) is not None:
            self._place_state()
            numbers = {
                id(param): number
                for group, packed in zip(self.optimizer.param_groups, state_dict["param_groups"], strict=True)
                for param, number in zip(group["params"], packed["params"], strict=True)
            }
            is_kept = dist.get_rank() == 0 or not options.cpu_offload  # as torch does
            for param, of in state_of_all(self.optimizer.state, self.owned):
                if of and is_kept:
                    state[numbers[id(param)]] = of
        return state_dict | {"state": state}

    def _place_state(self) -> None:
        if not self._state_is_placed:
            place_state(self.optimizer.state, self.owned)
            self._state_is_placed = True

    def __str__(self) -> str:
        counts = Counter(
            f"on {_place(param, way).split()[0]}" if isinstance(param, DTensor) else "on every rank"
            for group, way in zip(self.optimizer.param_groups, self.ways, strict=True)
            for param in group["params"]
            if param.requires_grad
        )
        where = ", ".join(f"{count} {place}" for place, count in counts.items())
        facts = [f"{type(self.optimizer).__name__} steps {where or 'no parameters'}"]
        loads: dict[tuple[int, ...], list[float]] = {}
        for each in self.owned:
            load = loads.setdefault(each.layout.ranks, [0.0] * len(each.layout.ranks))
            load[each.owner] += cost(each.param.shape)
        for load in loads.values():
            most = max(load) * len(load) / sum(load) if sum(load) else 1.0
            facts.append(f"of {len(load)} owners the busiest has {most:.2f} times the mean cost")
        if self.exchanges:
            largest = max(exchange.received_bytes for exchange in self.exchanges) / 2**20
            facts.append(f"{len(self.exchanges)} exchanges each way, at most {largest:.1f} MiB for this rank")
        return "; ".join(facts)

    def _trainable(self) -> list[Tensor]:
        return [param for group in self.optimizer.param_groups for param in group["params"] if param.requires_grad]

    def _way(self, group: int) -> Way:
        kind, params = type(self.optimizer), self.optimizer.param_groups[group]["params"]
        if not params:
            return "shards"
        if self.whole_model:
            return way_of(self.optimizer, group, whole_model=True)
        found = _known_way(kind, self.optimizer.param_groups[group]) or way_of(self.optimizer, group)
        if self.on == "shards" and found != "shards":
            raise TypeError(
                f"on: what {kind.__name__} does to a value of a parameter depends on other values of this parameter; "
                "expected 'auto' or 'owners', found 'shards'"
            )
        return "owners" if self.on == "owners" and found in ("shards", "rows") else found

    def _compare(self, params: Sequence[Tensor]) -> None:
        """Raise on all ranks if they would exchange different parameters."""
        lines: dict[str, list[str]] = {}
        settings = f"{type(self.optimizer).__name__}, {self.ways}, exchange_bytes={self.exchange_bytes}"
        for i, param in enumerate(params):
            if isinstance(param, DTensor):
                line = f"parameter {i}: {name_of(param)}{list(param.shape)} {param.dtype} {param.placements}"
                for group in param.device_mesh.get_all_groups():
                    lines.setdefault(group.group_name, [f"optimizer: {settings}"]).append(line)
        compare(lines, subject=_SUBJECT)

    def _here(self) -> list[Substitute]:
        """Return shards and plain parameters, for which nothing is exchanged."""
        owned = {id(each.param) for each in self.owned}
        return [
            Substitute(param, param, is_shard=False) if way == "rows" else on_shard(param)
            for group, way in zip(self.optimizer.param_groups, self.ways, strict=True)
            for param in group["params"]
            if id(param) not in owned
        ]


def distribution_of(optimizer: torch.optim.Optimizer | None) -> Distribution | None:
    """Return how an optimizer is distributed, if it is."""
    found = getattr(optimizer, "simple_fsdp_distribution", None)
    return found if isinstance(found, Distribution) else None


def _known_way(kind: type, group: dict[str, Any]) -> Way | None:
    if kind in (Muon, GaLore):
        return "shards" if group["algorithm"] == "adamw" else group.get("on", "owners")
    return "shards" if kind in ELEMENTWISE else "owners" if kind in PER_PARAMETER else None


def _place(param: Tensor, way: Way) -> Way:
    """Return where one parameter of a group that goes this way is stepped."""
    return "owners" if way == "rows" and isinstance(param, DTensor) and not has_rows(param) else way


def _fetch(rounds: Iterator[list[Exchange]]) -> list[Exchange]:
    exchanges = next(rounds, [])
    for exchange in exchanges:
        exchange.fetch()
    return exchanges


def _check_claims(params: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Raise if a parameter has another distributed optimizer that is in use."""

    def other_of(param: Tensor) -> torch.optim.Optimizer | None:
        other = optimizer_of(param)
        return other if other is not optimizer and distribution_of(other) is not None else None

    for param in params:
        if other_of(param) is not None:
            gc.collect()  # an optimizer is part of a circle
            if (other := other_of(param)) is not None:
                raise ValueError(
                    f"optimizer: {name_of(param)} belongs to another distributed optimizer ({type(other).__name__})"
                )
