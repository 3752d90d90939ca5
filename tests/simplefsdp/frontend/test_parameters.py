"""Parameters of every kind, and modules that hold them in unusual ways: five steps as in a single process."""

import pytest

from tests import zoo
from tests.compare import same_steps, vectors
from tests.ranks import Ranks

LOWERINGS = ["eager", "aot_eager"]


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("kind", zoo.PARAMETERS)
def test_a_parameter_of_each_kind_trains_as_in_a_single_process(two_ranks: Ranks, kind: str, lowering: str) -> None:
    two_ranks.run(_trains, kind, lowering)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("kind", zoo.MODULES)
def test_a_module_of_each_kind_trains_as_in_a_single_process(two_ranks: Ranks, kind: str, lowering: str) -> None:
    two_ranks.run(_trains, kind, lowering)


def _trains(kind: str, lowering: str) -> None:
    same_steps(lambda: zoo.build(kind), lowering, fullgraph=kind not in zoo.NOT_IN_ONE_GRAPH)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_parameter_used_in_some_steps_only_has_no_gradient_in_the_others(two_ranks: Ranks, lowering: str) -> None:
    two_ranks.run(_sometimes, lowering)


def _sometimes(lowering: str) -> None:
    same_steps(zoo.Sometimes, lowering, inputs=lambda step, rank: vectors(step, rank, rows=2 + step % 2))
