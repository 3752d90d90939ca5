"""Plan a step of a model that is traced here and runs nowhere, for the device and the cluster of a profile."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from inductor_passes.runtime.whole_files import write_whole
from inductor_passes.scheduling.cost_graph import CostGraph
from inductor_passes.scheduling.keep_unsharded import keep_unsharded
from inductor_passes.scheduling.repeat_blocks import BlocksDifferError, repeat_blocks
from simplefsdp.analysis.explanation import Explanation, explain
from simplefsdp.analysis.optimizer_costs import optimizer_state
from simplefsdp.analysis.prediction import StepCosts, StepState
from simplefsdp.analysis.timeline_trace import prediction_files
from simplefsdp.api import simple_fsdp
from simplefsdp.compile.backend import trace_cost_graphs
from simplefsdp.compile.plan_step import (
    PlannedStep,
    PlanRequest,
    SearchRequest,
    StepToPlan,
    choose_unsharded_parameters,
    plan_step,
)
from simplefsdp.frontend.sharding import Reshard
from simplefsdp.frontend.wire_format import WireFormat
from simplefsdp.hardware.profile import HardwareProfile
from simplefsdp.plan.bucket_plan import GraphUses, WireFormats
from simplefsdp.plan.grouping import BLOCK, block_of
from simplefsdp.rehearsal import world
from simplefsdp.rehearsal.systems import cross_entropy
from simplefsdp.rehearsal.timing import PEAK_FLOPS, flops_per_token
from simplefsdp.rehearsal.workload import MODELS, RankLayout, model_factory, parallelized

_TRACED = 5
"""Blocks that are traced in place of a deeper model's; a second trace with one more shows whether blocks repeat."""
_RESHARD: dict[str | None, Reshard] = {None: True, "all": False, "auto": "auto"}
"""``reshard_after_forward``, by ``PlanJob.keep_unsharded``."""


@dataclass(frozen=True)
class PlanJob:
    """A step to plan."""

    model: str
    """A key of ``MODELS``, or ``package.module:factory``."""
    layout: RankLayout
    profile: HardwareProfile
    """Profile of the device and the network."""
    plan: str = "auto"
    """``"auto"``, ``"greedy"`` or ``"block"``."""
    memory_budget: int | None = None
    """Bytes of a step's peak on a device; ``None``: no limit."""
    seq: int = 8192
    """Tokens of a sequence."""
    batch: int = 1
    """Sequences of a rank and step."""
    layers: int | None = None
    """Number of blocks, instead of the model's own number."""
    keep_unsharded: str | None = None
    """Weights that stay unsharded until backward: ``"all"``, ``"auto"`` (the planner chooses) or ``None``."""
    embedding_lookup: str = "gather"
    """``embedding_lookup`` of ``simple_fsdp``."""
    activation_checkpointing: str = "none"
    """``"none"``, ``"block"`` or ``"selective"``."""
    optimizer: str = "adamw"
    """One of ``OPTIMIZERS``."""
    wire: WireFormat | None = None
    """The wire format of all parameters."""
    narrows: bool = False
    """Whether only what compute cannot hide travels in its format, or in a milder one."""

    def factory(self, layers: int | None) -> Callable[[], nn.Module]:
        """Return what makes the model with so many blocks; see ``model_factory`` for errors."""
        checkpointing = self.activation_checkpointing
        return model_factory(self.model, seq=self.seq, layers=layers, activation_checkpointing=checkpointing)

    @property
    def request(self) -> PlanRequest:
        """The request for a plan."""
        if self.plan == "block":
            return BLOCK
        return SearchRequest(
            self.plan, self.profile, self.memory_budget, self.profile.device_bytes, narrows=self.narrows
        )


@dataclass(frozen=True)
class PlannedModel:
    """A planned step of a model, with its speed."""

    step: PlannedStep
    tokens_per_s: float
    """Tokens per second of all ranks."""
    mfu: float | None
    """Share of the devices' dense bf16 peak; ``None``: the peak, or the operations of a token, are not known."""

    @property
    def costs(self) -> StepCosts:
        """Everything that the prediction depends on, except the plan."""
        assert self.step.costs is not None
        return self.step.costs

    def explanation(self) -> Explanation:
        """Return the plan and its prediction, for people."""
        return explain(self.step.plan, self.costs)

    def save(self, folder: Path) -> None:
        """Write the plan, the prediction and the timeline, as the report of a compilation has them."""
        assert self.step.prediction is not None
        predicted = prediction_files(self.step.prediction, self.costs, self.step.timelines)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {"plan.json": self.step.plan.to_json(), **predicted}.items():
            write_whole(folder / name, text)


