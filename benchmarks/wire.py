"""Steps in each wire format, on one rehearsed rank: the same model, planner and network.

    python -m benchmarks.wire                              # five scenarios, half an hour
    python -m benchmarks.wire --scenarios bandwidth --rounds 3
    python -m benchmarks.wire --gbit 0.25                  # two gloo ranks over a link of that rate; needs root and tc
    python -m benchmarks.wire --errors                     # of real weights and gradients, a minute

Scenarios are those of ``benchmarks.overlap``, with their model in fp32; ``narrow`` is ``bandwidth`` with half of the
bandwidth, so that communication takes about twice as long as compute. Every system plans with ``plan="auto"``. Systems
step in turn; printed are medians, and the median over rounds of the first system's step divided by a system's. Bytes
are those of the whole tensors that are gathered, reduced or exchanged in a step. In the system ``auto`` the planner
chooses what travels in int8. Writes Markdown and JSON to benchmarks/results/.

Errors are those of the example's Llama after some steps of training on Python's standard library: the norm of the
difference over the norm of what was sent, over all parameters; gradients are the mean of 8 ranks' batches. The second
table is of their mean over further steps, where two replicas of four ranks send each other sums in a format.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.overlap import RESULTS, SCENARIOS, Scenario, prepared, restored_config
from benchmarks.rate_limited import link, permitted, run
from benchmarks.real_link import small_llama
from examples import data
from inductor_passes.ops.encode import DECODE_SUMS, DECODE_WEIGHTS, ENCODE_GRADIENTS, ENCODE_SHARDS, ENCODE_SUMS
from inductor_passes.ops.error_feedback import keep_errors
from inductor_passes.ops.wire_formats import GATHER_FORMATS, REDUCE_FORMATS
from simplefsdp.frontend.wire_format import WireFormat
from simplefsdp.hardware.profile import flat, network
from simplefsdp.models import llama
from simplefsdp.rehearsal.group import World
from simplefsdp.rehearsal.systems import simplefsdp_system
from simplefsdp.rehearsal.timing import TrainingRun, fresh_compile_cache, measure

FORMATS = {
    "none": None,
    "bf16, bf16-fp32sum": WireFormat("bf16", "bf16-fp32sum"),
    "auto": WireFormat("int8", "int8"),
    "fp8, int8": WireFormat("fp8", "int8"),
    "int8, int8": WireFormat("int8", "int8"),
    "int8, int8-hadamard": WireFormat("int8", "int8-hadamard"),
    "int8, int4": WireFormat("int8", "int4"),
    "int8, int4-hadamard": WireFormat("int8", "int4-hadamard"),
}
"""Formats of weights and gradients, by a name for both."""
BETWEEN_NODES = {"int8, int8, int4 between nodes": WireFormat("int8", "int8", "int4")}
FURTHER = {
    "nodes": {"int8, int8 in one step": WireFormat("int8", "int8"), **BETWEEN_NODES},
    "replicas": {"bf16, bf16-fp32sum, int4 between nodes": WireFormat("bf16", "bf16-fp32sum", "int4"), **BETWEEN_NODES},
}
"""Further formats of scenarios with a slow network between nodes."""


def _narrow() -> Scenario:
    whole = network("cpu-bandwidth")
    (link,) = {*whole.inside.values(), *whole.between.values()}
    narrow = flat(
        "cpu-bandwidth-halved",
        whole.ranks,
        alpha_s=link.alpha_s,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / 2,
        source="half of cpu-bandwidth",
    )
    return replace(SCENARIOS["bandwidth"], what="communication takes about twice as long as compute", network=narrow)


def _slow_between_nodes(slower: int, hybrid: bool, what: str) -> Scenario:
    scenario = SCENARIOS["hybrid"]
    between = {
        kind: replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / slower)
        for kind, link in scenario.network.between.items()
    }
    name, source = f"cpu-hybrid-slow-{slower}", f"cpu-hybrid, 1/{slower} of the bandwidth between nodes"
    slow = replace(scenario.network, name=name, source=source, between=between)
    return replace(scenario, what=f"{what} takes longer than compute", network=slow, hybrid=hybrid)


def _nodes() -> Scenario:
    what = "fully sharded over 4 nodes of 4 ranks, communication between nodes"
    return _slow_between_nodes(8, hybrid=False, what=what)


def _replicas() -> Scenario:
    what = "sharded inside of 4 nodes of 4 ranks, the all-reduce between nodes"
    return _slow_between_nodes(32, hybrid=True, what=what)


def scenarios() -> Mapping[str, Scenario]:
    bandwidth, hybrid = SCENARIOS["bandwidth"], SCENARIOS["hybrid"]
    return {
        "bandwidth": bandwidth,
        "narrow": _narrow(),
        "hybrid": hybrid,
        "nodes": _nodes(),
        "replicas": _replicas(),
    }


def rehearse(name: str, scenario: Scenario, rounds: int) -> dict[str, Any]:
    """Return the results of one scenario, measured in this process."""
    chosen = scenario.network
    with prepared(scenario) as (world, workload, predictions):
        runs, predicted, sent = [], {}, {}
        for what, wire in {**FORMATS, **FURTHER.get(name, {})}.items():
            predictions.clear()
            with fresh_compile_cache(), restored_config():
                on_node = scenario.ranks if what.endswith("in one step") else None
                system = simplefsdp_system("auto", wire=wire, narrows=what == "auto", ranks_per_node=on_node)
                one = TrainingRun(what, system, workload, world)
                for _ in range(2):
                    step = one.step(chosen)
            runs.append(one)
            predicted[what] = predictions[-1].step_s, predictions[-1].peak_bytes
            sent[what] = sum(collective.nbytes for collective in step.collectives)
            print(f"{name}: {what}: first step {one.first_step_s:.1f} s", file=sys.stderr)
        results = measure(runs, chosen, rounds, lambda: None)
    return {
        "scenario": {**asdict(scenario), "network": chosen.name},
        "rounds": rounds,
        "results": [asdict(result) for result in results],
        "predicted": predicted,
        "sent_bytes": sent,
    }


def table(found: Mapping[str, Any]) -> str:
    """Return the results of one scenario in Markdown."""
    lines = [
        "| gather, reduce | faster than none | step, ms | exposed, ms | communication, ms | compute, ms | sent, MiB | "
        "peak, MiB | predicted step | predicted peak |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    first = found["results"][0]
    for result in found["results"]:
        step_s, peak = found["predicted"][result["system"]]
        faster = statistics.median(a / b for a, b in zip(first["steps_s"], result["steps_s"], strict=True))
        cells = [
            f"{faster:.2f}x",
            *(f"{1e3 * result[field]:.1f}" for field in ("step_s", "exposed_s", "communication_s", "compute_s")),
            f"{found['sent_bytes'][result['system']] / 2**20:.1f}",
            f"{result['peak_bytes'] / 2**20:.1f}",
            f"{step_s / result['step_s']:.2f}",
            f"{peak / result['peak_bytes']:.2f}",
        ]
        lines.append(f"| {result['system']} | {' | '.join(cells)} |")
    return "\n".join(lines)


class _Training:
    """The example's Llama, and the gradients of each of some ranks while it is trained."""

    def __init__(self, ranks: int):
        torch.manual_seed(0)
        self._ranks = ranks
        self._model = llama.build("debug", vocab_size=256)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
        self._text, _ = data.load(None, 256)
        self._steps = 0

    @property
    def weights(self) -> list[torch.Tensor]:
        return [param.detach() for param in self._model.parameters()]

    def _gradients(self, rank: int) -> list[torch.Tensor]:
        self._model.zero_grad()
        self._model(*data.random_crops(self._text, 8, 256, 0, self._steps, rank)).backward()
        return [param.grad.clone() for param in self._model.parameters() if param.grad is not None]

    def step(self) -> None:
        """Train with the gradients of rank 0."""
        self._gradients(0)
        self._optimizer.step()
        self._steps += 1

    def gradients(self) -> list[tuple[torch.Tensor, ...]]:
        """Return each parameter's gradients of all ranks."""
        return list(zip(*(self._gradients(rank) for rank in range(self._ranks)), strict=True))


