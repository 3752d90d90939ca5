"""The story of a plan: what it does with a step, why, what that is predicted to cost and took, what may help."""

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from inductor_passes.scheduling.cost_graph import CostGraph
from inductor_passes.scheduling.deviations import DEVIATIONS, seconds_with_deviations
from inductor_passes.scheduling.keep_unsharded import choose_unsharded, keep_unsharded
from inductor_passes.scheduling.narrow import gathered_in
from inductor_passes.scheduling.replay import Timeline
from inductor_passes.scheduling.search import search_schedule
from simplefsdp.analysis.diagnosis import Cause, Diagnosis, diagnose
from simplefsdp.analysis.measurement import Measurement
from simplefsdp.analysis.prediction import Prediction, StepCosts, predict, schedules, timelines
from simplefsdp.plan.bucket_plan import BucketPlan
from simplefsdp.text.messages import fqn_range
from simplefsdp.text.units import gib, ms

ROWS = 12
"""How many buckets the text shows, those that are exposed longest first, if it is not to show all."""
_WORTH = 0.01
"""The part of the throughput that a change must gain to be proposed: more than ``auto`` gives up for memory."""
_NARROW = "int8"
"""The wire format of weights that is tried."""
_SUMS = ("step_s", "exposed_s", "communication_s")
"""Fields of a measurement that ``to_json`` adds, in seconds."""
_OF_BATCH = ("seconds", "live_bytes_in_step", "live_bytes_at_slot")
"""Fields of a ``CostGraph`` that grow with the batch."""


@dataclass(frozen=True)
class MeasuredBucket:
    """A bucket as it was measured; the fields are those of ``BucketExplanation``."""

    issued_s: float
    started_s: float
    finished_s: float
    awaited_s: float
    communication_s: float
    hidden_s: float
    exposed_s: float


@dataclass(frozen=True)
class BucketExplanation:
    """A bucket of a plan: one collective, or one for each kind of its parameters. Seconds since its graph began."""

    direction: str
    """``"forward"``, ``"backward"`` (gathers) or ``"reductions"``, as in ``BucketPlan``."""
    parameters: tuple[str, ...]
    nbytes: int
    """Bytes of the full weights or gradients."""
    held_bytes: int
    """Bytes of the full weights or gradients, and of copies of shards that are sent from elsewhere."""
    held_s: float
    """Seconds from the issue until the last weight was read for the last time, or the last gradient reduced."""
    issued_s: float
    started_s: float
    finished_s: float
    awaited_s: float
    communication_s: float
    hidden_s: float
    """Seconds of communication that compute does not wait for."""
    exposed_s: float
    """Seconds that compute waits, also for collectives that come before in the same process group."""
    bound: Cause
    where: str
    """Reason why the bucket is not issued earlier, or awaited later, in words."""
    closed: str
    """Reason why the next bucket is not part of this one, in words."""
    group: int = 1
    """Number of collectives that are issued together, from and into memory of their own; 1: members are packed."""
    sent_bytes: int = 0
    """Bytes on the wire; fewer than ``nbytes`` where members have a wire format."""
    measured: MeasuredBucket | None = None


@dataclass(frozen=True)
class Suggestion:
    """Another choice and the gain that is predicted for it."""

    what: str
    gain: float
    """Part of the throughput: 0.1 is a tenth more tokens a second."""
    step_s: float
    peak_bytes: int


