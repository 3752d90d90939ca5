"""A ladder of systems says where numbers first differ, on all ranks alike."""

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from inductor_passes.runtime.agreement import forget_failures
from simplefsdp.analysis.ladder import LADDER, Comparison, Rung, Training, climb, distance
from simplefsdp.rehearsal.systems import Parallelism
from tests.models import batch, tiny_llama
from tests.ranks import Ranks

EAGER = next(rung for rung in LADDER if rung.name == "eager")
FSDP2 = next(rung for rung in LADDER if rung.name == "fsdp2")


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(0, 50))
def test_a_distance_counts_the_numbers_that_can_be_represented(start: float, steps: int) -> None:
    one = torch.tensor([start])
    other = one
    for _ in range(steps):
        other = torch.nextafter(other, torch.tensor([math.inf]))
    expected = steps
    if other.isinf().any():
        expected = int(distance(one, torch.tensor([math.inf])))
    assert distance(one, other).tolist() == distance(other, one).tolist() == [expected]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_distance_is_in_numbers_of_the_tensors_dtype(dtype: torch.dtype) -> None:
    one = torch.tensor([1.0, -1.0, 0.0], dtype=dtype)
    eps = torch.finfo(dtype).eps
    assert distance(one, one + torch.tensor([eps, -2 * eps, -0.0], dtype=dtype)).tolist() == [1, 2, 0]
    assert distance(torch.tensor([0.0]), torch.tensor([-0.0])).tolist() == [0]
    assert distance(torch.tensor([1.0]), torch.tensor([math.nan])).item() > 1_000_000
    assert distance(torch.tensor([3]), torch.tensor([5])).tolist() == [2]
    assert distance(torch.tensor([1 + 1j]), torch.tensor([1 + 1j])).max() == 0


def training(model: nn.Module, policy: MixedPrecisionPolicy | None = None, **changes: Any) -> Training:
    def loss(forward: Callable[..., Any], tokens: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(forward(tokens).float().flatten(0, 1), targets.flatten())

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sgd = functools.partial(torch.optim.SGD, lr=0.05)
    fields: dict[str, Any] = {"inputs": batch, "loss": loss, "steps": 3, "optimizer": sgd, "mesh": mesh}
    return Training(model=model, mp_policy=policy or MixedPrecisionPolicy(), **(fields | changes))


def damaged(hurt: Callable[[nn.Module, dict[str, int]], None]) -> Rung:
    """The rung ``eager`` with a forward that ``hurt(model, calls)`` is called before."""

    def wrap(model: nn.Module, parallelism: Parallelism) -> Callable[..., Any]:
        forward: Any = EAGER.wrap(model, parallelism) if EAGER.wrap else None
        calls = {"number": 0}

        def call(*args: Any) -> Any:
            hurt(model, calls)
            calls["number"] += 1
            return forward(*args)

        return call

    return Rung("damaged", wrap, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)], ids=["fp32", "bf16"]
)
def test_rungs_without_fused_kernels_have_the_bits_of_fsdp2_on_two_ranks(
    two_ranks: Ranks, policy: MixedPrecisionPolicy
) -> None:
    two_ranks.run(_climbs, policy)


def _climbs(policy: MixedPrecisionPolicy) -> None:
    rungs = [rung for rung in LADDER if rung.name != "inductor"]
    results = list(climb(training(tiny_llama(), policy), rungs))
    compared = [result for result in results if isinstance(result, Comparison)]
    names = [rung.name for rung in rungs]
    assert [(one.against, one.rung) for one in compared] == list(itertools.pairwise(names))
    assert [one.keeps_bits for one in compared] == [False, True, True, True, True]
    assert [one.first for one in compared[1:]] == [None] * 4
    assert all(one.passed(0.02) for one in compared)


def test_one_bit_of_one_rank_is_found_on_all_ranks_with_its_step_and_parameter(two_ranks: Ranks) -> None:
    two_ranks.run(_one_bit)


