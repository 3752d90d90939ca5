"""Without torch.compile: what is gathered when, what stays alive until backward, and what is refused."""

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from simplefsdp import rehearsal, simple_fsdp
from simplefsdp.frontend import eager_resharding
from tests import zoo
from tests.compare import assert_same, lowered, same_steps, vectors, whole
from tests.ranks import Ranks
from tests.watch import Watch

one_of_four = pytest.mark.usefixtures("one_of_four")
WIDE = 64
WHOLE = WIDE * WIDE * 4
"""Bytes of one weight."""


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDE, WIDE, bias=False), nn.Tanh()) for _ in range(4)])


def alive_after_forward(model: nn.Module) -> int:
    with Watch() as watch:
        loss = model(torch.ones(2, WIDE)).sum()
        alive = watch.alive()
    loss.backward()
    return alive


def per_layer_fsdp2(model: nn.Sequential) -> nn.Module:
    for layer in (*model, model):
        fully_shard(layer)
    return model


@one_of_four
def test_full_weights_are_freed_between_forward_and_backward_as_with_fsdp2() -> None:
    activations = alive_after_forward(mlp())
    assert alive_after_forward(simple_fsdp(mlp())) == activations
    assert alive_after_forward(per_layer_fsdp2(mlp())) == activations
    # The first weight is not needed in backward.
    assert alive_after_forward(simple_fsdp(mlp(), reshard_after_forward=False)) == activations + 3 * WHOLE
    unsharded = simple_fsdp(mlp(), reshard_after_forward={"1.*": False})
    assert alive_after_forward(unsharded) == activations + WHOLE


@one_of_four
def test_at_most_one_weight_is_whole_at_a_time() -> None:
    model = simple_fsdp(mlp())
    peak = 0

    class Peak(Watch):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal peak
            out = super().__torch_dispatch__(func, types, args, kwargs)
            peak = max(peak, self.alive())
            return out

    with Peak():
        loss = model(torch.ones(2, WIDE)).sum()
        assert peak < 2 * WHOLE
        loss.backward()
    # A full weight and its full gradient.
    assert peak < 3.5 * WHOLE


@one_of_four
def test_backward_gathers_each_weight_once_and_computes_nothing_else_again() -> None:
    def counts(model: nn.Module) -> tuple[Counter[str], Counter[str]]:
        with Watch() as forward:
            loss = model(torch.ones(2, WIDE)).sum()
        with Watch() as backward:
            loss.backward()
        return forward.counts, backward.counts

    plain, sharded = counts(mlp()), counts(simple_fsdp(mlp()))
    gathers = [direction["all_gather_into_tensor"] for direction in sharded]
    assert gathers == [4, 3]
    assert sharded[1]["reduce_scatter_tensor"] == 4
    for op in ("mm", "tanh", "tanh_backward"):
        assert [d[op] for d in sharded] == [d[op] for d in plain]


@one_of_four
@pytest.mark.parametrize("make", [zoo.UsedTwice, zoo.Tied])
def test_a_weight_used_twice_is_reduced_once(make: Callable[[], nn.Module]) -> None:
    model = simple_fsdp(make())
    with Watch() as watch:
        model(torch.ones(2, 6)).sum().backward()
    assert watch.counts["reduce_scatter_tensor"] == len(list(model.parameters()))


@one_of_four
def test_a_weight_read_twice_by_one_module_is_gathered_once() -> None:
    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.t() @ self.weight

    model = simple_fsdp(Reads(6, 6, bias=False))
    with Watch() as watch, torch.no_grad():
        model(torch.ones(2, 6))
    assert watch.counts["all_gather_into_tensor"] == 1


@one_of_four
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_region_is_gathered_once_a_direction(use_reentrant: bool) -> None:
    model = simple_fsdp(mlp())
    x = torch.ones(2, WIDE, requires_grad=True)
    with Watch() as watch:
        out = checkpoint(model, x, use_reentrant=use_reentrant)
        assert watch.counts["all_gather_into_tensor"] == 4
        assert watch.alive() <= out.nbytes
        out.sum().backward()
    assert watch.counts["all_gather_into_tensor"] == 8
    assert watch.counts["reduce_scatter_tensor"] == 4


def test_a_backward_on_another_thread_calls_a_checkpoint_again_and_leaves_no_call_behind() -> None:
    calls: list[tuple[int, bool]] = []

    class Notes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            calls.append((threading.get_ident(), eager_resharding.checkpoint.is_recomputing))
            return super().forward(x)

    def gradient(backward: Callable[[Tensor], object]) -> Tensor:
        torch.manual_seed(0)
        model = simple_fsdp(nn.Sequential(Notes(WIDE, WIDE, bias=False), nn.Tanh()))
        backward(checkpoint(model, torch.ones(2, WIDE), use_reentrant=False).sum())
        return model[0].weight.grad.to_local()

    def on_another_thread(loss: Tensor) -> None:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    with rehearsal.world(4, None):  # whose reductions have values; those of a fake process group may have none
        here = gradient(Tensor.backward)
        calls.clear()
        on_a_thread = gradient(on_another_thread)
    assert here.any()
    assert torch.equal(on_a_thread, here)
    (first, in_checkpoint), (second, again) = calls
    assert first == threading.get_ident() != second
    assert in_checkpoint
    assert again
    assert not eager_resharding.checkpoint.is_recomputing
    assert not eager_resharding._thread.calls
    calls.clear()
    with rehearsal.world(4, None):
        simple_fsdp(Notes(WIDE, WIDE))(torch.ones(2, WIDE))
    assert calls == [(threading.get_ident(), False)]