@dataclass(frozen=True)
class Explanation:
    """A plan with its prediction, the reasons behind it and, if there is one, its measurement."""

    plan: BucketPlan
    costs: StepCosts
    replayed: tuple[Timeline, Timeline]
    """Timelines of the forward and the backward graph, as predicted."""
    measurement: Measurement | None = None
    """Result of ``simplefsdp.measure``, if the step was measured."""

    @functools.cached_property
    def prediction(self) -> Prediction:
        return predict(self.plan, self.costs, self.replayed)

    @functools.cached_property
    def buckets(self) -> tuple[BucketExplanation, ...]:
        """Explanations of all buckets.

        Each bucket is replayed merged with the next, and each exposed bucket issued earlier or awaited later, to find
        the reason for its place: half a minute for 1,500 collectives.
        """
        return tuple(_buckets(self))

    @property
    def memory_limit_bytes(self) -> float:
        """Bytes that the step may need at most; infinite: no limit."""
        return self.costs.memory_limit_bytes + self.costs.resident_bytes

    @property
    def before(self) -> int:
        """Number of collectives without a plan: one for each parameter and direction."""
        return sum(len(graph.gathers) + len(graph.reductions) for graph in self.costs.cost_graphs)

    @property
    def collectives(self) -> int:
        """Number of collectives with the plan: its buckets."""
        return sum(len(of.gathers) + len(of.reductions) for of in schedules(self.plan, self.costs.cost_graphs))

    @property
    def gathered_bytes(self) -> int:
        return sum(gather.nbytes for graph in self.costs.cost_graphs for gather in graph.gathers)

    @property
    def reduced_bytes(self) -> int:
        return sum(reduction.nbytes for graph in self.costs.cost_graphs for reduction in graph.reductions)

    @property
    def sent_bytes(self) -> int:
        """Bytes of gathers and reductions on the wire: fewer than theirs where they have wire formats."""
        return sum(
            sum(gather.kind.sent(gather.nbytes) for gather in graph.gathers)
            + sum(reduction.kind.sent(reduction.nbytes) for reduction in graph.reductions)
            for graph in self.costs.cost_graphs
        )

    @property
    def compute_s(self) -> float:
        """Seconds of compute in the step's graphs."""
        return sum(sum(graph.seconds) for graph in self.costs.cost_graphs)

    @property
    def overhead_s(self) -> float:
        """Seconds that compute loses to collectives besides waiting: copies, issuing, contention."""
        predicted = self.prediction
        return predicted.forward_s + predicted.backward_s - predicted.exposed_s - self.compute_s

    @functools.cached_property
    def changes(self) -> tuple[Suggestion, ...]:
        """The three changes that gain most, each by itself, the best first; the planner predicts the gains."""
        return tuple(_changes(self))

    @functools.cached_property
    def keeping(self) -> Suggestion | None:
        """The gain of keeping unsharded the weights that the planner would keep and that backward gathers again.

        ``None``: there are no such weights.
        """
        again = [gather.fqn for gather in self.costs.backward.gathers]
        unsharded = choose_unsharded(*self.costs.cost_graphs, again, self.costs.memory_limit_bytes)
        if not unsharded:
            return None
        what = f"reshard_after_forward=False for {fqn_range(tuple(fqn for fqn in again if fqn in unsharded))}"
        found = _planned(self, keep_unsharded(*self.costs.cost_graphs, unsharded), self.costs.memory_limit_bytes)
        return next(iter(_change_to(self, what, found)), None)

    def to_json(self) -> str:
        fields = {
            "plan": self.plan.hash,
            "prediction": json.loads(self.prediction.to_json()),
            "memory_limit_bytes": self.memory_limit_bytes if self.memory_limit_bytes < math.inf else None,
            "collectives_before": self.before,
            "collectives": self.collectives,
            "gathered_bytes": self.gathered_bytes,
            "reduced_bytes": self.reduced_bytes,
            "sent_bytes": self.sent_bytes,
            "compute_s": self.compute_s,
            "overhead_s": self.overhead_s,
            "keep_unsharded": self.plan.keep_unsharded,
            "measured": self.measurement and {name: getattr(self.measurement, name) for name in _SUMS},
            "buckets": [asdict(bucket) for bucket in self.buckets],
            "changes": [asdict(change) for change in self.changes],
        }
        return json.dumps(fields, indent=1) + "\n"

    def summary(self) -> str:
        """Return a few lines about the plan and what it takes."""
        predicted = self.prediction
        elements = sum(math.prod(shape) for _, shape in self.plan.parameters)
        limit = f" of {gib(self.memory_limit_bytes)}" if self.memory_limit_bytes < math.inf else ""
        least = predicted.bound_s + predicted.outside_s
        communicated = sum(span.finished - span.started for timeline in self.replayed for span in timeline.spans)
        whole = self.gathered_bytes + self.reduced_bytes
        graphs = self.costs.cost_graphs
        in_graphs = seconds_with_deviations(graphs, schedules(self.plan, graphs))
        off_profile = [predicted.outside_s + seconds for seconds in in_graphs]
        sent = f", sent as {gib(self.sent_bytes)}" if self.sent_bytes < whole else ""
        lines = [
            f"plan {self.plan.hash}, predicted for {predicted.profile}",
            f"  parameters   {len(self.plan.parameters)} of {elements:,} elements; "
            f"{len(self.plan.keep_unsharded)} kept unsharded from forward to backward",
            f"  collectives  {self.before} -> {self.collectives}; {gib(self.gathered_bytes)} gathered, "
            f"{gib(self.reduced_bytes)} reduced{sent}",
            f"  step         {ms(predicted.step_s)}: forward {ms(predicted.forward_s)}, backward "
            f"{ms(predicted.backward_s)}, outside of the graphs {ms(predicted.outside_s)}",
            f"  of it        compute {ms(self.compute_s)}, lost to collectives {ms(self.overhead_s)}, "
            f"exposed {ms(predicted.exposed_s)} of {ms(communicated)} communication "
            f"({predicted.exposed_s / predicted.step_s:.1%} of the step)",
            f"  limits       no plan takes less than {ms(least)} (L1); this one is {ms(predicted.step_s)} (L2), "
            f"{predicted.step_s / least - 1:.1%} above",
            f"  off profile  {ms(min(off_profile))} to {ms(max(off_profile))}: compute 10 % faster or slower, "
            "bandwidth 20 % higher or lower, latency half or double",
            f"  memory       peak {gib(predicted.peak_bytes)}{limit}, {gib(predicted.resident_bytes)} of it shards "
            "and the optimizer's state",
        ]
        if exchanges := sum(len(graph.exchanges) for graph in graphs):
            lines.append(
                f"  exchanges    {exchanges} of an embedding's tokens or rows in place of its weight: "
                "each waits for the collectives under way"
            )
        if (measured := self.measurement) is not None:
            off = predicted.step_s / measured.step_s - 1
            lines.append(
                f"  measured     step {ms(measured.step_s)} (predicted {off:+.0%}), "
                f"exposed {ms(measured.exposed_s)} of {ms(measured.communication_s)} communication"
            )
        return "\n".join(lines) + "\n"

    def text(self, rows: int = ROWS) -> str:
        """Return the explanation for a terminal.

        The text is ``summary``, the ``rows`` buckets that are exposed longest, in the order in which they run, and the
        changes that would help.
        """
        lines = []
        shown = sorted(self.buckets, key=lambda bucket: bucket.exposed_s, reverse=True)[:rows]
        for direction in ("forward", "backward", "reductions"):
            of_direction = [bucket for bucket in self.buckets if bucket.direction == direction]
            here = [bucket for bucket in of_direction if bucket in shown]
            if here:
                lines.append(_heading(direction, len(here), len(of_direction)))
            for bucket in here:
                lines.append(_row(bucket))
        lines += _resharding(self)
        lines.append(
            "what would help most:" if self.changes else "no other plan, memory, batch or resharding would help"
        )
        lines += [f"  {change.gain:+7.1%} throughput  {_change(change)}" for change in self.changes]
        return self.summary() + "\n".join(lines) + "\n"