def _one_bit() -> None:
    def hurt(model: nn.Module, calls: dict[str, int]) -> None:
        if calls["number"] == 1 and dist.get_rank() == 1:
            weight: Any = dict(model.named_parameters())["layers.1.ffn_norm.weight"]
            with torch.no_grad():
                local = weight.to_local()
                local[0] = torch.nextafter(local[0], torch.tensor(2.0))

    exact, result = climb(training(tiny_llama()), [FSDP2, EAGER, damaged(hurt)])
    assert isinstance(exact, Comparison)
    assert (exact.keeps_bits, exact.first) == (True, None)
    assert isinstance(result, Comparison)
    assert result.keeps_bits
    assert not result.passed(1.0)
    assert result.first is not None
    assert result.first.step == 1  # of steps 0, 1 and 2
    assert result.first.label.startswith(("the loss", "the gradient of "))
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, result)
    assert everywhere[0] == everywhere[1]


class Counting(nn.Module):
    """A model with a running mean that its output does not depend on, and a number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.output = nn.Embedding(30, 8), nn.BatchNorm1d(8), nn.Linear(8, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.output(self.norm(x.flatten(0, 1)).view_as(x))


def test_a_buffer_that_one_rank_changes_is_found_and_those_of_a_single_process_are_left_out(two_ranks: Ranks) -> None:
    two_ranks.run(_buffers)


def _buffers() -> None:
    def hurt(model: nn.Module, calls: dict[str, int]) -> None:
        if calls["number"] == 2 and dist.get_rank() == 1:
            cast(Tensor, model.get_submodule("norm").running_mean).mul_(2.0)

    torch.manual_seed(0)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-3)
    model = Counting()
    whole, exact, hurt_once, back = climb(
        training(model, optimizer=optimizer), [LADDER[0], FSDP2, EAGER, damaged(hurt), LADDER[0]]
    )
    for result in (whole, back):
        assert isinstance(result, Comparison)
        assert result.largest is None or not result.largest.label.startswith("the buffer")
    assert isinstance(exact, Comparison)
    assert (exact.keeps_bits, exact.first) == (True, None)
    assert isinstance(hurt_once, Comparison)
    assert hurt_once.first is not None
    assert (hurt_once.first.step, hurt_once.first.label) == (2, "the buffer norm.running_mean")
    assert not hurt_once.passed(1.0)


def test_a_gradient_that_is_not_there_and_a_rung_that_raises_are_said(two_ranks: Ranks) -> None:
    two_ranks.run(_missing)


def _missing() -> None:
    def freeze(model: nn.Module, _calls: dict[str, int]) -> None:
        dict(model.named_parameters())["norm.weight"].requires_grad_(False)

    def fail(_model: nn.Module, _calls: dict[str, int]) -> None:
        raise RuntimeError("planted")

    failed, missing = climb(training(tiny_llama()), [EAGER, damaged(fail)._replace(name="fails"), damaged(freeze)])
    assert failed == ("fails", "RuntimeError: planted")
    assert isinstance(missing, Comparison)
    assert missing.against == "eager"
    assert missing.largest is not None
    assert (missing.largest.step, missing.largest.label) == (0, "the gradient of norm.weight")
    assert missing.largest.ulps == -1
    assert not missing.passed(math.inf)
    dist.barrier()
    forget_failures()


def test_bits_are_not_promised_where_a_parameter_is_read_twice(two_ranks: Ranks) -> None:
    two_ranks.run(_twice)


class Twice(nn.Module):
    """A layer that runs twice in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(30, 8), nn.Linear(8, 8)
        self.output = nn.Linear(8, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.layer(self.layer(self.embedding(tokens)).relu()))


class Tied(Twice):
    """An output layer that shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.layer(self.embedding(tokens)))


def _twice() -> None:
    torch.manual_seed(0)
    for model in (Twice(), Tied()):
        weights = copy.deepcopy(model.state_dict())
        (result,) = climb(training(model), [FSDP2, EAGER])
        assert isinstance(result, Comparison)
        assert not result.keeps_bits
        assert result.passed(1e-5)
        torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)  # each rung trained a copy


def test_on_four_ranks_bits_are_not_promised(four_ranks: Ranks) -> None:
    four_ranks.run(_on_four)


def _on_four() -> None:
    single, fsdp2 = LADDER[:2]
    to_whole, to_fsdp2 = climb(training(tiny_llama()), [single, fsdp2, EAGER])
    for result in (to_whole, to_fsdp2):
        assert isinstance(result, Comparison)
        assert not result.keeps_bits
        assert result.passed(1e-5)
