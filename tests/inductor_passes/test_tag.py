"""A resharded parameter is gathered once in forward and once in backward, and never saved whole."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from simplefsdp import simple_fsdp
from tests.graphs import ALL_GATHER, PARTITIONERS, REDUCE_SCATTER, capture, fqns, whole_weights_among_outputs
from tests.models import batch, tiny_llama, whole_weights_saved

pytestmark = [pytest.mark.usefixtures("one_of_four"), pytest.mark.compile]

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


@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_memory_budget_of_the_compiler_has_no_weight_saved_or_gathered_twice(reshard):
    saved = []
    for budget in (1.0, 0.5, 0.1):
        model = simple_fsdp(tiny_llama(layers=2), reshard_after_forward=reshard)
        with torch._functorch.config.patch(activation_memory_budget=budget):
            captured = capture(model, *batch(0, 0))
        names = [name for name, _ in model.named_parameters()]
        again = _counts(captured.backward, ALL_GATHER)
        assert _counts(captured.forward, ALL_GATHER) == dict.fromkeys(names, 1)
        assert set(again.values()) == ({1} if reshard else set())
        assert not (reshard and whole_weights_among_outputs(captured.forward))
        outputs = [node.meta["val"] for node in captured.forward.output_node().all_input_nodes]
        saved.append(sum(value.nbytes for value in outputs if isinstance(value, torch.Tensor)))
    assert saved[0] > saved[1] > saved[2]


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


class Behind(nn.Module):
    """A checkpointed region, and a weight whose gradient needs what the region returns if it ``multiplies``."""

    def __init__(self, multiplies):
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 6, bias=False), nn.Parameter(torch.ones(6))
        self.multiplies = multiplies

    def forward(self, x):
        returned = checkpoint(lambda x: self.linear(x.tanh()), x, use_reentrant=False)
        return returned * self.scale if self.multiplies else returned + self.scale


@pytest.mark.parametrize("multiplies", [True, False])
@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_what_a_region_returns_is_saved_where_backward_needs_it_outside_of_the_region(partitioner, multiplies):
    captured = capture(simple_fsdp(Behind(multiplies)), torch.ones(2, 6), partitioner=partitioner)
    matmul, tanh = torch.ops.aten.mm.default, torch.ops.aten.tanh.default
    (returned,) = captured.forward.find_nodes(op="call_function", target=matmul)
    assert (returned in captured.forward.output_node().all_input_nodes) == multiplies
    assert len(captured.backward.find_nodes(op="call_function", target=matmul)) == 1  # of the weight's gradient
    assert len(captured.backward.find_nodes(op="call_function", target=tanh)) == 1  # the region is recomputed


class Computed(nn.Module):
    """Weights that are used only through something computed from them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.scale = (nn.Parameter(torch.ones(6, 6)) for _ in range(3))

    def forward(self, x):
        x = nn.functional.linear(x.relu(), torch.cat([self.a, self.b]))
        x = x @ torch.cat([self.a * self.scale, 1 + self.b.float()]).softmax(0)
        return x.relu() @ (self.scale - self.scale.mean()) / self.scale.std()


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_values_computed_from_weights_alone_are_not_saved(partitioner):
    captured = capture(simple_fsdp(Computed()), torch.ones(2, 6), partitioner=partitioner)
    assert len(fqns(captured.forward, ALL_GATHER)) == len(fqns(captured.backward, ALL_GATHER)) == 3
    assert whole_weights_among_outputs(captured.forward) == []


EVEN = {"ffn_dim": 44, "vocab_size": 28}
"""Rows that four ranks share evenly: a whole weight is then saved without padding, and known by its shape."""


def test_switching_the_setting_between_models_compiles_anew():
    """Without a reset: Dynamo must not take the code of one setting for the other."""
    torch._dynamo.reset()
    saved = []
    for reshard in (True, False, True):
        model = simple_fsdp(tiny_llama(layers=1, **EVEN), reshard_after_forward=reshard)
        options = {"plan": "none", "lower_with": "aot_eager"}
        compiled = torch.compile(model, backend="simplefsdp", options=options, fullgraph=True)
        saved.append(len(whole_weights_saved(model, compiled, *batch(0, 0, 28))))
    assert saved == [0, 8, 0]


def test_blocks_compiled_one_by_one_keep_their_own_setting():
    torch._dynamo.reset()
    model = simple_fsdp(tiny_llama(layers=3, **EVEN), reshard_after_forward={"layers.1.*": False})
    for layer in model.layers:
        layer.compile(backend="simplefsdp", options={"plan": "none", "lower_with": "aot_eager"})
    assert len(whole_weights_saved(model, model.layers[0], torch.ones(1, 16, 36))) == 0
    assert len(whole_weights_saved(model, model.layers[1], torch.ones(1, 16, 36))) == 7
    assert len(whole_weights_saved(model, model.layers[2], torch.ones(1, 16, 36))) == 0