def explain(plan: BucketPlan, costs: StepCosts, measurement: Measurement | None = None) -> Explanation:
    """Return what ``plan`` makes of a step with these costs, why, and how it was measured."""
    return Explanation(plan, costs, timelines(plan, costs.cost_graphs), measurement)


def _buckets(explanation: Explanation) -> list[BucketExplanation]:
    plan, costs, replayed = explanation.plan, explanation.costs, explanation.replayed
    first, second = schedules(plan, costs.cost_graphs)
    forward, _ = diagnose(costs.forward, first, costs.memory_limit_bytes)
    backward, reductions = diagnose(costs.backward, second, costs.memory_limit_bytes)
    freed = [_freed(graph, timeline) for graph, timeline in zip(costs.cost_graphs, replayed, strict=True)]
    buckets = [
        *(_explained("forward", one, freed[0]) for one in forward),
        *(_explained("backward", one, freed[1]) for one in backward),
        *(_explained("reductions", one, {}) for one in reductions),
    ]
    if (measurement := explanation.measurement) is not None:
        buckets = [replace(bucket, measured=_went(bucket, measurement)) for bucket in buckets]
    return buckets


def _went(bucket: BucketExplanation, measurement: Measurement) -> MeasuredBucket | None:
    """Return the measured times of ``bucket``'s collectives in the last run of its graph."""
    gathered = bucket.direction != "reductions"
    direction = bucket.direction if gathered else "backward"
    last = [run for run in measurement.runs if run.direction == direction][-1:]
    found = [
        one
        for run in last
        for one in run.collectives
        if one.parameters and set(one.parameters) <= set(bucket.parameters)
        if one.name.startswith("all_gather") == gathered
    ]
    if not found:
        return None
    return MeasuredBucket(
        min(one.issued_s for one in found),
        min(one.started_s for one in found),
        max(one.finished_s for one in found),
        min(one.awaited_s for one in found),
        sum(one.finished_s - one.started_s for one in found),
        sum(max(0.0, min(one.finished_s, one.awaited_s) - one.started_s) for one in found),
        sum(one.exposed_s for one in found),
    )