def errors(steps: int = 50, ranks: int = 8) -> str:
    """Return, in Markdown, the relative error of weights and of reduced gradients in each format."""
    training = _Training(ranks)
    for _ in range(steps):
        training.step()
    weights, gradients = training.weights, training.gradients()
    exact = [torch.stack(of_ranks).double().mean(0) for of_ranks in gradients]
    lines = ["| format | weights | gradients |", "|---|---|---|"]
    for name in {**GATHER_FORMATS, **REDUCE_FORMATS}:
        gathered, reduced = "", ""
        if name in GATHER_FORMATS:
            found = []
            for weight in weights:
                encoded = ENCODE_SHARDS([weight], [weight.numel()], name)
                found += DECODE_WEIGHTS(encoded, 1, [weight.numel()], name, weight.dtype)
            gathered = f"{_relative(found, weights):.1e}"
        if name in REDUCE_FORMATS:
            found = []
            for of_rank in gradients:
                sent = [ENCODE_GRADIENTS([gradient], 1, name, torch.float32) for gradient in of_rank]
                mean = DECODE_SUMS(torch.cat(sent), ranks, [of_rank[0].numel()], name, torch.float32, float(ranks))
                found.append(mean.view(of_rank[0].shape))
            reduced = f"{_relative(found, exact):.1e}"
        lines.append(f"| `{name}` | {gathered} | {reduced} |")
    return "\n".join([*lines, "", *_mean_errors(training)])


