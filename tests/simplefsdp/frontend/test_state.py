"""Initial values from ``meta``, state dicts, conversions, copies."""

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from simplefsdp import sharded_init, simple_fsdp
from simplefsdp.models import llama
from tests import graphs, zoo
from tests.compare import assert_same, same_steps, vectors, whole
from tests.models import batch, tiny_llama
from tests.ranks import Ranks

one_of_four = pytest.mark.usefixtures("one_of_four")


def drawn(model: nn.Module, initialise: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
    torch.manual_seed(7)
    initialise(model)
    return {name: whole(value) for name, value in (*model.named_parameters(), *model.named_buffers())}


def reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def trunc(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


def orthogonal(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)
        module.bias.data.uniform_(-1, 1)


def scaled(module: nn.Module) -> None:
    with torch.no_grad():
        for param in module.parameters(recurse=False):
            param.copy_(torch.randn_like(param) * 0.02)


INITIALISATIONS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "a method of the root": (lambda: llama.build("debug", dim=36, ffn_dim=50, heads=6, kv_heads=2), reset),
    "apply": (lambda: nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Embedding(5, 3)), lambda m: m.apply(reset)),
    "apply trunc_normal_": (lambda: nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5)), lambda m: m.apply(trunc)),
    "apply orthogonal_": (lambda: nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5)), lambda m: m.apply(orthogonal)),
    "randn_like": (lambda: nn.Sequential(nn.Linear(6, 7)), lambda m: m.apply(scaled)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 5, 3)), lambda m: m.apply(reset)),
    "LSTM": (lambda: nn.Sequential(nn.LSTM(3, 5)), lambda m: m.apply(reset)),
}


@pytest.mark.parametrize("kind", INITIALISATIONS)
def test_shards_made_on_meta_are_initialised_to_what_the_whole_model_would_be(two_ranks: Ranks, kind: str) -> None:
    two_ranks.run(_initialise, kind)


def _initialise(kind: str) -> None:
    build, initialise = INITIALISATIONS[kind]
    expected = drawn(build(), initialise)
    with torch.device("meta"):
        model = build()
    simple_fsdp(model)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(torch.nan)

    def sharded(module: nn.Module) -> None:
        with sharded_init(), graphs.recorded_gathers() as gathered:
            initialise(module)
        assert gathered == []

    assert_same(drawn(model, sharded), expected, tolerance=0)


@one_of_four
def test_initialisation_that_depends_on_values_is_refused() -> None:
    model = simple_fsdp(nn.Linear(6, 8))
    with sharded_init(), torch.no_grad(), pytest.raises(RuntimeError, match=r"bernoulli.*depends on the values of a"):
        model.weight.copy_(torch.bernoulli(model.weight.sigmoid()))


def test_a_model_from_meta_trains(two_ranks: Ranks) -> None:
    two_ranks.run(_from_meta)


def _from_meta() -> None:
    def wrap(model: nn.Module) -> nn.Module:
        with torch.device("meta"):
            sharded = simple_fsdp(zoo.build("tied"))
        sharded.to_empty(device="cpu")
        sharded.load_state_dict(model.state_dict())
        return sharded

    for lowering in ("eager", "aot_eager"):
        same_steps(lambda: zoo.build("tied"), lowering, wrap=wrap)


@one_of_four
@pytest.mark.compile
def test_a_model_that_has_no_values_yet_says_which() -> None:
    with torch.device("meta"):
        model = zoo.Buffers()
    simple_fsdp(model, init_device_mesh("cpu", (4,)))
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    for forward in (model, torch.compile(model, backend="simplefsdp", options={"lower_with": "aot_eager"})):
        with pytest.raises(RuntimeError, match=rf"{names[0]} \.\. {names[-1]} \({len(names)}\): on meta.*to_empty"):
            forward(torch.ones(2, 6))
    traced = torch.compile(lambda x: model(x), backend="simplefsdp", options={"lower_with": "aot_eager"})
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(\d.*\): on meta, without values.*to_empty"):
        traced(torch.ones(2, 6))
    model.to_empty(device="cpu")
    assert model(torch.ones(2, 6)).shape == (2, 6)


@one_of_four
def test_a_model_on_meta_takes_the_device_of_its_mesh_with_what_is_assigned() -> None:
    state = zoo.build("used twice").state_dict()
    with torch.device("meta"):
        model = zoo.build("used twice")
    simple_fsdp(model, init_device_mesh("cpu", (4,))).load_state_dict(state, assign=True)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    torch.testing.assert_close(model[0].weight.to_local(), state["0.weight"][:2])


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", ["plain", "ours", "FSDP2"])
def test_state_dicts_of_each_kind_load(two_ranks: Ranks, kind: str, assign: bool) -> None:
    two_ranks.run(_load, kind, assign)


def _load(kind: str, assign: bool) -> None:
    torch.manual_seed(1)
    source = zoo.build("tied")
    expected = {name: value.clone() for name, value in source.state_dict().items()}
    if kind != "plain":
        simple_fsdp(source) if kind == "ours" else fully_shard(source)
    state = source.state_dict()
    model = simple_fsdp(zoo.build("tied"))
    with graphs.recorded_gathers() as gathered:
        assert str(model.load_state_dict(state, assign=assign)) == "<All keys matched successfully>"
    assert gathered == []
    assert all(isinstance(p, DTensor) and p.placements == (Shard(0),) for p in model.parameters())
    assert_same(model.state_dict(), expected, tolerance=0)
    assert list(state) == list(expected), "the caller's dict is not changed"
    for lowering in ("eager", "aot_eager"):
        build = functools.partial(_loaded, expected)
        same_steps(build, lowering, wrap=lambda plain: _loaded(plain.state_dict(), shard=True, assign=assign))