def _freed(graph: CostGraph, timeline: Timeline) -> dict[str, float]:
    """Return when each gathered weight is no longer needed, by FQN."""
    ends = (*timeline.ends, timeline.seconds)
    return {gather.fqn: ends[gather.last_use_slot] for gather in graph.gathers}


def _explained(direction: str, one: Diagnosis, freed: Mapping[str, float]) -> BucketExplanation:
    spans = one.spans
    fqns = tuple(dict.fromkeys(fqn for span in spans for fqn in span.fqns))
    first = [span for span in spans if span.what in ("gather", "reduce")]
    nbytes = sum(span.nbytes for span in first)
    sent = sum(span.kind.sent(span.nbytes) for span in first)
    issued, done = min(span.issued for span in spans), max(max(span.finished, span.awaited) for span in spans)
    return BucketExplanation(
        direction,
        fqns,
        nbytes,
        sent + sum(span.held for span in spans),
        max(freed.get(fqn, done) for fqn in fqns) - issued,
        issued,
        min(span.started for span in spans),
        max(span.finished for span in spans),
        min(span.awaited for span in spans),
        sum(span.finished - span.started for span in spans),
        sum(max(0.0, min(span.finished, span.awaited) - span.started) for span in spans),
        one.exposed,
        one.bound,
        one.where,
        one.closed,
        max(span.parts for span in spans),
        sent,
    )


def _changes(explanation: Explanation) -> list[Suggestion]:
    memory_limit, cost_graphs = explanation.costs.memory_limit_bytes, explanation.costs.cost_graphs
    best = _planned(explanation, cost_graphs, memory_limit)
    tried = [*_change_to(explanation, "plan='auto', as much memory", best)]
    if memory_limit < math.inf and (free := _planned(explanation, cost_graphs, math.inf)) is not None:
        tried += _change_to(explanation, f"a memory budget of {gib(free[1])}", free)
    if explanation.keeping is not None:
        tried.append(explanation.keeping)
    narrow = _planned(explanation, [gathered_in(graph, _NARROW) for graph in cost_graphs], memory_limit)
    tried += _change_to(explanation, f"wire=WireFormat(gather={_NARROW!r}) for all weights", narrow)
    larger = [graph._replace(**{name: _twice(getattr(graph, name)) for name in _OF_BATCH}) for graph in cost_graphs]
    twice = _planned(explanation, larger, memory_limit)
    tried += _change_to(explanation, "a batch twice as large, if compute and activations double", twice, batch=2)
    worth = sorted((one for one in tried if one.gain > _WORTH), key=lambda one: one.gain, reverse=True)
    return worth[:4]