def _mean_errors(training: _Training, steps: int = 20, replicas: int = 2) -> list[str]:
    """Return the lines of a table: the error of the mean gradient of some steps, without error feedback and with it."""
    lines = ["| among replicas | mean gradient | fed back |", "|---|---|---|"]
    weights = training.weights
    names = ("bf16-fp32sum", "fp8", "int8", "int4", "int4-hadamard", "int4-stochastic")
    shards = {name: [[torch.empty_like(weight) for _ in range(replicas)] for weight in weights] for name in names}
    errors = [(shard, torch.zeros(shard.numel())) for of in shards.values() for each in of for shard in each]
    for shard, error in errors:
        keep_errors(shard, error)
    exact = [torch.zeros(weight.shape, dtype=torch.float64) for weight in weights]
    means = {name: [[torch.zeros(weight.shape) for weight in weights] for _ in range(2)] for name in names}
    for _ in range(steps):
        training.step()
        for i, gradients in enumerate(training.gradients()):
            exact[i] += torch.stack(gradients).double().mean(0)
            for name, (rounded, fed_back) in means.items():
                rounded[i] += _among_replicas(gradients, name, [None] * replicas)
                fed_back[i] += _among_replicas(gradients, name, [[shard] for shard in shards[name][i]])
    for name, of_format in means.items():
        lines.append(f"| `{name}` | " + " | ".join(f"{_relative(found, exact):.1e}" for found in of_format) + " |")
    return lines


def _among_replicas(
    gradients: Sequence[torch.Tensor], name: str, fed_back: Sequence[list[torch.Tensor] | None]
) -> torch.Tensor:
    """Return the mean of all ranks' gradients, which replicas sent each other in a format.

    Args:
        fed_back: the shard of each replica whose errors are fed back; ``None``: without error feedback.
    """
    numels, ranks = [gradients[0].numel()], len(gradients) // len(fed_back)
    first = "bf16-fp32sum"
    sent = []
    for i, shard in enumerate(fed_back):
        received = [ENCODE_GRADIENTS([each], 1, first, torch.float32) for each in gradients[i * ranks :][:ranks]]
        sent.append(ENCODE_SUMS(torch.cat(received), ranks, 1, numels, first, name, shard))
    mean = DECODE_SUMS(torch.cat(sent), len(fed_back), numels, name, torch.float32, float(len(gradients)))
    return mean.view(gradients[0].shape)


def _relative(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> float:
    """Return the norm of the difference over the norm of ``exact``, over all tensors."""
    whole, sent = (torch.cat([each.flatten().double() for each in tensors]) for tensors in (exact, found))
    return float((sent - whole).norm() / whole.norm())


def train(what: str, steps: int) -> list[float]:
    """Seconds of each step of this rank of a real process group."""
    torch.set_num_threads(1)
    one = TrainingRun(what, simplefsdp_system("block", wire=FORMATS[what]), small_llama(), World(None))
    for _ in range(3):
        one.step(None)
    dist.barrier()
    return [one.step(None).seconds for _ in range(steps)]


def over_a_link(gbit: float, steps: int) -> str:
    """Return, in Markdown, what two gloo ranks take for a step over a link of this rate, by format."""
    lines = ["| gather, reduce | step, ms | faster than none |", "|---|---|---|"]
    none = 0.0
    with link(gbit * 1e9) as namespaces:
        for what in (what for what in FORMATS if what != "auto"):
            seconds = statistics.median(run(namespaces, train, what, steps, timeout_s=300, threads=1)[0])
            none = none or seconds
            lines.append(f"| {what} | {1e3 * seconds:.1f} | {none / seconds:.2f}x |")
            print(lines[-1], file=sys.stderr)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.wire", description=__doc__.splitlines()[0])
    parser.add_argument("--scenarios", default=",".join(scenarios()), help="names, separated by commas")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gbit", type=float, help="rate of a real link, per second and way, instead of scenarios")
    parser.add_argument("--errors", action="store_true", help="print the errors of formats, instead of scenarios")
    args = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    if args.errors:
        print(errors())
        return
    if args.gbit is not None:
        reason = permitted()
        print(f"not measured: {reason}" if reason else over_a_link(args.gbit, args.rounds))
        return
    unknown = set(args.scenarios.split(",")) - set(scenarios())
    if unknown:
        parser.error(f"--scenarios: unknown {', '.join(sorted(unknown))}; there are {', '.join(scenarios())}")
    measured = {}
    parts = [f"# Wire formats\n\n{machine}. `python -m benchmarks.wire`; what the columns mean is in its docstring."]
    for name in args.scenarios.split(","):
        scenario = scenarios()[name]
        measured[name] = rehearse(name, scenario, args.rounds)
        parts.append(
            f"## {name}\n\n{scenario.what}; one of {scenario.ranks} ranks on `{scenario.network.name}`, Llama "
            f"{dict(scenario.model)}, 1 x {scenario.seq} tokens, fp32, {args.rounds} rounds\n\n{table(measured[name])}"
        )
        print(parts[-1], flush=True)
    (RESULTS / "wire.json").write_text(json.dumps({"machine": machine, "measured": measured}, indent=1) + "\n")
    (RESULTS / "wire.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
