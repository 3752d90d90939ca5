"""Predict what a plan takes, before it is run: time, exposed communication and memory of a step."""

import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction
from inductor_passes.scheduling.issue_points import Schedule, schedule_of
from inductor_passes.scheduling.replay import Timeline, lower_bound, replay
from simplefsdp.frontend.sharding import ShardedParameter
from simplefsdp.hardware.profile import HardwareProfile
from simplefsdp.plan.bucket_plan import BucketPlan


class StepState(NamedTuple):
    """Memory and work of a step outside of its graphs, for its parameters, on the rank that has most of them."""

    parameters: int = 0
    """Number of parameters."""
    resident_bytes: int = 0
    """Bytes of their shards and of the optimizer's state, and what other graphs of the step hold."""
    updated_bytes: int = 0
    """Bytes that the optimizer reads and writes."""
    gradient_bytes: int = 0
    """Bytes of the gradients of their shards."""
    exchange_bytes: int = 0
    """Most bytes of whole values and gradients that the optimizer receives at once; see ``distribute_optimizer``."""
    products: tuple[float, ...] = ()
    """Operations of each product of matrices, in bfloat16, in the optimizer's step."""


def step_state(
    parameters: Iterable[tuple[ShardedParameter, torch.dtype, bool]], *, moments_bytes: int = 8
) -> StepState:
    """Return the state of a step that trains these parameters on their shards.

    The optimizer reads the shard, its gradient and its moments, and writes the shard and the moments.

    Args:
        parameters: each with the dtype of its shard and whether it is trained.
        moments_bytes: bytes of the moments of each element of a shard; 8 for the two float32 ones of Adam.
    """
    count = resident = updated = gradients = 0
    for info, dtype, trained in parameters:
        numel = _shard_numel(info)
        count += 1
        resident += numel * torch.float32.itemsize if info.communication.feeds_back else 0  # rounding errors
        if info.communication.device is not None:  # all of that is on CPU
            continue
        resident += numel * (dtype.itemsize + (moments_bytes if trained else 0))
        updated += numel * (3 * dtype.itemsize + 2 * moments_bytes) if trained else 0
        gradients += numel * dtype.itemsize if trained else 0
    return StepState(count, resident, updated, gradients)


def _shard_numel(info: ShardedParameter) -> int:
    comm = info.communication
    numel = math.prod(comm.shape)
    if comm.dim is None or comm.shard_group is None or not numel:
        return numel
    rows = comm.shape[comm.dim]
    return numel // rows * -(-rows // comm.shard_group.ranks)


class StepCosts(NamedTuple):
    """Everything that a prediction depends on, except the plan."""

    profile: str
    forward: CostGraph
    backward: CostGraph
    """The backward graph; without compute if nothing is trained."""
    resident_bytes: int
    outside_s: float
    """Seconds of a step outside of its graphs."""
    memory_limit_bytes: float
    """Bytes that the graphs may need besides ``resident_bytes``; infinite: no limit."""
    outside_bytes: int = 0
    """Bytes that the optimizer's step needs besides ``resident_bytes``: gradients, and what it exchanges."""

    @property
    def cost_graphs(self) -> tuple[CostGraph, CostGraph]:
        return self.forward, self.backward

    def to_json(self) -> str:
        """Return the costs as JSON, for ``from_json``; infinity is ``null``."""
        kinds: dict[CollectiveKind, int] = {}

        def of_kind(member: Gather | Reduction) -> dict[str, Any]:
            return member._asdict() | {"kind": kinds.setdefault(member.kind, len(kinds))}

        def graph(of: CostGraph) -> dict[str, Any]:
            gathers, reductions = [*map(of_kind, of.gathers)], [*map(of_kind, of.reductions)]
            return of._asdict() | {"gathers": gathers, "reductions": reductions}

        def kind(of: CollectiveKind) -> dict[str, Any]:
            return of._asdict() | {name: kind(nested) if (nested := getattr(of, name)) else None for name in _NESTED}

        fields = self._asdict() | {"forward": graph(self.forward), "backward": graph(self.backward)}
        memory_limit = self.memory_limit_bytes if self.memory_limit_bytes < math.inf else None
        return json.dumps({**fields, "memory_limit_bytes": memory_limit, "kinds": [kind(k) for k in kinds]}) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "StepCosts":
        fields = json.loads(text)

        def kind(of: dict[str, Any]) -> CollectiveKind:
            return CollectiveKind(**of | {name: kind(of[name]) if of[name] else None for name in _NESTED})

        kinds = [kind(k) for k in fields.pop("kinds")]

        def graph(of: dict[str, Any]) -> CostGraph:
            gathers = tuple(Gather(**member | {"kind": kinds[member["kind"]]}) for member in of["gathers"])
            reductions = tuple(Reduction(**member | {"kind": kinds[member["kind"]]}) for member in of["reductions"])
            numbers = {
                name: tuple(of[name])
                for name in ("seconds", "live_bytes_in_step", "live_bytes_at_slot", "contention", "exchanges")
            }
            return CostGraph(**numbers, gathers=gathers, reductions=reductions)

        if fields["memory_limit_bytes"] is None:
            fields["memory_limit_bytes"] = math.inf
        return cls(**fields | {"forward": graph(fields["forward"]), "backward": graph(fields["backward"])})