def _planned(
    explanation: Explanation, cost_graphs: Sequence[CostGraph], memory_limit: float
) -> tuple[float, int] | None:
    """Return seconds and peak of a step with these graphs, planned anew; ``None``: nothing fits in memory."""
    costs, present = explanation.costs, schedules(explanation.plan, cost_graphs)
    found = [
        search_schedule(graph, memory_limit, [schedule], deviations=DEVIATIONS)
        for graph, schedule in zip(cost_graphs, present, strict=True)
    ]
    if not all(found):
        return None
    seconds = sum(one.predicted_s for one in found if one)
    peaks = [one.peak for one in found if one]
    return seconds + costs.outside_s, costs.resident_bytes + max(*peaks, costs.outside_bytes)


def _change_to(
    explanation: Explanation, what: str, found: tuple[float, int] | None, batch: int = 1
) -> list[Suggestion]:
    if found is None:
        return []
    return [Suggestion(what, batch * explanation.prediction.step_s / found[0] - 1, *found)]


def _resharding(explanation: Explanation) -> list[str]:
    """Lines that say which weights are kept unsharded and why, and which are gathered again."""
    plan, (forward, backward) = explanation.plan, explanation.costs.cost_graphs
    lines = []
    if unsharded := [gather for gather in forward.gathers if gather.fqn in plan.keep_unsharded]:
        seconds = sum(gather.kind.seconds(gather.nbytes) for gather in unsharded)
        lines.append(
            f"kept unsharded until backward: {fqn_range([gather.fqn for gather in unsharded])}: "
            f"{gib(sum(gather.nbytes for gather in unsharded))}, which save {ms(seconds)} of communication"
        )
    if again := [gather.fqn for gather in backward.gathers]:
        keeping = explanation.keeping
        reason = (
            "kept unsharded, none would save time that is worth its memory" if keeping is None else _change(keeping)
        )
        lines.append(f"gathered again in backward: {fqn_range(again)}; {reason}")
    return lines


def _twice(numbers: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(2 * number for number in numbers)


def _heading(direction: str, shown: int, buckets: int) -> str:
    what = "reductions" if direction == "reductions" else f"gathers in {direction}"
    part = "" if shown == buckets else f" ({shown} of {buckets}, exposed longest)"
    return f"{what}{part}: issued, done, needed at; hidden + exposed; bytes, held for"


def _row(bucket: BucketExplanation) -> str:
    what = f"{bucket.nbytes / 2**20:8.2f} MiB {1e3 * bucket.held_s:7.2f} ms  {fqn_range(bucket.parameters)}"
    if bucket.sent_bytes < bucket.nbytes:
        what += f", sent as {bucket.sent_bytes / 2**20:.2f} MiB"
    if bucket.group > 1:
        what += f", a group of {bucket.group}"
    measured = f"\n{_times(bucket.measured)}  measured" if bucket.measured else ""
    return f"{_times(bucket)}  {what}{measured}\n      {bucket.bound}: {bucket.where}; {bucket.closed}"


def _times(bucket: BucketExplanation | MeasuredBucket) -> str:
    at = (bucket.issued_s, bucket.finished_s, bucket.awaited_s)
    times = "  ".join(f"{1e3 * seconds:8.2f}" for seconds in at)
    return f"  {times}  {1e3 * bucket.hidden_s:7.2f} + {1e3 * bucket.exposed_s:6.2f} ms"


def _change(change: Suggestion) -> str:
    return f"{change.what}: step {ms(change.step_s)}, peak {gib(change.peak_bytes)}"
