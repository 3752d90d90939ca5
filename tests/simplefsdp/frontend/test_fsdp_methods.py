"""Changes of a sharded model between steps, under FSDP2's names."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from simplefsdp import clip_grad_norm_, register_fsdp_forward_method, simple_fsdp
from simplefsdp.frontend.fsdp_methods import FSDPMethods
from tests import graphs, zoo
from tests.compare import EVERY_LOWERING, assert_same, lowered, vectors, whole
from tests.models import batch, tiny_llama
from tests.ranks import Ranks
from tests.watch import Watch

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


def test_weights_that_are_kept_for_backward_may_be_resharded_before(two_ranks: Ranks) -> None:
    two_ranks.run(_reshard_kept)


def _reshard_kept() -> None:
    plain, model = zoo.build("tied"), simple_fsdp(zoo.build("tied"), reshard_after_forward=False)
    plain(vectors(0, 0)).square().mean().backward()
    for resharded in (False, True):
        with Watch() as watch:
            out = model(vectors(0, 0))
            before = watch.alive()
            if resharded:
                model.reshard()
                assert before - watch.alive() >= plain[0].weight.nbytes + plain[2].weight.nbytes
        with graphs.recorded_gathers() as gathered:
            out.square().mean().backward()
        assert bool(gathered) is resharded
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(param.grad), expected.grad)
        model.zero_grad()


@pytest.mark.slow
@pytest.mark.compile
@one_of_four
def test_resharding_may_be_changed_later() -> None:
    model = simple_fsdp(tiny_llama(layers=2))
    gathers = []
    for reshard in (True, False, True):
        model.set_reshard_after_forward(reshard)
        captured = graphs.capture(model, *batch(0, dist.get_rank()), plan="block")
        gathers.append(len(graphs.nodes(captured.backward, *graphs.GATHERS)))
    model.layers[1].set_reshard_after_forward(False)
    captured = graphs.capture(model, *batch(0, 0), plan="block")
    assert [*gathers, len(graphs.nodes(captured.backward, *graphs.GATHERS))] == [3, 0, 3, 2]


@one_of_four
def test_bad_settings_are_named() -> None:
    model = simple_fsdp(nn.Linear(6, 8))
    with pytest.raises(ValueError, match="factor: expected a positive number, found 0"):
        model.set_gradient_divide_factor(0)
    with pytest.raises(TypeError, match="factor: expected a number, found True"):
        model.set_gradient_divide_factor(True)
    with pytest.raises(TypeError, match="reshard_after_forward: expected True or False, found 2"):
        model.set_reshard_after_forward(2)


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(
    ("method", "value"),
    [("set_requires_gradient_sync", False), ("set_reshard_after_forward", False), ("set_gradient_divide_factor", 2.0)],
)
def test_nothing_is_changed_inside_of_what_is_compiled(method: str, value: Any, fullgraph: bool) -> None:
    model = simple_fsdp(nn.Linear(6, 6))

    @torch.compile(backend="simplefsdp", options={"lower_with": "aot_eager"}, fullgraph=fullgraph)
    def step(x: torch.Tensor) -> torch.Tensor:
        getattr(model, method)(value)
        return model(x)

    with pytest.raises(Exception, match=rf"{method}\(\) was called inside torch.compile"):
        step(torch.ones(2, 6))
    model(torch.ones(2, 6)).sum().backward()
    assert model.weight.grad is not None


@one_of_four
def test_a_models_own_methods_are_not_covered() -> None:
    class Own(nn.Linear):
        def reshard(self) -> str:
            return "mine"

    assert simple_fsdp(Own(6, 8)).reshard() == "mine"


@one_of_four
def test_names_are_those_of_fsdp2() -> None:
    names = {name for name in vars(FSDPMethods) if not name.startswith("_")}
    assert names <= set(dir(FSDPModule))
    assert isinstance(simple_fsdp(nn.Linear(6, 8)), FSDPMethods)


def test_other_methods_than_forward_may_read_weights(two_ranks: Ranks) -> None:
    two_ranks.run(_other_methods)


def _other_methods() -> None:
    plain, model = zoo.build("other methods")[1], simple_fsdp(zoo.build("other methods")[1])
    x = vectors(0, 0)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        model.encode(x)
    model.unshard()
    torch.testing.assert_close(model.encode(x), plain.encode(x))
    model.reshard()
    compiled = torch.compile(model.encode, backend="simplefsdp", options={"plan": "none", "lower_with": "aot_eager"})
    result: list[Tensor] = [compiled(x), plain.encode(x)]
    torch.testing.assert_close(*result)
    register_fsdp_forward_method(model, "encode")
    for module in (model, copy.deepcopy(model)):
        out = module.encode(x)
        torch.testing.assert_close(out, plain.encode(x))
        out.sum().backward()
        assert module.weight.grad is not None
    with pytest.raises(TypeError, match=r"module: expected one that simple_fsdp\(\) has sharded, found a OtherMethods"):
        register_fsdp_forward_method(plain, "encode")
    with pytest.raises(AttributeError, match="'weight' is no method of OtherMethods"):
        register_fsdp_forward_method(model, "weight")


@pytest.mark.parametrize("lowering", EVERY_LOWERING)
def test_gradients_are_added_up_without_communication(two_ranks: Ranks, lowering: str) -> None:
    two_ranks.run(_accumulate, lowering)


def _accumulate(lowering: str) -> None:
    torch._dynamo.utils.counters.clear()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    results = []
    for wrap in (fully_shard, simple_fsdp):
        model: Any = wrap(zoo.build("LoRA"), mp_policy=policy)
        forward = lowered(model, lowering if wrap is simple_fsdp else "eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(9):
            last = step % 3 == 2
            model.set_requires_gradient_sync(last)
            loss = forward(vectors(step, dist.get_rank())).square().mean()
            with Watch() as watch:
                loss.backward()
            if wrap is simple_fsdp:
                reductions = [name for name in watch.counts if "reduce_scatter" in name]
                after, within = "reduce_scatter_tensor_coalesced", "reduce_scatter_tensor"
                assert reductions == [after if lowering == "eager" else within] * last
            assert last or all(p.grad is None for p in model.parameters())
            if last:
                optimizer.step()
                optimizer.zero_grad()
        results.append({n: p.to_local() for n, p in model.named_parameters()})
    assert_same(results[1], results[0], tolerance=1e-3 if lowering == "inductor" else 0)
    if lowering != "eager":
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "of those before the last, and of the last"


@one_of_four
def test_frozen_and_tied_parameters_without_reductions() -> None:
    model = simple_fsdp(nn.Sequential(zoo.Lora(), zoo.Tied()))
    model.set_requires_gradient_sync(False)
    loss = model(torch.ones(2, 6)).sum()
    model.set_requires_gradient_sync(True)
    loss.backward()
    assert {n for n, p in model.named_parameters() if p.grad is None} == {"0.base.weight", "0.base.bias"}
    assert model[1].up.weight.grad.placements == model[1].up.weight.placements


@pytest.mark.parametrize("lowering", ["eager", "auto"])
def test_gradients_are_not_lost_however_the_switch_is_used(two_ranks: Ranks, lowering: str) -> None:
    two_ranks.run(_odd_switches, lowering)


def _odd_switches(lowering: str) -> None:
    plain = zoo.build("tied")
    expected = torch.stack([plain(vectors(0, rank)).square().mean() for rank in range(2)]).mean()
    expected.backward()
    expected_gradients = {n: p.grad for n, p in plain.named_parameters()}

    # Between forward and backward, as FSDP2 allows it.
    model = simple_fsdp(zoo.build("tied"))
    model.set_requires_gradient_sync(False)
    loss = lowered(model, lowering)(vectors(0, dist.get_rank())).square().mean()
    model.set_requires_gradient_sync(True)
    loss.backward()
    assert_same({n: p.grad for n, p in model.named_parameters()}, expected_gradients, 1e-6)

    # A parameter that is trained only from then on.
    model = zoo.build("tied")
    model[0].requires_grad_(False)
    simple_fsdp(model)
    model.set_requires_gradient_sync(False)
    model[0].requires_grad_(True)
    model.set_requires_gradient_sync(True)
    lowered(model, lowering)(vectors(0, dist.get_rank())).square().mean().backward()
    assert_same({n: p.grad for n, p in model.named_parameters()}, expected_gradients, 1e-6)

    # Something computed from the parameters in their place.
    twice, model = zoo.build("tied"), simple_fsdp(zoo.build("tied"))
    model.set_requires_gradient_sync(False)
    for each in (twice, model):
        ranks = [dist.get_rank()] if each is model else range(2)
        weights = {name: param * 2 for name, param in each.named_parameters()}
        outs = [torch.func.functional_call(each, weights, (vectors(0, rank),)) for rank in ranks]
        torch.stack([out.square().mean() for out in outs]).mean().backward()
    assert_same(
        {n: p.grad for n, p in model.named_parameters()}, {n: p.grad for n, p in twice.named_parameters()}, 1e-5
    )


def test_a_gradient_on_one_rank_only_is_reduced_on_all(two_ranks: Ranks) -> None:
    two_ranks.run(_one_sided)


def _one_sided() -> None:
    # Resharded weights would be gathered in backward, by one rank only.
    model = simple_fsdp(zoo.build("LoRA"), reshard_after_forward=False)
    model.set_requires_gradient_sync(False)
    hidden = model[0](vectors(0, 0))
    last = model[2](hidden)
    model.set_requires_gradient_sync(True)
    (last if dist.get_rank() == 0 else hidden).sum().backward()
    plain = zoo.build("LoRA")
    plain[2](plain[0](vectors(0, 0))).sum().div(2).backward()
    torch.testing.assert_close(whole(model[2].weight.grad), plain[2].weight.grad)
    assert model[1].up.weight.grad is None


def test_unsharded_weights_are_never_stale(two_ranks: Ranks) -> None:
    two_ranks.run(_stale)


def _stale() -> None:
    x = vectors(0, 0)
    model = simple_fsdp(zoo.build("tied"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=True)
    model(x).sum().backward()
    model.unshard()
    optimizer.step()
    assert isinstance(model[0].weight, DTensor), "a step ends it"
    with torch.inference_mode():
        model.unshard()
    model(x).sum().backward()
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    model.unshard()
    model.set_requires_gradient_sync(True)
    model(x).sum().backward()
    assert model[0].weight.grad is not None
    model.unshard()
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(RuntimeError, match=r"0\.weight: was changed since unshard\(\)"):
        model(x)
    model.unshard()
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"0\.weight: was changed in place while it was unsharded"):
        model.reshard()


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_an_accumulation_ends_once_whatever_comes_between(two_ranks: Ranks, lowering: str) -> None:
    two_ranks.run(_ends_once, lowering)


def _ends_once(lowering: str) -> None:
    rank = dist.get_rank()
    plain = zoo.build("tied")
    losses = [torch.stack([plain(vectors(step, r)).square().mean() for r in range(2)]).mean() for step in range(4)]
    torch.stack(losses).sum().backward()
    expected = {n: p.grad for n, p in plain.named_parameters()}
    model: Any = simple_fsdp(zoo.build("tied"))
    forward = lowered(model, lowering)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    model.set_requires_gradient_sync(False)
    forward(vectors(0, rank)).square().mean().backward()
    steps = (
        optimizer.step,
        lambda: optimizer.step(lambda: None),
        lambda: optimizer.step(closure=lambda: None),
        lambda: clip_grad_norm_(model.parameters(), 1.0),
    )
    for step in steps:
        for sync in (False, True):
            model.set_requires_gradient_sync(sync)
            with pytest.raises(RuntimeError, match=r"0\.weight: its gradient was added up and never reduced"):
                step()
    other = nn.Linear(2, 2)
    torch.optim.SGD(other.parameters(), lr=0.1).step()  # of other parameters
    # It goes on, and what this forward made is still to come when it ends.
    model.set_requires_gradient_sync(False)
    later = forward(vectors(1, rank)).square().mean()
    model.set_requires_gradient_sync(True)
    model.set_requires_gradient_sync(True)
    last = forward(vectors(2, rank)).square().mean()
    with pytest.raises(ZeroDivisionError):  # a backward that fails ends nothing
        torch.autograd.grad(_Fails.apply(last), list(model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    forward(vectors(2, rank)).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    with Watch() as watch:
        later.backward()
    assert watch.counts["reduce_scatter_tensor_coalesced"] == len(list(model.parameters())), "one each, also if tied"
    forward(vectors(3, rank)).square().mean().backward()
    assert_same({n: p.grad for n, p in model.named_parameters()}, expected, 1e-6)
    optimizer.step()

    def backward(sync: bool) -> Tensor:
        model.set_requires_gradient_sync(sync)
        loss = forward(vectors(0, rank)).square().mean()
        loss.backward()
        return loss

    for last_in_closure in (optimizer.step, lambda closure: optimizer.step(closure=closure)):  # as trainers do
        backward(sync=False)
        assert last_in_closure(lambda: backward(sync=True)) > 0


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, _grad: Tensor) -> Tensor:
        raise ZeroDivisionError


@one_of_four
def test_a_part_may_go_on_adding_up() -> None:
    model: Any = simple_fsdp(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    model.set_requires_gradient_sync(False)
    model(torch.ones(2, 6)).sum().backward()
    model.set_requires_gradient_sync(True)
    model[0].set_requires_gradient_sync(False)
    model(torch.ones(2, 6)).sum().backward()
    assert [p.grad is None for p in model.parameters()] == [True, True, False, False]
    model.set_requires_gradient_sync(True)
    model(torch.ones(2, 6)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("mode", ["fully_shard", "hybrid_shard", "replicate"])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float16], ids=["as it is", "fp16"])
def test_an_accumulation_reduces_to_the_gradients_of_one_without(
    four_ranks: Ranks, mode: str, reduce_dtype: torch.dtype | None
) -> None:
    four_ranks.run(_same_bits, mode, reduce_dtype)


def _same_bits(mode: str, reduce_dtype: torch.dtype | None) -> None:
    kinds = ["fewer rows than ranks", "0-dim", "zero-size", "complex", "three dims", "LoRA", "bf16 beside fp32"]
    mesh = init_device_mesh("cpu", (2, 2) if mode == "hybrid_shard" else (4,))
    gradients = []
    for at_once in (True, False):
        model: Any = simple_fsdp(
            nn.Sequential(*map(zoo.build, kinds)),
            mesh,
            mode=mode,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
            shard_placement_fn=lambda param: Shard(1) if param.ndim == 3 else None,
            gradient_divide_factor=3 if mode == "replicate" else None,
        )
        model.set_requires_gradient_sync(at_once)
        loss = model(vectors(0, dist.get_rank())).square().mean()
        model.set_requires_gradient_sync(True)
        with Watch() as watch:
            loss.backward()
        gradients.append({n: p.grad.to_local() for n, p in model.named_parameters() if p.grad is not None})
    # Gloo sums what is all-reduced over more than two ranks in an order that depends on where in the buffer it is.
    assert_same(gradients[1], gradients[0], tolerance=(1e-3 if reduce_dtype else 1e-5) if mode == "replicate" else 0)
    reductions = sum(watch.counts[name] for name in ("reduce_scatter_tensor_coalesced", "all_reduce_coalesced"))
    kinds_of_rows = 2 * 3  # replicated or not; float32, and reduced in another dtype, or bfloat16
    assert 0 < reductions <= kinds_of_rows * (2 if mode == "hybrid_shard" else 1)
