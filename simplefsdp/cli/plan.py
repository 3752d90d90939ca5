"""``simplefsdp plan``: what a step on a cluster will take, and the plan for it, from a laptop.

A model of a few blocks is traced as one rank of many, on CPU, without weights; what there is to schedule in it is
repeated for all blocks (``inductor_passes/repeat.py``), and planned with the profile of the device that will train.
"""

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm import tqdm

from inductor_passes.scheduling.cost_graph import CostGraph
from inductor_passes.scheduling.keep_unsharded import keep_unsharded
from inductor_passes.scheduling.repeat_blocks import BlocksDifferError, repeat_blocks
from simplefsdp.analysis.explanation import Explanation, explain
from simplefsdp.analysis.prediction import StepCosts, predict, step_costs, step_state, timelines
from simplefsdp.analysis.timeline_trace import prediction_files
from simplefsdp.api import simple_fsdp
from simplefsdp.compile.backend import Traced, trace_only
from simplefsdp.compile.plan_step import (
    SearchRequest,
    choose_unsharded_parameters,
    memory_limit,
    parse_bytes,
    search_plan,
)
from simplefsdp.frontend.sharding import Reshard
from simplefsdp.hardware.catalog import DEVICES, built_in, smallest_network
from simplefsdp.hardware.profile import NETWORKS, HardwareProfile, load_profile
from simplefsdp.plan.bucket_plan import BucketPlan, GraphUses
from simplefsdp.plan.grouping import BLOCK, block_of, resolve_plan
from simplefsdp.rehearsal import world
from simplefsdp.rehearsal.systems import cross_entropy
from simplefsdp.rehearsal.timing import PEAK_FLOPS, flops_per_token
from simplefsdp.rehearsal.workload import MODELS, RankLayout, model_factory, parallelized
from simplefsdp.text.messages import unknown

_TRACED = 5
"""Blocks of a model that is traced in place of one with more; and once more with one more, to see that they repeat."""
_PLANS = ("auto", "greedy", "block")
_SWEPT = ("ranks", "tp", "seq", "batch")
_KEPT: dict[str | None, Reshard] = {"all": False, "auto": "auto"}
"""``reshard_after_forward``, by what is kept unsharded."""


