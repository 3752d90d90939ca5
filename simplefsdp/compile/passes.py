"""The passes of one compilation, in the order in which they run: identify, tag, partition, plan, bucket, order."""

import copy
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Graph, GraphModule

from inductor_passes.accumulate_once import accumulate_once
from inductor_passes.bucket import assign, bucket, choose_formats, let_none_work_in_place_on_the_input_of_another
from inductor_passes.cast_before_gather import cast_before_gather
from inductor_passes.checkpoints import take_gathers_out
from inductor_passes.collectives import GraphParameter, reductions
from inductor_passes.compile_once import compile_once, render_bodies
from inductor_passes.compute_again import compute_again
from inductor_passes.fusion_order import put_fused_together
from inductor_passes.identify import identify
from inductor_passes.matmul_casts import cast_in_matmuls, cast_what_is_encoded
from inductor_passes.ops.call import calls_traced, inline
from inductor_passes.order import order_graph
from inductor_passes.own_rows import make_own_rows
from inductor_passes.partition import partition
from inductor_passes.rounding import skip_rounding
from inductor_passes.runtime.agreement import add_record
from inductor_passes.runtime.graph_dump import DUMP_NAMES
from inductor_passes.runtime.record import is_step, record_graph
from inductor_passes.scheduling.cost_graph import CostGraph
from inductor_passes.scheduling.cost_model import accumulated_bytes, cost_graph_of
from inductor_passes.scheduling.deviations import DEVIATIONS
from inductor_passes.scheduling.issue_points import block_of
from inductor_passes.scheduling.order_items import first_uses, graph_items, last_gradients
from inductor_passes.scheduling.search_step import quick_seconds
from inductor_passes.tag import tag
from inductor_passes.torch_compat.aot_autograd import PartitionedGraphs, is_backward, is_higher_order_body
from inductor_passes.torch_compat.dynamo import trace_artifact
from inductor_passes.trace_once import trace_once
from simplefsdp.analysis.first_step import BODIES, FIRST_STEP, TRACED_ONCE
from simplefsdp.analysis.timeline_trace import prediction_files
from simplefsdp.compile.choose_casts import casts_that_raise_no_peak, worth_casting_in_matmuls
from simplefsdp.compile.context import CompilationContext
from simplefsdp.compile.log import CompilationLog
from simplefsdp.compile.plan_step import (
    SearchRequest,
    StepToPlan,
    choose_unsharded_parameters,
    fits_memory,
    memory_limit,
    plan_step,
    with_reshard_decided,
)
from simplefsdp.frontend.encoded_collectives import encoded_by_passes
from simplefsdp.frontend.unshard import unshard
from simplefsdp.plan.bucket_plan import BucketPlan, GraphUses
from simplefsdp.plan.grouping import GroupingRequest

log = logging.getLogger("simplefsdp")