_NESTED = ("all_reduce_after", "plain")
"""Fields of a ``CollectiveKind`` that are kinds."""


def step_costs(
    cost_graphs: Sequence[CostGraph], state: StepState, profile: HardwareProfile, memory_limit_bytes: float
) -> StepCosts:
    """Return the costs of a step with a forward and a backward graph; only a step with a backward has an optimizer."""
    forward, backward = cost_graphs
    outside = profile.parameter_s * state.parameters + profile.memory_s(state.updated_bytes)
    outside += sum(profile.compute_s("matmul", torch.bfloat16, flops) for flops in state.products)
    outside_bytes = state.gradient_bytes + state.exchange_bytes
    if not backward.seconds:
        outside, outside_bytes = 0.0, 0
    return StepCosts(profile.name, forward, backward, state.resident_bytes, outside, memory_limit_bytes, outside_bytes)


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds and bytes of one step: of its forward and backward graph and of their parameters."""

    plan: str
    """``BucketPlan.hash``."""
    profile: str
    forward_s: float
    backward_s: float
    outside_s: float
    """Seconds of guards and the optimizer, without other work between the graphs: a loss of its own, a data loader."""
    exposed_s: float
    """Seconds of both graphs in which compute waits for communication."""
    bound_s: float
    """Seconds that both graphs take at least, under any plan."""
    peak_bytes: int
    resident_bytes: int
    """Bytes of the peak that are shards, the optimizer's state, and what graphs before a graph break hold."""

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.outside_s

    @property
    def gap(self) -> float:
        """How much longer both graphs take than the bound, as a part of the bound."""
        return (self.forward_s + self.backward_s) / self.bound_s - 1 if self.bound_s else 0.0

    def figures(self) -> dict[str, Any]:
        """Return the fields and ``step_s``, for JSON."""
        return {**asdict(self), "step_s": self.step_s}

    def to_json(self) -> str:
        return json.dumps({**self.figures(), "gap": self.gap}, indent=1) + "\n"

    def __str__(self) -> str:
        return (
            f"{1e3 * self.step_s:.1f} ms a step, of which {1e3 * self.exposed_s:.1f} exposed communication; "
            f"{100 * self.gap:.1f} % above the least that any plan takes in its graphs; peak "
            f"{self.peak_bytes / 2**30:.2f} GiB"
        )


def schedules(plan: BucketPlan, cost_graphs: Sequence[CostGraph]) -> tuple[Schedule, Schedule]:
    """Return the schedules of ``plan`` on a forward and a backward graph."""
    forward, backward = cost_graphs
    return schedule_of(forward, plan.forward, ()), schedule_of(backward, plan.backward, plan.reductions)


def timelines(plan: BucketPlan, cost_graphs: Sequence[CostGraph]) -> tuple[Timeline, Timeline]:
    """Return the timelines of ``plan`` on a forward and a backward graph."""
    (forward, backward), (first, second) = cost_graphs, schedules(plan, cost_graphs)
    return replay(forward, first), replay(backward, second)


def predict(plan: BucketPlan, costs: StepCosts, replayed: Sequence[Timeline]) -> Prediction:
    """Return the prediction for ``plan``, whose graphs ``timelines`` has ``replayed``."""
    first, second = replayed
    return Prediction(
        plan.hash,
        costs.profile,
        first.seconds,
        second.seconds,
        costs.outside_s,
        first.exposed + second.exposed,
        lower_bound(costs.forward) + lower_bound(costs.backward),
        costs.resident_bytes + max(first.peak, second.peak, costs.outside_bytes),
        costs.resident_bytes,
    )


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[Prediction] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found += [arg for arg in record.args or () if isinstance(arg, Prediction)]


@contextmanager
def collected_predictions() -> Iterator[list[Prediction]]:
    """Collect the predictions of the plans that are made meanwhile in the list that is yielded, the latest last.

    A graph that torch loads from its AOTAutograd cache has its plan from there, and no prediction is made.
    """
    log, collector = logging.getLogger("simplefsdp"), _Collector()
    level = log.level
    log.addHandler(collector)
    log.setLevel(logging.DEBUG)
    try:
        yield collector.found
    finally:
        log.setLevel(level)
        log.removeHandler(collector)
