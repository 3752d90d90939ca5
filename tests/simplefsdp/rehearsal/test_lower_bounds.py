import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simplefsdp.hardware.profile import flat
from simplefsdp.rehearsal.group import Collective
from simplefsdp.rehearsal.lower_bounds import Event, Phase, lower_bound_s, phase_of, simulate

NETWORK = flat("test", 2, alpha_s=1.0, bandwidth_bytes_per_s=0.5)  # n bytes over two ranks: 1 + n seconds
RANKS = (0, 1)


def gather(nbytes: int, issued: float, waited: float, group: str = "g") -> Event:
    return Event("all_gather", group, RANKS, nbytes, issued, waited)


def reduction(nbytes: int, issued: float, waited: float, group: str = "g") -> Event:
    return Event("reduce_scatter", group, RANKS, nbytes, issued, waited)


@pytest.mark.parametrize(
    ("parts", "step", "exposed"),
    [
        ([Phase(10, ())], 10, 0),
        ([Phase(10, (gather(2, 0, 0),))], 13, 3),
        ([Phase(10, (gather(2, 0, 4),))], 10, 0),
        ([Phase(10, (gather(5, 0, 4),))], 12, 2),
        # One channel: the first ends at 3, a second after it is needed; the second at 9, four after it is, at 5.
        ([Phase(10, (gather(2, 0, 2), gather(5, 0, 4)))], 15, 5),
        # The second is issued at 4, needed at 5 and there at 10.
        ([Phase(10, (gather(2, 0, 2), gather(5, 3, 4)))], 16, 6),
        ([Phase(10, (gather(2, 0, 2, "a"), gather(5, 0, 4, "b")))], 12, 2),  # two channels, in parallel
        ([Phase(10, (reduction(3, 8, 10),)), Phase(5, ())], 17, 2),
    ],
)
def test_schedules_take_what_a_hand_computes(parts: list[Phase], step: float, exposed: float) -> None:
    assert simulate(parts, NETWORK) == (step, exposed)


@pytest.mark.parametrize(
    ("parts", "seconds"),
    [
        ([Phase(10, ())], 10),
        ([Phase(10, (gather(2, 0, 0), reduction(3, 10, 10)))], 3 + 10 + 4),  # first gather, compute, last reduction
        ([Phase(10, (gather(2, 0, 0), gather(8, 8, 8)))], 1 + 10 + 2),  # all gathers with one alpha, compute after them
        ([Phase(10, (reduction(8, 2, 10), reduction(2, 10, 10)))], 2 + 1 + 10),  # compute before, all reductions
        ([Phase(3, (gather(9, 0, 0), gather(9, 1, 1), reduction(8, 2, 3)))], 1 + 18 + 1 + 1 + 8),
        ([Phase(1, (gather(9, 0, 1), reduction(8, 0, 1)))], 10 + 9),  # all that one channel has to carry
        ([Phase(1, (gather(9, 0, 1, "a"), reduction(8, 0, 1, "b")))], 10),
        ([Phase(10, (gather(2, 2, 5),)), Phase(10, (gather(2, 0, 0),))], 10 + 13),  # the first can be hidden
    ],
)
def test_bounds_are_what_a_hand_computes(parts: list[Phase], seconds: float) -> None:
    assert lower_bound_s(parts, NETWORK) == pytest.approx(seconds)


@st.composite
def _parts(draw: st.DrawFn) -> Phase:
    """Compute of 100 seconds and whatever collectives, each awaited after it is issued."""
    events = []
    for _ in range(draw(st.integers(0, 12))):
        issued = draw(st.integers(0, 100))
        waited = draw(st.integers(issued, 100))
        kind = draw(st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]))
        group = draw(st.sampled_from(["a", "b"]))
        events.append(Event(kind, group, RANKS, draw(st.integers(0, 30)), issued, waited))
    return Phase(100, tuple(events))


@given(st.lists(_parts(), max_size=3))
@settings(max_examples=300, deadline=None)
def test_no_schedule_is_faster_than_its_bound(parts: list[Phase]) -> None:
    step, exposed = simulate(parts, NETWORK)
    assert step >= lower_bound_s(parts, NETWORK) - 1e-9
    assert step == pytest.approx(exposed + sum(compute for compute, _ in parts))


def collective(kind: str, issued: float, waited: float | None, blocked: float) -> Collective:
    return Collective(kind, "g", RANKS, 4, (), issued, issued, issued + 1, issued + 1, waited, blocked)


def test_a_part_counts_compute_without_the_time_that_the_step_was_blocked() -> None:
    record = [
        collective("all_gather", 100, 101, 0.5),
        collective("all_gather", 102, 104, 2),
        collective("reduce_scatter", 107, None, 0),
        collective("all_gather", 111, 112, 1),
    ]
    assert phase_of(100, 110, record) == Phase(
        7.5,
        (
            Event("all_gather", "g", RANKS, 4, 0, 1),
            Event("all_gather", "g", RANKS, 4, 1.5, 3.5),
            Event("reduce_scatter", "g", RANKS, 4, 4.5, 7.5),
        ),
    )
    assert phase_of(110, 115, record) == Phase(4, (Event("all_gather", "g", RANKS, 4, 1, 2),))
