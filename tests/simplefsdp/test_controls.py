"""What a training loop may change between steps, under FSDP2's names."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from simplefsdp import simple_fsdp
from simplefsdp.controls import Controls
from tests import graphs, zoo
from tests.compare import vectors
from tests.models import batch, tiny_llama
from tests.ranks import Ranks

one_of_four = pytest.mark.usefixtures("one_of_four")


def test_unsharded_weights_are_whole_until_resharded_or_used(two_ranks: Ranks) -> None:
    two_ranks.run(_unshard)


def _unshard() -> None:
    plain, model = zoo.build("tied"), simple_fsdp(zoo.build("tied"))
    model.unshard()
    with graphs.recorded_gathers() as gathered:
        torch.testing.assert_close(model[0].weight, plain[0].weight)
        assert isinstance(next(model.parameters()), DTensor)
        out = model(vectors(0, 0))
        assert gathered == [], "the first call uses what is whole already"
    assert isinstance(model[0].weight, DTensor), "and its end is the end of it"
    torch.testing.assert_close(out, plain(vectors(0, 0)))
    out.square().mean().backward()
    assert model[0].weight.grad is not None
    model[1].unshard()
    assert not isinstance(model[1].up.weight, DTensor)
    assert isinstance(model[0].weight, DTensor), "only below the module"
    model[1].reshard()
    assert isinstance(model[1].up.weight, DTensor)


@one_of_four
def test_resharding_may_be_changed_later() -> None:
    model = simple_fsdp(tiny_llama())
    gathers = []
    for reshard in (True, False, True):
        model.set_reshard_after_forward(reshard)
        captured = graphs.capture(model, *batch(0, dist.get_rank()), plan="block")
        gathers.append(len(graphs.nodes(captured.backward, graphs.ALL_GATHER)))
    model.layers[1].set_reshard_after_forward(False)
    captured = graphs.capture(model, *batch(0, 0), plan="block")
    assert [*gathers, len(graphs.nodes(captured.backward, graphs.ALL_GATHER))] == [4, 0, 4, 3]


@one_of_four
def test_bad_settings_are_named() -> None:
    model = simple_fsdp(nn.Linear(6, 8))
    with pytest.raises(ValueError, match="factor: expected a positive number, found 0"):
        model.set_gradient_divide_factor(0)
    with pytest.raises(TypeError, match="factor: expected a number, found True"):
        model.set_gradient_divide_factor(True)
    with pytest.raises(TypeError, match="reshard_after_forward: expected True or False, found 2"):
        model.set_reshard_after_forward(2)


@one_of_four
def test_a_models_own_methods_are_not_covered() -> None:
    class Own(nn.Linear):
        def reshard(self) -> str:
            return "mine"

    assert simple_fsdp(Own(6, 8)).reshard() == "mine"


@one_of_four
def test_names_are_those_of_fsdp2() -> None:
    names = {name for name in vars(Controls) if not name.startswith("_")}
    assert names <= set(dir(FSDPModule))
    assert isinstance(simple_fsdp(nn.Linear(6, 8)), Controls)


def test_other_methods_than_forward_may_read_weights(two_ranks: Ranks) -> None:
    two_ranks.run(_other_methods)


def _other_methods() -> None:
    plain, model = zoo.build("other methods")[1], simple_fsdp(zoo.build("other methods")[1])
    x = vectors(0, 0)
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        model.encode(x)
    model.unshard()
    torch.testing.assert_close(model.encode(x), plain.encode(x))
    model.reshard()
    compiled = torch.compile(model.encode, backend="simplefsdp", options={"plan": "none", "lower_with": "aot_eager"})
    result: list[Tensor] = [compiled(x), plain.encode(x)]
    torch.testing.assert_close(*result)