@dataclass(frozen=True)
class PlannedStep:
    """A step with its plan."""

    plan: BucketPlan
    costs: StepCosts
    tokens_per_s: float
    """Of all ranks."""
    mfu: float | None
    """Share of the devices' dense bf16 peak; ``None``: that, or how many operations a token takes, is not known."""

    def explanation(self) -> Explanation:
        return explain(self.plan, self.costs)

    def save(self, folder: Path) -> None:
        """As the report of a compilation: the plan, what it is predicted to take, the timeline."""
        played = timelines(self.plan, self.costs.halves)
        predicted = prediction_files(predict(self.plan, self.costs, played), self.costs, played)
        files = {"plan.json": self.plan.to_json(), **predicted}
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, help=f"{', '.join(MODELS)}, or package.module:factory (tokens to logits)")
    add("--ranks", type=int, help="of the whole world")
    add("--profile", required=True, help=f"of the device: {', '.join(DEVICES)}, or the JSON file of a profile")
    add("--network", help=f"of a built-in device: {', '.join(NETWORKS)} (default: the smallest with as many ranks)")
    add("--memory-budget", metavar="BYTES", help="as 75GiB")
    add("--seq", type=int, default=8192, help="tokens a sequence")
    add("--batch", type=int, default=1, help="sequences of a rank and step")
    add("--plan", default="auto", choices=_PLANS)
    add("--layers", type=int, help="how many blocks, instead of the model's own number")
    add("--hybrid", action="store_true", help="shard inside a node, replicate over nodes")
    add("--tp", type=int, default=1, help="neighbouring ranks that the model is tensor parallel over")
    kept = "weights that stay whole until backward: all, or auto: those that the planner chooses"
    add("--keep-unsharded", nargs="?", const="all", choices=_KEPT, help=kept)
    add("--activation-checkpointing", default="none", choices=["none", "block", "selective"])
    add("--sweep", nargs="+", metavar="NAME=A,B", help=f"a table over several of {', '.join(_SWEPT)}")
    add("--out", type=Path, default=Path("out/plan"), help="folder for plan.json and what simplefsdp explain reads")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Raises ``ValueError`` for what is wrong with the arguments, before anything is traced."""
    swept = _swept(args.sweep or ())
    jobs = [
        argparse.Namespace(**vars(args) | dict(zip(swept, v, strict=True))) for v in itertools.product(*swept.values())
    ]
    profiles = [_check(job) for job in jobs]
    found = []
    with tqdm(total=3 * len(jobs), unit="stage", file=sys.stderr) as bar:
        for job, profile in zip(jobs, profiles, strict=True):
            found.append(plan_step(job, profile, bar))
    folders = [args.out.joinpath(*(f"{name}_{getattr(job, name)}" for name in swept)) for job in jobs]
    for folder, planned in zip(folders, found, strict=True):
        planned.save(folder)
    if args.json:
        reports = {
            str(folder): json.loads(one.explanation().to_json()) for folder, one in zip(folders, found, strict=True)
        }
        print(json.dumps(reports, indent=1))
    elif swept:
        print(_table(swept, jobs, found))
        print(f"plotted in {_plot(swept, jobs, found, args.out)}; each plan in {args.out}")
    else:
        print(_heading(args, profiles[0], found[0]), found[0].explanation().summary(), sep="\n")
        where = args.out / "plan.json"
        print(f"options={{'plan': '{where}'}} carries it out; simplefsdp explain {args.out} says why, and draws it")


def plan_step(args: argparse.Namespace, profile: HardwareProfile, bar: tqdm) -> PlannedStep:
    """The plan of a step of the model that ``args`` name, as ``add_arguments`` has them; ``bar`` is told of stages.

    Raises:
        ValueError: the model has a graph break or is not trained, or the budget cannot be met.
    """

    def build(layers: int | None) -> nn.Module:
        factory = _factory(args, layers)
        with torch.device("meta"):
            model = parallelized(factory(), tp)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        reshard = _KEPT.get(args.keep_unsharded, True)
        return simple_fsdp(model, mesh, mp_policy=policy, reshard_after_forward=reshard)

    bar.set_description("tracing")
    with world(args.ranks, profile.network):
        mesh, tp = _layout(args, profile).meshes("cpu")
        whole = build(args.layers)
        flops, blocks = flops_per_token(whole, args.seq), _blocks(whole)
        halves = None
        if args.model in MODELS and blocks > _TRACED + 1:
            halves = _repeated([_traced(build(_TRACED + more), args, profile) for more in (0, 1)], blocks)
        bar.update()
        if halves is None:
            bar.set_description("tracing all of its blocks")
            halves = _traced(build(args.layers), args, profile)
        bar.update()
        bar.set_description("planning")
        params: list[Any] = list(whole.parameters())
        infos = [(param.simple_fsdp_info, param.dtype, param.requires_grad) for param in params]
        state, parameters = step_state(infos), infos[0][0].model.parameters
    fqns = tuple(fqn for fqn, _ in parameters)
    kept: Collection[str] = fqns if args.keep_unsharded == "all" else ()
    budget = None if args.memory_budget is None else parse_bytes(args.memory_budget)
    wanted = SearchRequest("auto" if args.plan == "block" else args.plan, profile, budget)
    if args.keep_unsharded == "auto":
        chosen = choose_unsharded_parameters(wanted, halves, state.resident_bytes, fqns)
        kept = [fqn for fqn in fqns if fqn in chosen]
        halves = keep_unsharded(halves[0], halves[1], chosen)
    forward, backward = halves
    followed = frozenset(reduction.fqn for reduction in backward.reductions if reduction.kind.all_reduce_after)
    members = (forward.gathers, backward.gathers, backward.reductions)
    first, again, reduced = ([member.fqn for member in each] for each in members)
    uses = GraphUses(first, again, reduced, followed)
    if args.plan == "block":
        plan = resolve_plan(BLOCK.prefetch, BLOCK.buckets(fqns), uses, parameters, kept)
    else:
        plan = search_plan(wanted, halves, state.resident_bytes, BLOCK.buckets(fqns), uses, parameters, kept)
    costs = step_costs(halves, state, profile, memory_limit(wanted, state.resident_bytes))
    step_s = predict(plan, costs, timelines(plan, halves)).step_s
    tokens_per_s = args.ranks // args.tp * args.batch * args.seq / step_s
    peak = next((peak for name, peak in PEAK_FLOPS.items() if profile.name.startswith(name.lower())), None)
    bar.update()
    return PlannedStep(plan, costs, tokens_per_s, flops * tokens_per_s / args.ranks / peak if flops and peak else None)


def _repeated(traces: Sequence[Sequence[CostGraph]], blocks: int) -> Sequence[CostGraph] | None:
    """With so many blocks, of two traces of which the second has one more; ``None``: blocks are not alike."""
    few, more = traces
    try:
        again = [repeat_blocks(half, _TRACED + 1, _number, _renamed) for half in few]
        return [repeat_blocks(half, blocks, _number, _renamed) for half in more] if again == list(more) else None
    except BlocksDifferError:
        return None


def _traced(model: nn.Module, args: argparse.Namespace, profile: HardwareProfile) -> Sequence[CostGraph]:
    """What there is to schedule in a step of ``model``, which is given memory that nobody writes or reads."""
    model.to_empty(device="cpu")
    tokens = torch.zeros((args.batch, args.seq), dtype=torch.int64)
    torch._dynamo.reset()
    backend = functools.partial(trace_only, options={"profile": profile})

    def loss(tokens: Tensor, targets: Tensor) -> Any:
        return model(tokens, targets) if args.model in MODELS else cross_entropy(model(tokens), targets)

    try:
        torch.compile(loss, backend=backend, fullgraph=True)(tokens, tokens)
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, Traced):
            return error.inner_exception.halves
        raise
    except torch._dynamo.exc.Unsupported as error:
        raise ValueError(
            f"--model {args.model}: has a graph break, and each graph a plan of its own: {error}"
        ) from error
    raise ValueError(f"--model {args.model}: its output needs no gradient")


def _blocks(model: nn.Module) -> int:
    return 1 + max((number for fqn, _ in model.named_parameters() if (number := _number(fqn)) is not None), default=-1)


def _number(fqn: str) -> int | None:
    block = block_of(fqn)
    return None if block is None else int(block.rpartition(".")[2])


def _renamed(fqn: str, number: int) -> str:
    block = block_of(fqn)
    assert block is not None
    return f"{block.rpartition('.')[0]}.{number}{fqn.removeprefix(block)}"


def _check(args: argparse.Namespace) -> HardwareProfile:
    """The profile that is meant."""
    if args.ranks is None:
        raise ValueError("--ranks: missing")
    for name in ("ranks", "tp", "seq", "batch"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}: expected a positive number, found {getattr(args, name)}")
    if args.memory_budget is not None:
        if args.plan == "block":
            raise ValueError("--memory-budget: needs --plan auto or greedy")
        parse_bytes(args.memory_budget)
    if args.keep_unsharded == "auto" and args.plan != "auto":
        raise ValueError("--keep-unsharded: auto needs --plan auto")
    _factory(args, args.layers)
    if args.profile.endswith(".json"):
        if args.network is not None:
            raise ValueError("--network: the profile's file says it itself")
        profile = load_profile(args.profile)
    else:
        chosen = args.network or smallest_network(args.ranks)
        if chosen is None:
            raise ValueError(f"--network: none that is built in has {args.ranks} ranks; name the JSON file of one")
        profile = built_in(f"{args.profile}/{chosen}")
    if profile.network.ranks < args.ranks:
        raise ValueError(f"--ranks: {args.ranks}, but network {profile.network.name!r} has {profile.network.ranks}")
    _layout(args, profile).check()
    return profile


def _layout(args: argparse.Namespace, profile: HardwareProfile) -> RankLayout:
    return RankLayout(args.ranks, profile.network.ranks_per_node, args.tp, args.hybrid)


def _factory(args: argparse.Namespace, layers: int | None) -> Callable[[], nn.Module]:
    return model_factory(
        args.model, seq=args.seq, layers=layers, activation_checkpointing=args.activation_checkpointing
    )


def _swept(texts: Sequence[str]) -> dict[str, list[int]]:
    found = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name not in _SWEPT:
            raise ValueError("--sweep: " + unknown("argument", name, _SWEPT))
        try:
            found[name] = [int(value) for value in values.split(",")]
        except ValueError:
            raise ValueError(f"--sweep {text}: expected {name}=A,B with numbers") from None
    return found


def _heading(args: argparse.Namespace, profile: HardwareProfile, found: PlannedStep) -> str:
    share = "" if found.mfu is None else f", MFU {found.mfu:.1%}"
    parallel = f"a rank, {args.ranks} ranks" if args.tp == 1 else f"a group of {args.tp}, {args.ranks} ranks"
    return (
        f"{args.model}, {args.batch} x {args.seq} tokens {parallel} of {profile.name}, bf16: "
        f"{found.tokens_per_s:,.0f} tokens/s in all, {found.tokens_per_s / args.ranks:,.0f} a rank{share}"
    )


def _table(swept: Mapping[str, Sequence[int]], jobs: Sequence[argparse.Namespace], found: Sequence[PlannedStep]) -> str:
    """In Markdown."""
    columns = [*swept, "step, ms", "tokens/s", "a rank", "MFU", "exposed, ms", "L1, ms", "peak, GiB", "collectives"]
    rows = [columns, ["---"] * len(columns)]
    for job, planned in zip(jobs, found, strict=True):
        explained = planned.explanation()
        predicted = explained.prediction
        seconds = (predicted.step_s, predicted.exposed_s, predicted.bound_s + predicted.outside_s)
        step, exposed, bound = (f"{1e3 * each:.1f}" for each in seconds)
        speeds = [f"{planned.tokens_per_s:,.0f}", f"{planned.tokens_per_s / job.ranks:,.0f}"]
        share = "-" if planned.mfu is None else f"{planned.mfu:.1%}"
        peak = f"{predicted.peak_bytes / 2**30:.2f}"
        where = [f"{getattr(job, name):,}" for name in swept]
        rows.append([*where, step, *speeds, share, exposed, bound, peak, str(explained.collectives)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _plot(
    swept: Mapping[str, Sequence[int]], jobs: Sequence[argparse.Namespace], found: Sequence[PlannedStep], folder: Path
) -> Path:
    """How the step scales with what is swept first; a line for each of the others."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    first, *others = swept
    lines: dict[str, list[tuple[int, float]]] = {}
    for job, planned in zip(jobs, found, strict=True):
        label = ", ".join(f"{name} {getattr(job, name):,}" for name in others) or "a rank"
        lines.setdefault(label, []).append((getattr(job, first), planned.tokens_per_s / job.ranks))
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set(xlabel=first, ylabel="tokens/s a rank", xscale="log", ylim=(0, None), title=jobs[0].model)
    axes.set_xticks(list(swept[first]), [f"{value:,}" for value in swept[first]], minor=False)
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "sweep.png", dpi=150)
    return folder / "sweep.png"