@dataclass(frozen=True)
class Passes:
    """Functions from graph to graph, with what they are given and where they note things down."""

    given: CompilationContext
    notes: CompilationLog = field(default_factory=CompilationLog)

    @contextmanager
    def tracing(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        decompositions: Callable[[], Mapping[Any, Any] | None] = lambda: None,
        prepare: Callable[[GraphModule], object] | None = lambda _body: None,
    ) -> Iterator[None]:
        """Trace once what repeats in Dynamo's graph, and let gathers and reductions be traced as these passes need.

        Args:
            gm: Dynamo's graph; it is changed.
            example_inputs: its inputs.
            decompositions: returns those with which it is traced meanwhile, as ``aot_autograd`` takes them.
            prepare: the passes that see a joint graph before ``identify_and_tag`` does; ``None``: passes that have to
                see all of it, so that each part is traced as often as it is there.
        """
        with encoded_by_passes(), nullcontext() if prepare is None else calls_traced(prepare):
            if prepare is not None and self.given.request is not None and self.given.compile_once:
                take_gathers_out(gm, unshard)
                infos = [getattr(value, "simple_fsdp_info", None) for value in example_inputs]
                info_of = dict(zip(gm.graph.find_nodes(op="placeholder"), infos, strict=True))
                gathers = gm.graph.find_nodes(op="call_function", target=unshard)
                found = trace_once(
                    gm,
                    {node: block_of(info.fqn) for node in gathers if (info := info_of.get(node.args[0]))},
                    decompositions,
                )
                log.debug("%s", found)
                self._dump_text(TRACED_ONCE, f"{found}\n")
            yield

    def identify_and_tag(self, graph: Graph, *, round_gradients: bool) -> None:
        """Name and merge the collectives of a joint or inference graph, and tag what backward computes again.

        An inference graph, which is not partitioned, is planned here.

        Args:
            graph: a joint or inference graph.
            round_gradients: round gradients to their weights' dtype before they are reduced, as eager FSDP2 does.
        """
        inline(graph)
        if is_higher_order_body(graph):
            return
        kind = "joint" if is_backward(graph) else "inference"
        before, after = DUMP_NAMES[kind]
        self._dump(before, graph)
        accumulate_once(graph)
        make_own_rows(graph)
        missed = identify(graph, self.given.params)
        if not round_gradients:
            skip_rounding(graph)
        self._tag(graph, self.given.params)
        self._dump(after, graph)
        if missed:
            self.notes.warnings.append(
                f"no bucket for the gradients of {', '.join(missed)}: their reductions were not recognised"
            )
        if kind == "inference":
            self.notes.is_inference = True
            self._make_ready(graph)
            self._plan(graph, Graph(), self.given.params)
            self._bucket(graph)

    def partition_and_plan(self, joint: GraphModule, inputs: Any, **kwargs: Any) -> PartitionedGraphs:
        """Partition a joint graph, in place of torch's partitioner, and merge its collectives into buckets."""
        undecided = any(param.reshard is None for param in self.given.params.values())
        graphs, params = self._choose_unsharded(joint, inputs, **kwargs) if undecided else (None, self.given.params)
        forward, backward = graphs or self.partition(joint, inputs, **kwargs)
        request, costs = self.given.request, None
        if self.given.cast_in_matmuls and request is not None and self.given.profile is not None:
            limit = memory_limit(request, self.given.state.resident_bytes)
            by_rule = self._plan_by_rule(forward, backward, params)
            costs = self.cast_in_matmuls(forward.graph, backward.graph, limit, by_rule)
        self._plan(forward.graph, backward.graph, params, costs)
        for module in (forward, backward):
            self._bucket(module.graph)
            module.recompile()
        return forward, backward

    def partition(self, joint: GraphModule, inputs: Any, **kwargs: Any) -> PartitionedGraphs:
        """Partition a joint graph; where there is a plan, make both graphs ready for it."""
        graphs = partition(joint, inputs, **kwargs)
        for module in graphs:
            self._make_ready(module.graph)
        return graphs

    def _tag(self, graph: Graph, params: Mapping[int, GraphParameter]) -> None:
        tag(graph, params, saves_casts=self.given.casts_before_gathers)

    def _make_ready(self, graph: Graph) -> None:
        """Where there is a plan, cast weights before they are gathered, and settle what each kernel computes."""
        if self.given.request is None:
            return
        if self.given.casts_before_gathers:
            narrowed = cast_before_gather(graph)
            log.debug("%s, gathered as they are read: %s", direction_of(graph), narrowed)
        again = compute_again(graph)
        log.debug("%s, values that several kernels compute: %d", direction_of(graph), again)
        put_fused_together(graph)

    def order_and_record(self, graph: Graph, *, order: bool) -> None:
        """Put the nodes of a bucketed graph into the order of the plan, and add the record that ranks compare.

        Args:
            graph: a forward, backward or inference graph.
            order: ``False`` where Inductor's kernels are ordered later.
        """
        if is_higher_order_body(graph):
            return
        let_none_work_in_place_on_the_input_of_another(graph)
        direction = direction_of(graph)
        *_, unordered, ordered, _ = DUMP_NAMES[direction]
        if order and self.given.request is not None:
            self._dump(unordered, graph)
            order_graph(graph)
            self._dump(ordered, graph)
        kind = "inference" if self.notes.is_inference else direction
        facts = (f"graph: {kind}", *self.given.common_facts)
        record = record_graph(direction, facts, self.given.groups, filter(is_step, graph.nodes))
        record = replace(record, held_bytes=self.notes.held_bytes)
        if direction == "forward":
            record = replace(record, summary=self.notes.summaries[-1], warnings=tuple(self.notes.warnings))
        if not add_record(graph, record, self.given.report):
            for warning in record.warnings:
                log.warning(warning)

    def _bucket(self, graph: Graph) -> None:
        """Merge a graph's collectives into buckets, and let compute that repeats be compiled once."""
        if is_higher_order_body(graph):
            return
        direction = direction_of(graph)
        before, bucketed, *_ = DUMP_NAMES[direction]
        self._dump(before, graph)
        bucket(graph)
        self._dump(bucketed, graph)
        if self.given.request is not None and self.given.compile_once:
            bodies = compile_once(graph)
            log.debug("%s, %s", direction, bodies)
            if self.given.report is not None:
                self.given.report.write_text(BODIES.format(direction), render_bodies(graph, bodies))

    def cost_graphs(self, forward: Graph, backward: Graph) -> list[CostGraph]:
        """Return both graphs as their schedule sees them; none without a profile."""
        if self.given.profile is None:
            return []
        return [self._cost_graph(graph, forward, backward) for graph in (forward, backward)]

    def _cost_graph(self, graph: Graph, forward: Graph, backward: Graph) -> CostGraph:
        assert self.given.profile is not None
        inputs = {node.name for node in forward.find_nodes(op="placeholder")}
        equivalent, besides = self.given.equivalent_groups, accumulated_bytes(backward)
        return cost_graph_of(graph, self.given.profile, inputs, equivalent, besides)

    def _choose_unsharded(
        self, joint: GraphModule, inputs: Any, **kwargs: Any
    ) -> tuple[PartitionedGraphs, dict[int, GraphParameter]]:
        """Partition with the weights kept unsharded that the planner chooses; return the graphs and the choice."""
        request, resident = self.given.request, self.given.state.resident_bytes
        assert isinstance(request, SearchRequest)
        resharded = self.partition(GraphModule(joint, copy.deepcopy(joint.graph)), inputs, **kwargs)
        undecided = [param.fqn for param in self.given.params.values() if param.reshard is None]
        costs = self.cost_graphs(*(module.graph for module in resharded))
        unsharded = choose_unsharded_parameters(request, costs, resident, undecided)
        if unsharded:
            params = with_reshard_decided(self.given.params, unsharded)
            self._tag(joint.graph, params)
            graphs = self.partition(joint, inputs, **kwargs)
            # The choice did not foresee what is computed from an unsharded weight alone.
            if fits_memory(request, self.cost_graphs(*(module.graph for module in graphs)), resident):
                return graphs, params
        return resharded, with_reshard_decided(self.given.params, ())

    def cast_in_matmuls(
        self,
        forward: Graph,
        backward: Graph,
        limit: float,
        plan_by_rule: Callable[[Sequence[CostGraph]], BucketPlan] | None = None,
    ) -> list[CostGraph] | None:
        """Let matmuls cast gradients where that saves more than it costs, and where there is memory for it.

        Where it is not clear whether there is, both ways are planned, quickly.

        Args:
            limit: bytes that the graphs may need.
            plan_by_rule: returns the plan of these graphs, whose peak may not grow; ``None``: a plan is searched later.

        Returns:
            Both graphs as their schedule sees them then, if that was found out on the way.
        """
        costs = self.cost_graphs(forward, backward)
        fqns, every = (
            worth_casting_in_matmuls(costs[1], most, narrows=self.given.narrows) for most in (limit, math.inf)
        )
        found = {frozenset[str](): costs}

        def cast(graph: Graph, fqns: Collection[str]) -> None:
            cast_in_matmuls(graph, lambda reduction: reduction.fqns[0] in fqns)

        def costs_with(fqns: frozenset[str]) -> list[CostGraph]:
            if fqns not in found:
                assert backward.owning_module is not None
                copied = GraphModule(backward.owning_module, copy.deepcopy(backward)).graph
                cast(copied, fqns)
                found[fqns] = [costs[0], self._cost_graph(copied, forward, copied)]
            return found[fqns]

        if plan_by_rule is not None:
            fqns = casts_that_raise_no_peak(every, plan_by_rule, costs_with)
        elif fqns != every:
            fqns = min((fqns, every), key=lambda fqns: quick_seconds(costs_with(fqns), limit, DEVIATIONS))
        cast(backward, fqns)
        return found.get(fqns)

    def _plan_by_rule(
        self, forward: GraphModule, backward: GraphModule, params: Mapping[int, GraphParameter]
    ) -> Callable[[Sequence[CostGraph]], BucketPlan] | None:
        """Return what makes the plan for the cost graphs of a step, if a rule says it; ``None`` for other requests."""
        request = self.given.request
        if not isinstance(request, GroupingRequest):
            return None
        step = self._step_to_plan(forward.graph, backward.graph, params)
        return lambda costs: plan_step(request, replace(step, cost_graphs=costs), None).plan

    def _step_to_plan(
        self, forward: Graph, backward: Graph, params: Mapping[int, GraphParameter], costs: Sequence[CostGraph] = ()
    ) -> StepToPlan:
        items = graph_items(backward)[1]
        has_all_reduce = frozenset(c.fqns[0] for c in reductions(backward) if c.all_reduce_after or c.two_steps)
        uses = GraphUses(first_uses(graph_items(forward)[1]), first_uses(items), last_gradients(items), has_all_reduce)
        unsharded = {param.fqn for param in params.values() if param.reshard is False}
        return StepToPlan(
            costs,
            uses,
            self.given.parameters,
            self.given.buckets,
            tuple(fqn for fqn, _ in self.given.parameters if fqn in unsharded),
            self.given.state,
            frozenset(param.fqn for param in params.values()),
            self.given.wire,
        )

    def _plan(
        self,
        forward: Graph,
        backward: Graph,
        params: Mapping[int, GraphParameter],
        costs: Sequence[CostGraph] | None = None,
    ) -> None:
        """Assign the collectives of both graphs to the buckets of their plan.

        Args:
            costs: both graphs as their schedule sees them, if that is known.
        """
        step = self._step_to_plan(forward, backward, params)
        uses = step.uses
        before = len(uses.forward) + len(uses.backward) + len(uses.reductions)
        if self.given.request is None:
            self.notes.summaries.append(f"plan none: {before} collectives")
            return
        step = replace(step, cost_graphs=costs or self.cost_graphs(forward, backward))
        plan, of_step, replayed, prediction = plan_step(
            self.given.request, step, self.given.profile, narrows=self.given.narrows
        )
        predicted = ""
        if prediction is not None and of_step is not None:
            trace_artifact("simplefsdp_prediction", prediction.to_json)
            self.notes.held_bytes = 0 if self.notes.is_inference else replayed[0].memory[-1]
            predicted = f", predicted to take {prediction}"
            log.debug("plan %s is predicted to take %s", plan.hash, prediction)
            for name, text in prediction_files(prediction, of_step, replayed).items() if self.given.report else ():
                self._dump_text(name, text)
        self.notes.summaries.append(f"plan {plan.hash}: {before} -> {plan.collectives(uses)} collectives{predicted}")
        trace_artifact("simplefsdp_plan", plan.to_json)
        for graph, gathers in ((forward, plan.forward), (backward, plan.backward)):
            assign(graph, gathers, plan.reductions)
            choose_formats(graph, *plan.narrowed)
        if self.given.narrows:
            cast_what_is_encoded(backward)
        self._dump_text("plan.json", plan.to_json())

    def end_stages(self) -> None:
        """End the current stage of the compilation; the report says how long each took in this process until now."""
        self.notes.progress.end()
        seconds = sum(self.notes.progress.seconds.values())
        self._dump_text(FIRST_STEP, f"{seconds:.1f} s: {self.notes.progress}\n")

    def _dump(self, step: str, graph: Graph) -> None:
        if self.given.report is not None:
            self.given.report.write(step, graph)

    def _dump_text(self, name: str, text: str) -> None:
        if self.given.report is not None:
            self.given.report.write_text(name, text)


def direction_of(graph: Graph) -> str:
    """Return ``"backward"`` for a graph that takes gradients of outputs, ``"forward"`` for any other."""
    return "backward" if is_backward(graph) else "forward"