def plan_model(job: PlanJob, on_stage: Callable[[str], object] = lambda _: None) -> PlannedModel:
    """Trace a step of a model and plan it.

    Args:
        job: the model, the ranks and what is asked of the plan.
        on_stage: called with the name of each of two stages as it begins: ``"tracing"`` and ``"planning"``.

    Raises:
        ValueError: the model has a graph break or is not trained, or the budget cannot be met.
    """
    on_stage("tracing")
    profile = job.profile
    with world(job.layout.ranks, profile.network):
        mesh, tp = job.layout.meshes("cpu")

        def build(layers: int | None) -> nn.Module:
            factory = job.factory(layers)
            with torch.device("meta"):
                model = parallelized(factory(), tp)
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            reshard = _RESHARD[job.keep_unsharded]
            return simple_fsdp(
                model,
                mesh,
                mp_policy=policy,
                reshard_after_forward=reshard,
                wire=job.wire,
                ranks_per_node=profile.network.whole_node(job.layout.ranks),
                embedding_lookup=job.embedding_lookup,
            )

        whole = build(job.layers)
        flops, blocks = flops_per_token(whole, job.seq), _blocks(whole)
        costs = None
        if job.model in MODELS and blocks > _TRACED + 1:
            costs = _repeated([_traced(build(_TRACED + more), job) for more in (0, 1)], blocks)
        if costs is None:
            costs = _traced(build(job.layers), job)
        params: list[Any] = list(whole.parameters())
        state = optimizer_state(whole, job.optimizer)
        parameters = params[0].simple_fsdp_info.model.parameters
    on_stage("planning")
    planned = plan_step(job.request, _step_to_plan(job, costs, state=state, parameters=parameters), profile)
    assert planned.prediction is not None
    ranks = job.layout.ranks
    tokens_per_s = ranks // job.layout.tensor_parallel * job.batch * job.seq / planned.prediction.step_s
    peak = next((peak for name, peak in PEAK_FLOPS.items() if profile.name.startswith(name.lower())), None)
    return PlannedModel(planned, tokens_per_s, flops * tokens_per_s / ranks / peak if flops and peak else None)


def _step_to_plan(
    job: PlanJob,
    costs: Sequence[CostGraph],
    *,
    state: StepState,
    parameters: tuple[tuple[str, tuple[int, ...]], ...],
) -> StepToPlan:
    """Return the step of ``job`` with the weights kept unsharded that it asks for, as ``plan_step`` takes it."""
    fqns = tuple(fqn for fqn, _ in parameters)
    unsharded: Collection[str] = fqns if job.keep_unsharded == "all" else ()
    if job.keep_unsharded == "auto":
        assert isinstance(job.request, SearchRequest)
        unsharded = choose_unsharded_parameters(job.request, costs, state.resident_bytes, fqns)
        costs = keep_unsharded(costs[0], costs[1], unsharded)
    forward, backward = costs
    members = (forward.gathers, backward.gathers, backward.reductions)
    first, again, reduced = ([member.fqn for member in each] for each in members)
    has_all_reduce = frozenset(reduction.fqn for reduction in backward.reductions if reduction.kind.all_reduce_after)
    return StepToPlan(
        costs,
        GraphUses(first, again, reduced, has_all_reduce),
        parameters,
        BLOCK.buckets(fqns),
        tuple(fqn for fqn in fqns if fqn in unsharded),
        state,
        frozenset(fqns),
        _wire_formats(parameters, costs),
    )


def _wire_formats(
    parameters: Iterable[tuple[str, tuple[int, ...]]], graphs: Iterable[CostGraph]
) -> tuple[WireFormats, ...]:
    """Return the wire formats that the parameters have in these graphs, in their order, of those that have one."""
    gathered: dict[str, str | None] = {}
    reduced: dict[str, tuple[str, ...]] = {}
    for graph in graphs:
        gathered |= {gather.fqn: gather.kind.wire_format for gather in graph.gathers}
        reduced |= {reduction.fqn: reduction.kind.wire_formats for reduction in graph.reductions}
    every = (WireFormats(fqn, gathered.get(fqn), *reduced.get(fqn, ())) for fqn, _ in parameters)
    return tuple(each for each in every if each.gather or each.reduce)


def _repeated(traces: Sequence[Sequence[CostGraph]], blocks: int) -> Sequence[CostGraph] | None:
    """Return the graphs of a model with so many blocks, from two traces of which the second has one block more.

    ``None``: the blocks differ.
    """
    few, more = traces
    try:
        again = [repeat_blocks(graph, _TRACED + 1, _number, _renamed) for graph in few]
        return [repeat_blocks(graph, blocks, _number, _renamed) for graph in more] if again == list(more) else None
    except BlocksDifferError:
        return None


def _traced(model: nn.Module, job: PlanJob) -> Sequence[CostGraph]:
    """Return the graphs of a step of ``model``, whose memory nobody writes or reads.

    On a GPU matmuls cast gradients wherever no peak grows, also if there is a budget, with which a compilation may cast
    some of them later.
    """
    model.to_empty(device="cpu")
    tokens = torch.zeros((job.batch, job.seq), dtype=torch.int64)
    torch.compiler.reset()

    def loss(tokens: Tensor, targets: Tensor) -> Any:
        return model(tokens, targets) if job.model in MODELS else cross_entropy(model(tokens), targets)

    try:
        costs = trace_cost_graphs(
            loss,
            (tokens, tokens),
            job.profile,
            cast_in_matmuls=job.profile.device_bytes is not None,
            narrows=job.narrows,
        )
    except torch._dynamo.exc.Unsupported as error:
        raise ValueError(
            f"--model {job.model}: has a graph break, and each graph a plan of its own: {error}"
        ) from error
    if costs is None:
        raise ValueError(f"--model {job.model}: its output needs no gradient")
    return costs


def _blocks(model: nn.Module) -> int:
    return 1 + max((number for fqn, _ in model.named_parameters() if (number := _number(fqn)) is not None), default=-1)


def _number(fqn: str) -> int | None:
    block = block_of(fqn)
    return None if block is None else int(block.rpartition(".")[2])


def _renamed(fqn: str, number: int) -> str:
    block = block_of(fqn)
    assert block is not None
    return f"{block.rpartition('.')[0]}.{number}{fqn.removeprefix(block)}"
