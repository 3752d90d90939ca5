"""``simplefsdp plan``: what a step on a cluster will take, and the plan for it, from a laptop.

A model of a few blocks is traced as one rank of many, on CPU, without weights; its graphs are repeated for all blocks
(``inductor_passes/scheduling/repeat_blocks.py``), and planned with the profile of the device that will train.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from simplefsdp.analysis.optimizer_costs import OPTIMIZERS
from simplefsdp.cli.wire_options import add_wire_options, chosen_wire
from simplefsdp.compile.plan_model import PlanJob, PlannedModel, plan_model
from simplefsdp.frontend.embedding_lookup import LOOKUPS
from simplefsdp.hardware.catalog import DEVICES, built_in, smallest_network
from simplefsdp.hardware.profile import NETWORKS, HardwareProfile, load_profile
from simplefsdp.rehearsal.workload import MODELS, RankLayout
from simplefsdp.text.messages import unknown
from simplefsdp.text.tables import markdown_table
from simplefsdp.text.units import parse_bytes

_PLANS = ("auto", "greedy", "block")
_SWEPT = ("ranks", "tp", "seq", "batch")


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
    text = "weights that stay unsharded until backward: all, or auto: those that the planner chooses"
    add("--keep-unsharded", nargs="?", const="all", choices=["all", "auto"], help=text)
    add("--embedding-lookup", default="gather", choices=LOOKUPS, help="as in simple_fsdp")
    add("--activation-checkpointing", default="none", choices=["none", "block", "selective"])
    add("--optimizer", default="adamw", choices=OPTIMIZERS, help="whose state, exchanges and work count")
    add_wire_options(parser)
    add("--sweep", nargs="+", metavar="NAME=A,B", help=f"a table over several of {', '.join(_SWEPT)}")
    add("--out", type=Path, default=Path("out/plan"), help="folder for plan.json and what simplefsdp explain reads")
    add("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    """Plan what ``args`` ask for, print it, and write it to ``args.out``.

    Raises:
        ValueError: an argument is not valid, before anything is traced; or a step cannot be planned.
    """
    swept = _swept(args.sweep or ())
    asked = [
        argparse.Namespace(**vars(args) | dict(zip(swept, v, strict=True))) for v in itertools.product(*swept.values())
    ]
    jobs = [_job(one) for one in asked]
    found = []
    with tqdm(total=2 * len(jobs), unit="stage", file=sys.stderr) as bar:
        for number, job in enumerate(jobs):
            stages = itertools.count(2 * number)

            def on_stage(name: str, stages: Iterator[int] = stages) -> None:
                bar.set_description(name)
                bar.update(next(stages) - bar.n)

            found.append(plan_model(job, on_stage))
            bar.update(next(stages) - bar.n)
    folders = [args.out.joinpath(*(f"{name}_{getattr(job, name)}" for name in swept)) for job in asked]
    for folder, planned in zip(folders, found, strict=True):
        planned.save(folder)
    if args.json:
        reports = {
            str(folder): json.loads(one.explanation().to_json()) for folder, one in zip(folders, found, strict=True)
        }
        print(json.dumps(reports, indent=1))
    elif swept:
        print(_table(swept, asked, found))
        print(f"plotted in {_plot(swept, asked, found, args.out)}; each plan in {args.out}")
    else:
        print(_heading(args, jobs[0].profile, found[0]), found[0].explanation().summary(), sep="\n")
        where = args.out / "plan.json"
        print(f"options={{'plan': '{where}'}} carries it out; simplefsdp explain {args.out} says why, and draws it")


def _job(args: argparse.Namespace) -> PlanJob:
    """Check the arguments and return the step that they ask for.

    Raises:
        ValueError: an argument is not valid; names it.
    """
    if args.ranks is None:
        raise ValueError("--ranks: missing")
    for name in ("ranks", "tp", "seq", "batch"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}: expected a positive number, found {getattr(args, name)}")
    if args.memory_budget is not None and args.plan == "block":
        raise ValueError("--memory-budget: needs --plan auto or greedy")
    budget = None if args.memory_budget is None else parse_bytes(args.memory_budget)
    if args.keep_unsharded == "auto" and args.plan != "auto":
        raise ValueError("--keep-unsharded: auto needs --plan auto")
    wire = chosen_wire(args, plans_with_auto=args.plan == "auto")
    profile = _profile(args)
    job = PlanJob(
        model=args.model,
        layout=RankLayout(args.ranks, profile.network.ranks_per_node, args.tp, args.hybrid),
        profile=profile,
        plan=args.plan,
        memory_budget=budget,
        seq=args.seq,
        batch=args.batch,
        layers=args.layers,
        keep_unsharded=args.keep_unsharded,
        embedding_lookup=args.embedding_lookup,
        activation_checkpointing=args.activation_checkpointing,
        optimizer=args.optimizer,
        wire=wire,
        narrows=args.wire_auto,
    )
    job.factory(job.layers)
    job.layout.check()
    return job


def _profile(args: argparse.Namespace) -> HardwareProfile:
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
    return profile


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


def _heading(args: argparse.Namespace, profile: HardwareProfile, found: PlannedModel) -> str:
    share = "" if found.mfu is None else f", MFU {found.mfu:.1%}"
    parallel = f"a rank, {args.ranks} ranks" if args.tp == 1 else f"a group of {args.tp}, {args.ranks} ranks"
    return (
        f"{args.model}, {args.batch} x {args.seq} tokens {parallel} of {profile.name}, bf16: "
        f"{found.tokens_per_s:,.0f} tokens/s in all, {found.tokens_per_s / args.ranks:,.0f} a rank{share}"
    )


def _table(
    swept: Mapping[str, Sequence[int]], asked: Sequence[argparse.Namespace], found: Sequence[PlannedModel]
) -> str:
    """Return the planned steps in Markdown, a row each."""
    columns = [*swept, "step, ms", "tokens/s", "a rank", "MFU", "exposed, ms", "L1, ms", "peak, GiB", "collectives"]
    rows = []
    for job, planned in zip(asked, found, strict=True):
        explained = planned.explanation()
        predicted = explained.prediction
        seconds = (predicted.step_s, predicted.exposed_s, predicted.bound_s + predicted.outside_s)
        step, exposed, bound = (f"{1e3 * each:.1f}" for each in seconds)
        speeds = [f"{planned.tokens_per_s:,.0f}", f"{planned.tokens_per_s / job.ranks:,.0f}"]
        share = "-" if planned.mfu is None else f"{planned.mfu:.1%}"
        peak = f"{predicted.peak_bytes / 2**30:.2f}"
        where = [f"{getattr(job, name):,}" for name in swept]
        rows.append([*where, step, *speeds, share, exposed, bound, peak, str(explained.collectives)])
    return markdown_table(columns, rows)


def _plot(
    swept: Mapping[str, Sequence[int]], jobs: Sequence[argparse.Namespace], found: Sequence[PlannedModel], folder: Path
) -> Path:
    """Plot tokens per second over the first swept argument, a line for each combination of the others."""
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
