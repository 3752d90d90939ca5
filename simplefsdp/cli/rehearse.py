"""``simplefsdp rehearse``: time one rank of a cluster on this machine."""

import argparse
import gc
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from filelock import FileLock
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm import tqdm

from simplefsdp.calibration.calibrate import calibrated_profile
from simplefsdp.cli.results import print_results
from simplefsdp.cli.simulation import simulate_systems, start_under_null_gpu
from simplefsdp.cli.wire_options import add_wire_options, chosen_wire
from simplefsdp.compile.plan_step import SEARCHED_PLANS
from simplefsdp.frontend.embedding_lookup import LOOKUPS
from simplefsdp.frontend.wire_format import WireFormat
from simplefsdp.hardware.catalog import DEVICES, device_profile, smallest_network
from simplefsdp.hardware.profile import NETWORKS, HardwareProfile, Network, flat, network
from simplefsdp.null_gpu import launch
from simplefsdp.rehearsal.group import world
from simplefsdp.rehearsal.systems import SYSTEMS, Parallelism, System, simplefsdp_system
from simplefsdp.rehearsal.timing import (
    TimingResult,
    TrainingRun,
    available_bytes,
    estimated_step_bytes,
    measure,
)
from simplefsdp.rehearsal.workload import MODELS, RankLayout, Workload, model_factory, parallelized
from simplefsdp.text.messages import unknown
from simplefsdp.text.tables import markdown_table
from simplefsdp.text.units import parse_bytes