def _assigned(model: Any, state: dict[str, Tensor]) -> Any:
    model.load_state_dict(state, assign=True)
    return model


def _assigned_below_a_module_of_torch_compile(model: Any, state: dict[str, Tensor]) -> Any:
    torch.compile(model).load_state_dict({f"_orig_mod.{name}": value for name, value in state.items()}, assign=True)
    return model


def _set_by_torch(model: Any, state: Any) -> Any:
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False))
    return model


@pytest.mark.compile
@one_of_four
@pytest.mark.parametrize("load", [_assigned, _assigned_below_a_module_of_torch_compile, _set_by_torch])
def test_a_tied_model_on_meta_is_tied_when_it_is_loaded(load: Callable[[Any, dict[str, Tensor]], Any]) -> None:
    state = {name: value.clone() for name, value in zoo.build("tied").state_dict().items()}
    with torch.device("meta"):
        model = simple_fsdp(zoo.build("tied"))
    before = {name: id(param) for name, param in model.named_parameters(remove_duplicate=False)}
    names = {frozenset(name for name in before if before[name] == same) for same in before.values()}
    assert any(len(tied) > 1 for tied in names)
    loaded = {name: id(param) for name, param in load(model, state).named_parameters(remove_duplicate=False)}
    assert {frozenset(name for name in loaded if loaded[name] == same) for same in loaded.values()} == names
    assert not any(param.is_meta for param in model.parameters())


def _loaded(state: dict[str, Any], shard: bool = False, assign: bool = False) -> nn.Module:
    model = zoo.build("tied")
    if shard:
        simple_fsdp(model)
    model.load_state_dict({name: value.clone() for name, value in state.items()}, assign=assign)
    return model


@one_of_four
def test_state_dicts_that_do_not_fit_are_refused() -> None:
    model = simple_fsdp(nn.Linear(6, 8))
    before = model.weight.to_local().clone()
    state = {"weight": torch.zeros(8, 5), "bias": torch.zeros(8)}
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        model.load_state_dict(state)
    mesh = model.weight.device_mesh
    state = {"weight": distribute_tensor(torch.zeros(8, 6), mesh, [Replicate()]), "bias": torch.zeros(8)}
    with pytest.raises(RuntimeError, match=r"weight: a DTensor of shape \(8, 6\) placed as \(Replicate"):
        model.load_state_dict(state, assign=True)
    torch.testing.assert_close(model.weight.to_local(), before)


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_a_converted_model_trains(two_ranks: Ranks, lowering: str) -> None:
    two_ranks.run(_convert, lowering)


def _convert(lowering: str) -> None:
    def build() -> nn.Module:
        return zoo.build("tied").double()

    def wrap(_model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return simple_fsdp(zoo.build("tied")).to(torch.float64)

    same_steps(build, lowering, wrap=wrap, inputs=lambda s, r: vectors(s, r).double(), tolerance=1e-10)


@one_of_four
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_and_bfloat16_convert_shards(dtype: torch.dtype) -> None:
    model = simple_fsdp(tiny_llama(layers=1))
    model = model.half() if dtype is torch.float16 else model.bfloat16()
    tokens, _ = batch(0, 0)
    assert {p.dtype for p in model.parameters()} == {dtype}
    out = model(tokens)
    assert out.dtype is dtype
    out.sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {dtype}


@one_of_four
def test_apply_sees_shards_and_may_freeze() -> None:
    model = simple_fsdp(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)))
    seen = []

    def freeze(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            seen.append(type(module.weight))
            module.requires_grad_(False)

    model.apply(freeze)
    assert seen == [DTensor]
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]


@one_of_four
def test_a_frozen_parameter_may_be_thawed_later() -> None:
    model = simple_fsdp(zoo.Lora())
    model.requires_grad_(True)
    model(torch.ones(2, 6)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@one_of_four
def test_pickling_is_refused_and_copying_is_not() -> None:
    model = simple_fsdp(nn.Sequential(nn.Linear(6, 8)))
    for save in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(TypeError, match=r"a sharded \w+ cannot be pickled.*model.state_dict\(\)"):
            save(model)
    assert type(copy.deepcopy(model)) is type(model)
    traced = simple_fsdp(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(6, 8))))
    for each in (traced, simple_fsdp(zoo.Recurrent())):
        assert copy.deepcopy(each)(torch.ones(2, 6)).shape == each(torch.ones(2, 6)).shape
    torch.save(model.state_dict(), io.BytesIO())


@one_of_four
@pytest.mark.compile
def test_a_copy_has_the_gradients_of_compiled_code() -> None:
    model = simple_fsdp(nn.Sequential(nn.Linear(6, 8)))
    forward = torch.compile(model, backend="simplefsdp", options={"lower_with": "aot_eager", "plan": "block"})
    forward(torch.ones(2, 6)).sum().backward()
    for param, copied in zip(model.parameters(), copy.deepcopy(model).parameters(), strict=True):
        assert copied.grad is not param.grad
        assert torch.equal(copied.grad.to_local(), param.grad.to_local())


@one_of_four
def test_another_module_of_a_sharded_class_is_a_plain_one() -> None:
    model = simple_fsdp(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)))
    assert type(model[:1]) is nn.Sequential
    assert model[:1][0] is model[0]
    other = type(model[0])(3, 5)
    assert type(other) is nn.Linear
    assert type(other.weight) is nn.Parameter


def test_an_averaged_copy_follows(two_ranks: Ranks) -> None:
    two_ranks.run(_averaged)


def _averaged() -> None:
    model = same_steps(lambda: zoo.build("tied"))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    x = vectors(0, dist.get_rank())
    torch.testing.assert_close(averaged(x), model(x))
