"""A resharded parameter is gathered once in forward and once in backward, and never saved whole."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from simplefsdp import simple_fsdp
from tests.graphs import ALL_GATHER, PARTITIONERS, REDUCE_SCATTER, capture, fqns, whole_weights_among_outputs
from tests.models import batch, tiny_llama

pytestmark = pytest.mark.usefixtures("one_of_four")

CHECKPOINTING = ["none", "block", "selective"]


def _counts(graph, target):
    return Counter(fqn for carried in fqns(graph, target) for fqn in carried)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_resharded_parameters_are_gathered_once_a_direction_and_not_saved(checkpointing, partitioner, tied):
    model = simple_fsdp(tiny_llama(layers=2, activation_checkpointing=checkpointing, tie_embeddings=tied))
    captured = capture(model, *batch(0, 0), partitioner=partitioner)
    names = [name for name, _ in model.named_parameters()]
    assert _counts(captured.forward, ALL_GATHER) == dict.fromkeys(names, 1)
    # An embedding's backward does not need its weight.
    in_backward = [name for name in names if name != "tok_embeddings.weight" or tied]
    assert _counts(captured.backward, ALL_GATHER) == dict.fromkeys(in_backward, 1)
    assert _counts(captured.backward, REDUCE_SCATTER) == dict.fromkeys(names, 1)
    assert whole_weights_among_outputs(captured.forward) == []


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_kept_parameters_are_saved_and_not_gathered_again(checkpointing, partitioner):
    model = simple_fsdp(tiny_llama(layers=2, activation_checkpointing=checkpointing), reshard_after_forward=False)
    captured = capture(model, *batch(0, 0), partitioner=partitioner)
    names = [name for name, _ in model.named_parameters()]
    assert _counts(captured.forward, ALL_GATHER) == dict.fromkeys(names, 1)
    assert _counts(captured.backward, ALL_GATHER) == {}
    assert len(whole_weights_among_outputs(captured.forward)) == len(names) - 1  # all but the embedding


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_the_setting_is_taken_per_parameter(partitioner):
    choice = {"*": False, "layers.*": True, "layers.1.*": False}
    captured = capture(
        simple_fsdp(tiny_llama(layers=2), reshard_after_forward=choice), *batch(0, 0), partitioner=partitioner
    )
    gathered_again = {name.split(".")[1] for name in _counts(captured.backward, ALL_GATHER)}
    assert gathered_again == {"0"}


class Shared(nn.Module):
    """One weight in two checkpointed regions."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6, bias=False)

    def forward(self, x):
        x = checkpoint(self.linear, x.relu(), use_reentrant=False)
        return checkpoint(self.linear, x.relu(), use_reentrant=False)


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_a_weight_shared_by_two_checkpointed_regions_is_not_saved(partitioner):
    captured = capture(simple_fsdp(Shared()), torch.ones(2, 6), partitioner=partitioner)
    assert fqns(captured.forward, ALL_GATHER) == fqns(captured.backward, ALL_GATHER) == [("linear.weight",)]
    assert whole_weights_among_outputs(captured.forward) == []


def test_switching_the_setting_in_one_process_takes_effect():
    counts = []
    for reshard in (True, False, True):
        captured = capture(simple_fsdp(tiny_llama(layers=2), reshard_after_forward=reshard), *batch(0, 0))
        counts.append(len(fqns(captured.backward, ALL_GATHER)))
    assert counts == [counts[0], 0, counts[0]]
    assert counts[0] > 0