@one_of_four
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_stays_alive_without_gradients(mode: Callable[[], Any]) -> None:
    model = simple_fsdp(mlp())
    with Watch() as watch, mode():
        out = model(torch.ones(2, WIDE))
        assert watch.alive() <= 2 * out.nbytes


@one_of_four
def test_an_exception_in_forward_leaves_nothing_behind() -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise KeyError("planted")

    model = simple_fsdp(nn.Sequential(mlp(), Fails(WIDE, WIDE)))
    with Watch() as watch:
        with pytest.raises(KeyError, match="planted"):
            model(torch.ones(2, WIDE))
        assert watch.alive() < WHOLE, "only what the traceback holds"
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert hasattr(model[1].weight, "placements")


def test_retained_graphs_and_hooks_of_the_user(two_ranks: Ranks) -> None:
    two_ranks.run(_retained)


def _retained() -> None:
    torch.manual_seed(0)
    plain = zoo.UsedTwice()
    torch.manual_seed(0)
    model = simple_fsdp(zoo.UsedTwice())
    x = vectors(0, 0)
    with torch.autograd.graph.save_on_cpu():
        hooked = model(x).square().mean()
    losses = [plain(x).square().mean(), model(x).square().mean()]
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward()
    grads = [{n: p.grad for n, p in m.named_parameters()} for m in (model, plain)]
    assert_same(grads[0], grads[1], tolerance=1e-6)
    model.zero_grad()
    hooked.backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(2 * whole(p.grad), q.grad)


def test_a_penalty_on_gradients_trains_as_in_a_single_process(two_ranks: Ranks) -> None:
    two_ranks.run(_penalties)


class _InputPenalty(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(self.inner(x).square().sum(), x, create_graph=True)
        return grad


def _penalties() -> None:
    same_steps(lambda: _InputPenalty(zoo.build("used twice")), inputs=lambda s, r: 0.1 * vectors(s, r))
    expected = _penalty_on_parameters(zoo.build("used twice"), range(dist.get_world_size()))
    found = _penalty_on_parameters(simple_fsdp(zoo.build("used twice")), [dist.get_rank()])
    assert_same(found, expected, tolerance=1e-5)


def _penalty_on_parameters(model: nn.Module, ranks: Iterable[int]) -> dict[str, Any]:
    """Gradients of a loss with the norm of its mean gradient added to it."""
    loss = torch.stack([model(vectors(0, r)).square().mean() for r in ranks]).mean()
    first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    norms = [g.square().sum() for g in first]
    norm = torch.stack([n.full_tensor() if hasattr(n, "full_tensor") else n for n in norms]).sum()
    (loss + norm).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def test_a_third_derivative_through_a_reduction_is_refused(two_ranks: Ranks) -> None:
    two_ranks.run(_third)


def _third() -> None:
    model = simple_fsdp(zoo.build("used twice"))
    params = list(model.parameters())
    loss = model(vectors(0, 0)).square().mean()
    first = torch.autograd.grad(loss, params, create_graph=True)
    second = torch.autograd.grad(first[0].square().sum().full_tensor(), params[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        second[0].sum().full_tensor().backward()


@one_of_four
def test_a_shard_changed_between_forward_and_backward_is_an_error() -> None:
    model = simple_fsdp(mlp())
    loss = model(torch.ones(2, WIDE)).sum()
    with torch.no_grad():
        model[1][0].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"1\.0\.weight: was changed between forward and backward"):
        loss.backward()


class Clamps(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class AssignsData(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.compile
@one_of_four
@pytest.mark.parametrize(("kind", "lowering"), [(Clamps, "eager"), (AssignsData, "eager"), (Clamps, "aot_eager")])
def test_a_weight_changed_in_forward_is_an_error(kind: type[nn.Linear], lowering: str) -> None:
    forward = lowered(simple_fsdp(nn.Sequential(kind(6, 6))), lowering)
    with pytest.raises(Exception, match=r"0\.weight: was changed in place while it was unsharded"):
        forward(torch.ones(2, 6))


def test_selective_checkpoints_may_follow_a_read_of_the_same_weight(two_ranks: Ranks) -> None:
    two_ranks.run(_selective)


def _save_matmuls(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = zoo.build("used twice")

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.inner[0].weight.dtype)
        contexts = functools.partial(create_selective_checkpoint_contexts, _save_matmuls)
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)


def _selective() -> None:
    same_steps(Selective)


@one_of_four
def test_a_weight_that_forward_returns_stays_right() -> None:
    class Returns(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.weight

    model = simple_fsdp(Returns(6, 8))
    out, weight = model(torch.ones(2, 6))
    (out.sum() + weight.sum()).backward()
    assert weight.shape == (8, 6)
    assert model.weight.grad is not None
