"""``simple_fsdp``: what a sharded model looks like from outside, and what it refuses."""

import copy
import re
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from simplefsdp import simple_fsdp
from simplefsdp.models.llama import Block, Llama
from tests import zoo
from tests.compare import lowered, vectors
from tests.models import tiny_llama
from tests.ranks import Ranks, fake_group

one_of_four = pytest.mark.usefixtures("one_of_four")


@one_of_four
def test_simple_fsdp_shards_in_place_and_returns_the_same_module():
    model = tiny_llama()
    assert simple_fsdp(model) is model
    assert all(isinstance(p, DTensor) and isinstance(p, nn.Parameter) for p in model.parameters())
    assert {p.placements for p in model.parameters()} == {(Shard(0),)}


@one_of_four
def test_names_shapes_and_classes_stay():
    model, plain = simple_fsdp(tiny_llama()), tiny_llama()
    shapes = [(name, p.shape) for name, p in model.named_parameters()]
    assert shapes == [(name, p.shape) for name, p in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert isinstance(model, Llama)
    assert isinstance(model.layers[0], Block)
    assert isinstance(model.output, nn.Linear)
    assert repr(model) == repr(plain)


@one_of_four
def test_outside_of_a_call_a_parameter_is_its_shard():
    model = simple_fsdp(tiny_llama())
    assert model.output.weight is model.get_parameter("output.weight")
    assert isinstance(model.output.weight, DTensor)


@one_of_four
def test_inside_a_call_a_parameter_is_whole_also_where_a_parent_reads_it():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = nn.Linear(3, 10, bias=False)
            self.seen = []

        def forward(self, x):
            self.seen.append(self.child.weight)
            return self.child(x)

    model = simple_fsdp(nn.Sequential(Parent()))
    model(torch.zeros(2, 3))
    (weight,) = model[0].seen
    assert not isinstance(weight, DTensor)
    assert weight.shape == (10, 3)


@one_of_four
def test_an_exception_in_forward_ends_the_call():
    class Fails(nn.Linear):
        def forward(self, _x):
            raise KeyError("planted")

    model = simple_fsdp(Fails(2, 8))
    with pytest.raises(KeyError, match="planted"):
        model(torch.zeros(1, 2))
    assert isinstance(model.weight, DTensor)


@one_of_four
def test_tied_weights_stay_one_parameter_and_frozen_ones_frozen():
    model = tiny_llama(tie_embeddings=True)
    model.norm.weight.requires_grad_(False)
    count = len(list(model.parameters()))
    simple_fsdp(model)
    assert model.output.weight is model.tok_embeddings.weight
    assert len(list(model.parameters())) == count
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["norm.weight"]


@one_of_four
def test_a_deep_copy_is_a_sharded_model_of_its_own():
    model = simple_fsdp(tiny_llama(tie_embeddings=True), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    twin = copy.deepcopy(model)
    assert type(twin) is type(model)
    assert twin.output.weight is twin.tok_embeddings.weight
    assert twin.output.weight is not model.output.weight
    with torch.no_grad():
        twin.norm.weight.fill_(3)
        assert model.norm.weight.to_local().eq(1).all()
    assert twin(torch.zeros(1, 4, dtype=torch.long)).dtype is torch.bfloat16
    with pytest.raises(ValueError, match="sharded by simple_fsdp already"):
        simple_fsdp(twin)


@one_of_four
def test_attributes_of_parameters_are_kept():
    model = nn.Linear(2, 8)
    model.weight.no_weight_decay = True
    assert simple_fsdp(model).weight.no_weight_decay


@one_of_four
def test_models_with_other_policies_do_not_mix():
    policies = [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16), MixedPrecisionPolicy(torch.float16)]
    models = [simple_fsdp(nn.Linear(4, 8), mp_policy=policy) for policy in policies]
    assert [model(torch.zeros(1, 4)).dtype for model in models] == [torch.float32, torch.bfloat16, torch.float16]
    assert len({type(model) for model in models[1:]}) == 1, "instances share a class, or repeated blocks recompile"


@one_of_four
def test_mixed_precision_casts_weights_inputs_and_outputs_but_not_shards():
    seen = []

    class Linear(nn.Linear):
        def forward(self, x, scale):
            seen.extend([x.dtype, scale["scale"].dtype, scale["index"].dtype, self.weight.dtype])
            return super().forward(x)

    policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64)
    model = simple_fsdp(Linear(4, 8), mp_policy=policy)
    out = model(torch.zeros(1, 4), scale={"scale": torch.ones(1), "index": torch.ones(1, dtype=torch.long)})
    assert seen == [torch.bfloat16, torch.bfloat16, torch.int64, torch.bfloat16]
    assert out.dtype is torch.float64
    out.sum().backward()
    assert model.weight.dtype is model.weight.grad.dtype is torch.float32


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    size=st.integers(1, 6),
    transposed=st.booleans(),
)
def test_shards_are_the_chunks_of_the_whole(shape, size, transposed):
    torch.manual_seed(0)
    whole = torch.randn(shape)
    if transposed:
        whole = whole.transpose(0, -1)
    chunks = list(whole.chunk(size)) if whole.shape[0] else []
    chunks += [whole.new_empty(0, *whole.shape[1:])] * (size - len(chunks))
    for rank in range(size):
        with fake_group(size, rank):
            holder = nn.Module()
            holder.weight = nn.Parameter(whole.clone())
            weight = simple_fsdp(holder).weight
            assert weight.shape == whole.shape
            torch.testing.assert_close(weight.to_local(), chunks[rank], rtol=0, atol=0)
            assert weight.to_local().is_contiguous()


