"""How long the planner takes: backward graphs of transformers of more and more layers, nine weights each.

    python -m benchmarks.planning              # up to 126 layers, two minutes

For each: seconds to search a plan without a memory budget, and under half of what that one needs beyond the least, by
how much the predicted time is above the lower bound, and seconds to decide, under that budget, which weights stay
unsharded from a forward graph to this one.
"""

import argparse
import time

from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction
from inductor_passes.scheduling.keep_unsharded import choose_unsharded
from inductor_passes.scheduling.replay import lower_bound
from inductor_passes.scheduling.search import greedy_schedule, least_memory_schedule, search_schedule
from inductor_passes.scheduling.search_step import search_step

_WEIGHTS = (8, 1, 1, 8, 28, 28, 28, 1e-3, 1e-3)
"""Million elements of a block's, as in an 8B Llama divided by two."""
_KIND = CollectiveKind("shard", alpha_s=1e-4, s_per_byte=1 / 45e9, issue_s=5e-6, copy_s_per_byte=1e-12, shard=1 / 64)


def transformer(layers: int) -> CostGraph:
    """bf16, a second of compute for 200 layers, one of 64 ranks."""
    sizes = [int(2e6 * million) for million in _WEIGHTS] * layers
    count = len(sizes)
    second = 200 * sum(_WEIGHTS) * 2e6
    return CostGraph(
        tuple(size / second for size in sizes),
        (10**9,) * count,
        (10**9,) * (count + 1),
        tuple(Gather(f"w{i}", _KIND, size, i, i) for i, size in enumerate(sizes)),
        tuple(Reduction(f"w{i}", _KIND._replace(name="r"), size, i + 1, size // 64) for i, size in enumerate(sizes)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.planning", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="4,16,32,64,126")
    args = parser.parse_args()
    columns = "layers", "collectives", "search, s", "a 1,000 collectives", "with a budget, s", "above the bound"
    print(f"| {' | '.join((*columns, 'above it: greedy', 'kept, s'))} |\n|{'---|' * 8}")
    for layers in map(int, args.layers.split(",")):
        graph = transformer(layers)
        began = time.perf_counter()
        proposal = greedy_schedule(graph)
        found = search_step([graph], proposals=[[proposal.schedule]], tolerance=0.005)
        searched = time.perf_counter() - began
        assert found is not None
        (free,) = found
        least = least_memory_schedule(graph).peak
        budget = least + (free.peak - least) // 2
        began = time.perf_counter()
        assert search_schedule(graph, budget, [proposal.schedule]) is not None
        tight = time.perf_counter() - began
        forward = graph._replace(reductions=())
        began = time.perf_counter()
        choose_unsharded(forward, graph, [gather.fqn for gather in graph.gathers], budget)
        unsharded_s = time.perf_counter() - began
        count = len(graph.gathers) + len(graph.reductions)
        above, greedys = (100 * (one.predicted_s / lower_bound(graph) - 1) for one in (free, proposal))
        print(
            f"| {layers} | {count:,} | {searched:.2f} | {1000 * searched / count:.2f} | {tight:.2f} | {above:.1f} % "
            f"| {greedys:.1f} % | {unsharded_s:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
