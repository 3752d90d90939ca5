"""Parameters of every kind, and modules that hold them in unusual ways: five steps as in a single process."""

import pytest
import torch
from torch import Tensor, nn

from simplefsdp import simple_fsdp
from tests import graphs, zoo
from tests.compare import lowered, same_steps, vectors
from tests.inductor_passes.test_cast_before_gather import travels
from tests.ranks import Ranks, fake_group

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


@pytest.mark.compile
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["bool", "float8"])
def test_values_of_one_byte_travel_as_bytes_on_every_rank(kind: str, rank: int) -> None:
    with fake_group(2, rank):
        captured = graphs.capture(simple_fsdp(zoo.build(kind)), vectors(0, 0))
    assert travels(captured.forward) == {
        "0.weight": torch.float32,
        "0.bias": torch.float32,
        "1.weight": torch.uint8,
        "2.weight": torch.float32,
        "2.bias": torch.float32,
    }


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
