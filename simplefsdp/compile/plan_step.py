"""The plan of a step: what a request asks for, made exact for a forward and a backward graph."""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from inductor_passes.collectives import GraphParameter
from inductor_passes.scheduling.bucket_form import with_cheapest_forms
from inductor_passes.scheduling.cost_graph import CostGraph
from inductor_passes.scheduling.deviations import DEVIATIONS
from inductor_passes.scheduling.issue_points import buckets_of, schedule_of
from inductor_passes.scheduling.keep_unsharded import choose_unsharded
from inductor_passes.scheduling.narrow import choose_narrowed, narrowed
from inductor_passes.scheduling.replay import Timeline
from inductor_passes.scheduling.search import TIME_TOLERANCE, greedy_schedule, least_memory_schedule
from inductor_passes.scheduling.search_step import search_step
from inductor_passes.scheduling.slack import with_slack
from simplefsdp.analysis.prediction import Prediction, StepCosts, StepState, predict, step_costs, timelines
from simplefsdp.frontend.sharding import Reshard
from simplefsdp.hardware.profile import HardwareProfile
from simplefsdp.plan.bucket_plan import BucketPlan, GraphUses, WireFormats
from simplefsdp.plan.grouping import BLOCK, Buckets, GroupingRequest, resolve_plan

log = logging.getLogger("simplefsdp")

SEARCHED_PLANS = frozenset({"auto", "greedy"})
"""Names of plans that need a profile."""

_OF_DEVICE = 92
"""Percent of a device's memory that is planned with: the rest is for its context and for fragmentation."""
_TIME_TOLERANCE_ON_GPU = 0.03
"""``time_tolerance`` on a GPU, where steps were predicted up to 22 % too short (docs/benchmarks.md, "One GPU")."""
PLANNED_PERCENT = 97
"""Percent of a memory budget that a peak is predicted to have at most: measured, it may be a little higher."""


@dataclass(frozen=True)
class SearchRequest:
    """A request for a plan that a planner searches for."""

    name: str
    """``"auto"`` or ``"greedy"``."""
    profile: HardwareProfile
    budget: int | None
    """Bytes of the highest peak; ``None``: no budget."""
    device_bytes: int | None = None
    """Bytes of a GPU's memory: the limit where there is no budget."""
    narrows: bool = False
    """Whether only what compute cannot hide travels in the wire format that it has, or in a milder one."""


PlanRequest = GroupingRequest | SearchRequest | BucketPlan
"""A request for a plan, by option ``plan``; ``"none"`` asks for no plan."""


@dataclass(frozen=True)
class StepToPlan:
    """A forward and a backward graph, as a plan needs to know them."""

    cost_graphs: Sequence[CostGraph]
    """Both graphs as their schedule sees them; none without a profile."""
    uses: GraphUses
    """FQNs by first use and by complete gradient in these graphs."""
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    """FQN and shape of all parameters of the model, in registration order."""
    buckets: Buckets
    """The buckets of a ``GroupingRequest``, or those of ``block``, which a searched plan must not be slower than."""
    keep_unsharded: tuple[str, ...]
    """FQNs of the weights that stay unsharded from forward to backward."""
    state: StepState
    """Memory and work of a step for the parameters, outside of its graphs."""
    used: frozenset[str]
    """FQNs of the parameters that these graphs use."""
    wire: tuple[WireFormats, ...] = ()
    """Wire formats of the parameters that have one."""


class PlannedStep(NamedTuple):
    """A plan and, with a profile, what the plan is predicted to take."""

    plan: BucketPlan
    costs: StepCosts | None
    timelines: Sequence[Timeline]
    """The replays of the forward and the backward graph; none without a profile."""
    prediction: Prediction | None


def plan_step(
    request: PlanRequest, step: StepToPlan, profile: HardwareProfile | None, *, narrows: bool = False
) -> PlannedStep:
    """Return the plan of a step and its prediction; the backend and ``simplefsdp plan`` both call this.

    Args:
        narrows: whether a given ``BucketPlan`` may drop wire formats of the model, or have milder ones.

    Raises:
        ValueError: a given ``BucketPlan`` does not fit the model or contradicts itself, or a memory budget cannot be
            met.
    """
    if isinstance(request, BucketPlan):
        request.check_fits(dict(step.parameters), step.keep_unsharded, step.used, step.wire, may_drop=narrows)
        request.check_order(step.uses)
        plan = request
    elif isinstance(request, SearchRequest):
        plan = search_plan(request, step)
    else:
        plan = _block_or_manual(request.prefetch, step)
    if profile is None:
        return PlannedStep(plan, None, (), None)
    step = replace(step, cost_graphs=[narrowed(graph, plan.narrowed) for graph in step.cost_graphs])
    costs = step_costs(step.cost_graphs, step.state, profile, memory_limit(request, step.state.resident_bytes))
    replayed = timelines(plan, step.cost_graphs)
    return PlannedStep(plan, costs, replayed, predict(plan, costs, replayed))