@pytest.mark.compile
@one_of_four
@pytest.mark.parametrize("fullgraph", [False, True])
def test_called_inside_torch_compile(fullgraph):
    model = nn.Linear(2, 8)

    @torch.compile(backend="eager", fullgraph=fullgraph)
    def shard_and_run(x):
        simple_fsdp(model)
        return model(x)

    with pytest.raises(Exception, match=re.escape("called inside torch.compile")):
        shard_and_run(torch.zeros(1, 2))
    assert not isinstance(model.weight, DTensor)


def test_every_rank_of_a_default_mesh_takes_part():
    with fake_group(3, 2):
        mesh = simple_fsdp(nn.Linear(2, 7)).weight.device_mesh
        assert mesh.size() == dist.get_world_size() == 3


@one_of_four
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.float64),
        lambda model: model.to_empty(device="cpu"),
        lambda model: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True),
    ],
)
def test_sharding_information_survives_a_change_of_parameters(change):
    model = simple_fsdp(tiny_llama(layers=1))
    change(model)
    assert [p.simple_fsdp_info.fqn for p in model.parameters()] == [name for name, _ in model.named_parameters()]


@one_of_four
def test_a_checkpointed_function_may_read_a_parameter_by_itself():
    class Checkpointed(nn.Linear):
        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

        def inner(self, x):
            return (x @ self.weight.t()).relu()

    model = simple_fsdp(Checkpointed(4, 8, bias=False))
    model(torch.ones(1, 4)).sum().backward()
    assert model.weight.grad is not None


def test_ignored_parameters_stay_whole_and_are_not_reduced(two_ranks: Ranks) -> None:
    two_ranks.run(_ignored)


def _ignored() -> None:
    for lowering in ("eager", "aot_eager"):
        plain, model = zoo.build("tied"), zoo.build("tied")
        weight = model[0].weight
        simple_fsdp(model, ignored_params=[weight, model[2].bias])
        assert model[0].weight is weight
        assert [isinstance(p, DTensor) for p in model.parameters()] == [False, True, True, True, True, False]
        forward = lowered(model, lowering, fullgraph=True)
        x = vectors(0, dist.get_rank())
        forward(x).square().mean().backward()
        plain(x).square().mean().backward()
        torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)
        torch.testing.assert_close(model[2].bias.grad, plain[2].bias.grad)


@pytest.mark.compile
@one_of_four
def test_parameters_that_were_added_or_never_sharded_are_warned_of_when_compiling(caplog):
    caplog.set_level("WARNING")
    model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 2))
    options: Any = {"plan": "block", "lower_with": "aot_eager"}
    torch.compile(model, backend="simplefsdp", options=options)(torch.ones(1, 2))
    assert "no parameter of this graph is sharded" in caplog.text
    caplog.clear()
    simple_fsdp(model)
    added = nn.Sequential(model, nn.Linear(2, 3))
    torch.compile(added, backend="simplefsdp", options=options)(torch.ones(1, 2))
    assert "2 parameters of this graph are not sharded" in caplog.text
    caplog.clear()
    model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 2))
    simple_fsdp(model, ignored_params=model[1].parameters())
    torch.compile(model, backend="simplefsdp", options=options)(torch.ones(1, 2))
    assert "not sharded" not in caplog.text


@one_of_four
def test_functional_call_with_shards_or_whole_tensors():
    model = simple_fsdp(nn.Linear(2, 8))
    x = torch.ones(1, 2)
    shards = dict(model.named_parameters())
    assert torch.func.functional_call(model, shards, x).shape == (1, 8)
    whole: dict[str, Any] = {"weight": torch.ones(8, 2), "bias": nn.Parameter(torch.zeros(8))}
    torch.testing.assert_close(torch.func.functional_call(model, whole, x), torch.full((1, 8), 2.0))
    assert model.weight is shards["weight"]


@one_of_four
def test_casts_hold_where_forward_was_patched_on_the_instance():
    model = nn.Linear(2, 8)
    own = model.forward
    model.forward = lambda x: own(x) * 2
    simple_fsdp(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64))
    assert model(torch.ones(1, 2)).dtype is torch.float64


@one_of_four
def test_classes_that_ask_something_of_their_subclasses():
    class Registered(nn.Linear):
        def __init_subclass__(cls, *, tag: str) -> None:
            raise AssertionError("a sharded class is no new kind of model")

    assert isinstance(simple_fsdp(Registered(2, 8)), Registered)
