"""Random graphs, as far as their schedule is concerned."""

import hypothesis.strategies as st

from inductor_passes.scheduling.cost_graph import CollectiveKind, CostGraph, Gather, Reduction

_SECONDS = st.sampled_from([0.2, 1.0, 2.0, 5.0])


@st.composite
def cost_graphs(draw: st.DrawFn, gathers: int, reductions: int, channels: int = 1) -> CostGraph:
    """With at most so many gathers and reductions; small whole numbers, so that ties and tight budgets are common.

    Some weights are read by no step, some gradients there before all steps. With several channels, some reductions are
    followed by an all-reduce.
    """
    cost = st.tuples(
        st.sampled_from([0.0, 0.2, 1.0]),
        st.sampled_from([0.1, 1.0, 3.0]),
        st.sampled_from([0.0, 0.05]),
        st.sampled_from([0.0, 0.1, 0.5]),
        st.sampled_from([0.0, 0.5]),
        st.sampled_from([0.0, 0.0, 0.2]),
    )
    kinds = [CollectiveKind(str(channel), *draw(cost)) for channel in range(channels)]
    reducing = [kind._replace(name="r") for kind in kinds]
    if channels > 1:
        replicas = CollectiveKind("replicas", *draw(cost))
        reducing.append(kinds[0]._replace(name="r", all_reduce_after=replicas))
    kind = st.sampled_from(kinds)
    count = draw(st.integers(0, gathers))
    steps = draw(st.integers(max(1, count), max(1, count) + 2))
    uses = sorted(draw(st.lists(st.integers(0, steps), min_size=count, max_size=count)))
    ready_slots = sorted(draw(st.lists(st.integers(0, steps), max_size=reductions)))
    size = st.integers(1, 4)
    members = [(draw(kind), draw(size), first_use, first_use + draw(st.integers(0, 1))) for first_use in uses]
    return CostGraph(
        tuple(draw(_SECONDS) for _ in range(steps)),
        tuple(draw(st.integers(0, 4)) for _ in range(steps)),
        tuple(draw(st.integers(0, 2)) for _ in range(steps + 1)),
        tuple(
            Gather(
                f"g{i}", kind, nbytes, first_use, min(steps, last), prepared, held=draw(st.sampled_from([0, prepared]))
            )
            for i, (kind, nbytes, first_use, last) in enumerate(members)
            for prepared in [draw(st.sampled_from([0, int(nbytes * kind.shard)]))]
        ),
        tuple(
            Reduction(f"r{i}", draw(st.sampled_from(reducing)), draw(size), slot, draw(st.integers(0, 1)))
            for i, slot in enumerate(ready_slots)
        ),
        draw(st.sampled_from([(), (0.2,) * steps, (0.5, *(0.0,) * (steps - 1))])),
    )
