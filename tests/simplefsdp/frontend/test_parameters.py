"""Parameters of every kind, and modules that hold them in unusual ways: five steps as in a single process."""

import pytest
from torch import Tensor, nn

from simplefsdp import simple_fsdp
from tests import zoo
from tests.compare import lowered, same_steps, vectors
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


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), self.unused(x)


@pytest.mark.usefixtures("one_of_four")
@pytest.mark.compile
def test_an_output_that_is_not_used_gives_no_gradient_in_eager_mode_and_zeros_in_compiled_code() -> None:
    for lowering in LOWERINGS:
        model = simple_fsdp(_Two())
        lowered(model, lowering)(vectors(0, 0))[0].sum().backward()
        gradient = model.unused.weight.grad
        assert gradient is None if lowering == "eager" else not gradient.to_local().any()


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_parameter_used_in_some_steps_only_has_no_gradient_in_the_others(two_ranks: Ranks, lowering: str) -> None:
    two_ranks.run(_sometimes, lowering)


def _sometimes(lowering: str) -> None:
    same_steps(zoo.Sometimes, lowering, inputs=lambda step, rank: vectors(step, rank, rows=2 + step % 2))