def search_plan(request: SearchRequest, step: StepToPlan) -> BucketPlan:
    """Return the plan that the planner ``request.name`` finds.

    Raises:
        ValueError: the memory budget cannot be met; says how many bytes are the least. A device that is too small is a
            warning.
    """
    resident = step.state.resident_bytes
    if request.narrows and step.wire:
        step = _with_fewest_formats(step, memory_limit(request, resident))
    graphs = step.cost_graphs
    position = {fqn: i for i, (fqn, _) in enumerate(step.parameters)}
    known = _block_or_manual(BLOCK.prefetch, step)
    limit = memory_limit(request, resident)
    minima = [least_memory_schedule(graph) for graph in graphs]
    least = max(schedules.peak for schedules in minima)
    if least > limit and request.budget is None:
        log.warning(
            "plan=%r: this step is predicted to need %d bytes of a device of %d; it is planned for the least memory",
            request.name,
            least + resident,
            request.device_bytes,
        )
        limit = least
    if least > limit:
        needed = -(-100 * (least + resident) // PLANNED_PERCENT)
        raise ValueError(
            f"option 'memory_budget'={request.budget}: this step needs at least {needed} bytes, of which {resident} "
            f"for shards and the optimizer's state, {100 - PLANNED_PERCENT} % as predictions err"
        )
    by_rule = [greedy_schedule(graph, limit) for graph in graphs]
    if request.name == "auto":
        gathers = known.forward, known.backward
        block = [schedule_of(graph, own, known.reductions) for graph, own in zip(graphs, gathers, strict=True)]
        proposals = [block, [one.schedule for one in by_rule]]
        found = search_step(
            graphs,
            limit,
            proposals,
            tolerance=time_tolerance(request),
            modest_peak=math.inf if request.device_bytes is None else max(t.peak for t in timelines(known, graphs)),
            deviations=DEVIATIONS,
        )
        assert found is not None
        peak = max(one.peak for one in found)
        schedules = [
            with_slack(graph, one.schedule, peak, DEVIATIONS) for graph, one in zip(graphs, found, strict=True)
        ]
    else:
        schedules = [
            (one if one.peak <= limit else lowest).schedule for one, lowest in zip(by_rule, minima, strict=True)
        ]
    (forward, _), (backward, reductions) = (
        buckets_of(graph, schedule, position) for graph, schedule in zip(graphs, schedules, strict=True)
    )
    plan = BucketPlan(forward, backward, reductions, step.keep_unsharded, step.parameters, step.wire)
    return _with_forms(plan, graphs)


def _with_fewest_formats(step: StepToPlan, limit: float) -> StepToPlan:
    """Return the step in which only those wire formats are left without which it would be slower, or milder ones."""
    chosen = choose_narrowed(step.cost_graphs, limit)
    wire = [
        WireFormats(fqn, *chosen.gathers.get(fqn, (None,)), *chosen.reductions.get(fqn, ()))
        for fqn in (each.fqn for each in step.wire)
    ]
    return replace(
        step,
        cost_graphs=[narrowed(graph, chosen) for graph in step.cost_graphs],
        wire=tuple(each for each in wire if each.gather or each.reduce),
    )


def _block_or_manual(prefetch: int, step: StepToPlan) -> BucketPlan:
    """Return the plan for the buckets of a request, each in the form that is the cheapest; packed without a profile."""
    plan = resolve_plan(prefetch, step.buckets, step.uses, step.parameters, step.keep_unsharded)
    plan = replace(plan, wire=step.wire)
    return _with_forms(plan, step.cost_graphs) if step.cost_graphs else plan


def _with_forms(plan: BucketPlan, graphs: Sequence[CostGraph]) -> BucketPlan:
    """Return ``plan`` with each bucket in the form that takes the least time on a forward and a backward graph."""
    forward, _ = with_cheapest_forms(graphs[0], plan.forward, ())
    backward, reductions = with_cheapest_forms(graphs[1], plan.backward, plan.reductions)
    return replace(plan, forward=forward, backward=backward, reductions=reductions)


def reshard_decision(chosen: Reshard, fqn: str, plan: PlanRequest | None) -> bool | None:
    """Return whether a parameter is gathered again in backward; ``None``: the planner decides later."""
    if chosen != "auto":
        return chosen
    if isinstance(plan, BucketPlan):
        return fqn not in plan.keep_unsharded
    return None if isinstance(plan, SearchRequest) and plan.name == "auto" else True


def choose_unsharded_parameters(
    request: SearchRequest, graphs: Sequence[CostGraph], resident: int, undecided: Collection[str]
) -> frozenset[str]:
    """Return which of the parameters that are left to the planner stay unsharded until backward.

    Args:
        graphs: the forward and the backward graph, which gathers all of these weights again.
        resident: bytes that a step holds outside of its graphs.
        undecided: FQNs of these parameters.
    """
    forward, backward = graphs
    return choose_unsharded(forward, backward, undecided, memory_limit(request, resident))


def with_reshard_decided(
    params: Mapping[int, GraphParameter], keep_unsharded: Collection[str]
) -> dict[int, GraphParameter]:
    """Return ``params`` with the planner's decision: parameters left to it are resharded, unless they are ``kept``."""
    return {
        i: replace(param, reshard=param.fqn not in keep_unsharded) if param.reshard is None else param
        for i, param in params.items()
    }


def fits_memory(request: SearchRequest, graphs: Sequence[CostGraph], resident: int) -> bool:
    """Return whether there is a plan for these graphs within the budget or the device."""
    return max(least_memory_schedule(graph).peak for graph in graphs) <= memory_limit(request, resident)


def time_tolerance(request: SearchRequest) -> float:
    """Return the part of the predicted time that is given up for less memory; none where a budget says how much."""
    if request.budget is not None:
        return 0.0
    return TIME_TOLERANCE if request.device_bytes is None else _TIME_TOLERANCE_ON_GPU


def memory_limit(request: object, resident: int) -> float:
    """Return how many bytes the graphs may be predicted to need, beside ``resident``."""
    if not isinstance(request, SearchRequest):
        return math.inf
    if request.budget is not None:
        return request.budget * PLANNED_PERCENT // 100 - resident
    return math.inf if request.device_bytes is None else request.device_bytes * _OF_DEVICE // 100 - resident
