"""Histories of two ranks: whether they prove that the ranks differ."""

import hypothesis.strategies as st
from hypothesis import given

from inductor_passes.runtime import history
from inductor_passes.runtime.history import History, HistoryEnd, first_conflict


def ended(rank: int, *issued: str) -> HistoryEnd:
    found = History()
    for what in issued:
        found.add(what)
    return found.end(rank)


def test_a_difference_at_one_place_is_found_on_both_sides() -> None:
    one, other = ended(0, "a", "b", "c"), ended(1, "a", "d")
    assert first_conflict(one, other) == (2, "b", "d")
    assert first_conflict(other, one) == (2, "d", "b")


def test_a_shorter_history_proves_nothing() -> None:
    assert first_conflict(ended(0, "a"), ended(1, "a", "b")) is None
    assert first_conflict(ended(0), ended(1, "a")) is None


@given(st.lists(st.sampled_from("ab"), max_size=30), st.lists(st.sampled_from("ab"), max_size=30))
def test_only_what_both_remember_is_compared(one: list[str], other: list[str]) -> None:
    begin = max(0, len(one) - 8, len(other) - 8)
    differing = [i for i, (a, b) in enumerate(zip(one, other, strict=False), 1) if a != b and i > begin]
    ends = [ended(rank, *issued) for rank, issued in enumerate((one, other))]
    short = [end._replace(recent=end.recent[-8:]) for end in ends]
    found = first_conflict(*short)
    assert (found[0] if found else None) == (differing[0] if differing else None)


def test_a_long_history_remembers_its_end() -> None:
    end = ended(0, *map(str, range(1000)))
    assert end.total == 1000
    assert end.recent == tuple(map(str, range(1000 - history._RECENT, 1000)))