AGAINST = ("auto", "greedy", "block", "fsdp2", "fsdp2-compile", "inductor", "ddp", "single")
_NOT_SIMULATED = ("rank", "threads", "multiprocessors", "steps", "turn", "anyway")
"""Options that ``--simulate`` has no use for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, help=f"{', '.join(MODELS)}, or package.module:factory (tokens to logits)")
    add("--ranks", type=int, required=True, help="of the whole world")
    add("--rank", type=int, default=0, help="which of them to be")
    add("--network", help=f"{', '.join(NETWORKS)}, or a JSON file (with --simulate: h100-...)")
    add("--alpha", type=float, metavar="SECONDS", help="instead of --network: of every collective")
    add("--bandwidth", type=float, metavar="BYTES_PER_S", help="with --alpha: of every rank")
    add("--profile", help=f"for plans and predictions: {', '.join(DEVICES)}, or a JSON file (default: measured here)")
    add("--plan", default="block", help="auto, greedy, block, none; or one of the other systems")
    add("--memory-budget", metavar="BYTES", help='for auto and greedy, such as "60GiB" (default: what the device has)')
    add("--against", default="", metavar="A,B", help="the same under " + ", ".join(AGAINST))
    add("--seq", type=int, default=2048, help="tokens a sequence")
    add("--batch", type=int, default=1, help="sequences a step")
    add("--layers", type=int, help="how many blocks, instead of the model's own number")
    add("--hybrid", action="store_true", help="shard inside a node, replicate over nodes")
    add("--tp", type=int, default=1, help="neighbouring ranks that the model is tensor parallel over")
    add("--keep-unsharded", action="store_true", help="reshard_after_forward=False")
    add("--embedding-lookup", default="gather", choices=LOOKUPS, help="as in simple_fsdp; other systems gather")
    add_wire_options(parser)
    add("--activation-checkpointing", default="none", choices=["none", "block", "selective"])
    add("--dtype", choices=["bf16", "fp32"], help="of compute and gathers (default: bf16 on cuda, fp32 on cpu)")
    add("--device", help=f"cuda, cpu; with --simulate: {', '.join(launch.DEVICES)} (default: what is here; h100)")
    add("--threads", type=int, default=1, help="of compute on cpu: leave a core to the network")
    add("--multiprocessors", type=int, default=1, help="that a collective keeps busy on cuda (NCCL: 16)")
    add("--steps", type=int, default=10, help="timed, on the network and on one that costs nothing")
    add("--turn", metavar="FILE", help="a lock that is held while training: rehearsals compile at once, train in turn")
    add("--trace", metavar="FOLDER", help="for the profiler's record of one step of each system")
    add("--anyway", action="store_true", help="also if memory does not seem to suffice")
    add("--json", action="store_true", help="print JSON")
    add("--simulate", action="store_true", help="on a GPU that is not there: times of the profile, no kernel runs")
    add("--host-factor", type=float, default=0.5, help="with --simulate: CPU time of its host for each second of ours")


def run(args: argparse.Namespace) -> None:
    """Rehearse what ``args`` ask for, and print the results.

    Raises:
        ValueError: an argument is not valid, before anything is allocated.
    """
    for name in ("ranks", "tp", "seq", "batch", "threads", "steps", "multiprocessors"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}: expected a positive number, found {getattr(args, name)}")
    _check_device(args)
    chosen = _network(args)
    valid = tuple(name for name in AGAINST if not (args.simulate and name == "ddp"))  # which asks other ranks
    names = [
        _system("--plan", args.plan, ("none", *valid)),
        *(_system("--against", n, valid) for n in _names(args.against)),
    ]
    names = ["inductor" if name == "none" else name for name in names]
    layout = RankLayout(args.ranks, chosen.ranks_per_node, args.tp, args.hybrid)
    layout.check()
    if args.memory_budget is not None and not SEARCHED_PLANS.intersection(names):
        raise ValueError("--memory-budget: needs --plan auto or greedy")
    budget = None if args.memory_budget is None else parse_bytes(args.memory_budget)
    wire = chosen_wire(args, plans_with_auto="auto" in names)
    build = model_factory(
        args.model, seq=args.seq, layers=args.layers, activation_checkpointing=args.activation_checkpointing
    )
    systems = {name: _system_within(name, budget) for name in names}
    torch._dynamo.config.recompile_limit = 64  # every system compiles the same forward
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    if args.simulate:
        if args.ranks > chosen.ranks:
            raise ValueError(f"--ranks: {args.ranks}, but network {chosen.name!r} has {chosen.ranks}")
        simulated = device_profile(args.profile or args.device, chosen)
        start_under_null_gpu(args.device)
        simulate_systems(args, systems, lambda: _workload(args, "cuda", build, layout, simulated, wire), simulated)
        return
    torch.set_num_threads(args.threads)
    if args.device == "cuda":
        torch.cuda.set_device(0)
    profile = _profile(args, chosen, measured=not SEARCHED_PLANS.isdisjoint(names))
    with world(args.ranks, chosen, rank=args.rank, multiprocessors=args.multiprocessors) as here:
        workload = _workload(args, args.device, build, layout, profile, wire)
        for name in names if not args.anyway else ():
            _check_that_it_fits(name, workload)
        turn = None if args.turn is None else FileLock(args.turn)
        if turn is not None:
            here.before_first = turn.acquire
        results, failed = [], {}
        bar = tqdm(total=len(names) * (2 + 2 * args.steps), unit="step", file=sys.stderr)
        for name, system in systems.items():
            bar.set_description(f"{name}: first step, compiles")
            try:
                training_run = TrainingRun(name, system, workload, here)
                results += _measure(training_run, chosen, args.steps, bar)
                if args.trace is not None:
                    _trace(training_run, chosen, Path(args.trace) / f"{name}.json.gz")
                del training_run
            except Exception as error:  # of one of several systems: say so, and go on
                if len(names) == 1:
                    raise
                failed[name] = f"{type(error).__name__}: {error}"
            _free_memory()
        bar.close()
        if turn is not None:
            turn.release()
    text = f"{_heading(args, chosen)}\n\n{table(results)}"
    print_results(args, text, [asdict(result) for result in results], failed)
    if not args.json:
        late = {r.system: r.late_s for r in results if r.late_s > 0.05 * r.step_s}
        if late:
            times = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in late.items())
            print(f"\nthis machine was too busy: data moved later than modelled, at worst {times}")


def _check_device(args: argparse.Namespace) -> None:
    """Fill in the default of ``--device``; raise ``ValueError`` if there is no such device or no need of an option."""
    if args.simulate:
        defaults = argparse.ArgumentParser()
        add_arguments(defaults)
        for name in _NOT_SIMULATED:
            if getattr(args, name) != defaults.get_default(name):
                raise ValueError(f"--{name}: not with --simulate")
        if not args.host_factor > 0:
            raise ValueError(f"--host-factor: expected a positive number, found {args.host_factor}")
        args.device = args.device or "h100"
        if args.device not in launch.DEVICES:
            raise ValueError("--device: " + unknown("device to simulate", args.device, launch.DEVICES))
        return
    if args.device in launch.DEVICES:
        raise ValueError(f"--device: {args.device} needs --simulate")
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device not in ("cuda", "cpu"):
        raise ValueError("--device: " + unknown("device", args.device, ("cuda", "cpu", *launch.DEVICES)))
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: cuda, but torch sees no GPU here")


def _system_within(name: str, budget: int | None) -> System:
    """Return a system by name, within a memory budget if its plan is searched for."""
    return SYSTEMS[name] if budget is None or name not in SEARCHED_PLANS else simplefsdp_system(name, budget=budget)


def _measure(training_run: TrainingRun, chosen: Network, steps: int, bar: tqdm) -> list[TimingResult]:
    for _ in range(2):
        training_run.step(chosen)
        bar.update()
    bar.set_description(training_run.name)
    return measure([training_run], chosen, steps, bar.update)


def _trace(training_run: TrainingRun, chosen: Network, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile() as profile:
        training_run.step(chosen)
    profile.export_chrome_trace(str(path))


def _free_memory() -> None:
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def table(results: list[TimingResult]) -> str:
    """Return the results as a table in Markdown; times in milliseconds."""
    columns = ["system", "step", "tokens/s a device", "MFU", "collectives", "communication", "exposed", "L1", "L2"]
    rows = []
    for r in results:
        step = f"{1e3 * r.step_s:.1f} ± {500 * (max(r.steps_s) - min(r.steps_s)):.1f}"
        share = "-" if r.mfu is None else f"{r.mfu:.1%}"
        seconds = (r.communication_s, r.exposed_s, r.l1_s, r.l2_s)
        times = ["-" if s is None else f"{1e3 * s:.1f}" for s in seconds]
        ends = [f"{r.peak_bytes / 2**30:.3f}", f"{r.first_step_s:.1f}"]
        rows.append([r.system, step, f"{r.tokens_per_s:,.0f}", share, str(r.collectives), *times, *ends])
    return markdown_table([*columns, "peak, GiB", "first step, s"], rows)


def _heading(args: argparse.Namespace, chosen: Network) -> str:
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"cpu, {args.threads} threads"
    parallel = f", tensor parallel over {args.tp}" if args.tp > 1 else ""
    return (
        f"{args.model}, {args.batch} x {args.seq} tokens, as rank {args.rank} of {args.ranks} on {chosen.name}"
        f"{parallel} ({device}, torch {torch.__version__}); times in ms, medians of {args.steps}\n"
        "exposed: communication that the step waited for; L1: no schedule can be faster; L2: this one without losses"
    )


def _network(args: argparse.Namespace) -> Network:
    if args.network is not None:
        if args.alpha is not None or args.bandwidth is not None:
            raise ValueError("--network: says alpha and bandwidth itself, leave out --alpha and --bandwidth")
        return network(args.network)
    if args.simulate and args.alpha is None and args.bandwidth is None:
        smallest = smallest_network(args.ranks)
        if smallest is None:
            raise ValueError(f"--ranks: {args.ranks}, and no built-in network is as large; give one by --network")
        return network(smallest)
    if args.alpha is None or args.bandwidth is None:
        raise ValueError("--network: missing (or both --alpha and --bandwidth)")
    for name in ("alpha", "bandwidth"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name}: expected a positive number, found {getattr(args, name)}")
    return flat("as given", args.ranks, alpha_s=args.alpha, bandwidth_bytes_per_s=args.bandwidth)


def _profile(args: argparse.Namespace, chosen: Network, measured: bool) -> HardwareProfile | None:
    """Return the profile for plans: the given one, or where ``measured`` that of this device."""
    if args.profile is not None:
        return device_profile(args.profile, chosen)
    return calibrated_profile(torch.device(args.device), chosen) if measured else None


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _system(option: str, name: str, valid: tuple[str, ...]) -> str:
    if name not in valid:
        raise ValueError(f"{option}: " + unknown("system", name, valid))
    return name


def _workload(
    args: argparse.Namespace,
    kind: str,
    build: Callable[[], nn.Module],
    layout: RankLayout,
    profile: HardwareProfile | None,
    wire: WireFormat,
) -> Workload:
    mesh, tp = layout.meshes(kind)
    dtype = args.dtype or ("bf16" if kind == "cuda" else "fp32")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if dtype == "bf16" else MixedPrecisionPolicy()
    with torch.device("meta"):
        model = parallelized(build(), tp)
    vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
    if vocab_size is None:
        raise ValueError(f"--model {args.model}: its config has no vocab_size, so nothing is known about its tokens")
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    reshard = not args.keep_unsharded
    parallelism = Parallelism(mesh, policy, reshard, profile, args.embedding_lookup, wire, args.wire_auto)
    return Workload(lambda: parallelized(build(), tp), args.batch, args.seq, vocab_size, device, parallelism, args.tp)


def _check_that_it_fits(name: str, workload: Workload) -> None:
    needed, free = estimated_step_bytes(workload, SYSTEMS[name]), available_bytes(workload.device)
    if sum(needed.values()) > free:
        parts = ", ".join(f"{what} {nbytes / 2**30:.2f}" for what, nbytes in needed.items())
        raise ValueError(
            f"{name}: needs about {sum(needed.values()) / 2**30:.2f} GiB ({parts}), {workload.device} has "
            f"{free / 2**30:.2f} GiB free; try more --ranks, fewer --layers, a shorter --seq or "
            "--activation-checkpointing block, or --anyway"
        )
