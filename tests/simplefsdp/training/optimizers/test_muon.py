"""Muon of a model: its formula, its groups, and its values on sharded parameters."""

import logging
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from simplefsdp import muon, simple_fsdp
from simplefsdp.models import llama
from simplefsdp.training.optimizers.newton_schulz import Muon, iterate, newton_schulz
from simplefsdp.training.optimizers.probe import way_of
from tests.compare import whole
from tests.models import batch, tiny_llama
from tests.ranks import Ranks


@pytest.mark.parametrize("shape", [(3, 8, 20), (3, 20, 8), (1, 1, 7), (2, 64, 64)])
def test_newton_schulz_keeps_singular_vectors_and_brings_singular_values_near_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    found = newton_schulz(matrices).float()
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    rotated = left.mT @ found @ right.mT
    diagonal = rotated.diagonal(dim1=1, dim2=2)
    well = values > 0.05 * values[:, :1]  # five iterations do not lift smaller ones
    assert diagonal[well].min() > 0.6
    assert diagonal.max() < 1.25
    assert (rotated - torch.diag_embed(diagonal)).abs().max() < 0.05
    assert torch.equal(newton_schulz(torch.zeros(shape)), torch.zeros(shape).bfloat16())


@given(st.integers(1, 70), st.integers(1, 70), st.integers(2, 5))
def test_a_matrix_has_the_same_bits_alone_and_among_others(rows: int, columns: int, number: int) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(number, rows, columns)
    found = newton_schulz(matrices)
    assert torch.equal(found, torch.cat([newton_schulz(each[None]) for each in matrices]))
    batched = iterate(matrices, 5)  # as on a GPU
    assert (batched.float() - found.float()).norm() < 0.02 * found.float().norm()


def _step_alike(optimizers: Iterable[optim.Optimizer], ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> None:
    """Take a step of each optimizer with the same random gradients."""
    for one, other in zip(ours, theirs, strict=True):
        one.grad = torch.randn(one.shape)
        other.grad = one.grad.clone()
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.compile
def test_iterations_are_compiled_once_for_each_shape() -> None:
    torch.manual_seed(0)
    shapes = [(4 + i % 9, 6) for i in range(12)]  # more than the eight that Dynamo compiles without a word
    values = [torch.randn(shape) for shape in shapes]
    compiled, plain = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    optimizers = Muon(compiled, 0.05, compiled=True), Muon(plain, 0.05)
    torch._dynamo.reset()
    counters.clear()
    for _ in range(2):
        _step_alike(optimizers, compiled, plain)
        assert counters["stats"]["unique_graphs"] == len(set(shapes)) == 9
    for one, other in zip(compiled, plain, strict=True):
        assert (one - other).norm() < 0.002 * other.norm()


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_is_torchs_muon(scale: Any, nesterov: bool) -> None:
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in ((8, 12), (12, 8), (8, 12), (5, 5))]
    ours, theirs = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    optimizers = (
        Muon(ours, 0.05, momentum=0.9, nesterov=nesterov, scale=scale, weight_decay=0.2),
        optim.Muon(theirs, 0.05, momentum=0.9, nesterov=nesterov, adjust_lr_fn=scale, weight_decay=0.2),
    )
    for _ in range(4):
        _step_alike(optimizers, ours, theirs)
    for one, other, value in zip(ours, theirs, values, strict=True):
        moved = (other - value).norm()
        assert (one - other).norm() < 0.03 * moved  # both round to bfloat16, theirs the norm too


def test_the_rest_is_stepped_as_by_torchs_adamw() -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(7, 3)) for _ in range(2))
    optimizers = (
        Muon([{"params": [ours], "algorithm": "adamw"}], 0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2),
        optim.AdamW([theirs], 0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2),
    )
    for _ in range(3):
        ours.grad = torch.randn(7, 3)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(ours, theirs)
    assert optimizers[0].state[ours].keys() == optimizers[1].state[theirs].keys()


def test_heads_are_matrices_of_their_own() -> None:
    torch.manual_seed(0)
    weight, first, second = (nn.Parameter(torch.zeros(shape)) for shape in ((8, 6), (4, 6), (4, 6)))
    weight.grad = torch.randn(8, 6)
    first.grad, second.grad = weight.grad[:4].clone(), weight.grad[4:].clone()
    optimizer = Muon([{"params": [weight], "split_rows": 2}, {"params": [first, second]}])
    optimizer.step()
    assert torch.equal(weight, torch.cat([first, second]))


def test_the_trial_of_muon_finds_what_is_known_of_it() -> None:
    weight, bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    optimizer = Muon([{"params": [weight]}, {"params": [bias], "algorithm": "adamw"}])
    assert [way_of(optimizer, 0), way_of(optimizer, 1)] == ["owners", "shards"]


def test_a_model_is_split_as_its_users_do(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama(layers=2)
    with caplog.at_level(logging.INFO, "simplefsdp"):
        optimizer = muon(model, 0.05, adamw=["layers.0.*w2*"], split_rows={"*.wq.weight": 6}, adamw_lr=1e-3)
    names = {id(param): name for name, param in model.named_parameters()}
    groups = [([names[id(param)] for param in group["params"]], group) for group in optimizer.param_groups]
    hidden, heads, rest = groups
    assert all("wq" in name for name in heads[0])
    assert len(heads[0]) == 2
    assert [group["split_rows"] for _, group in groups] == [1, 6, 1]
    assert {"tok_embeddings.weight", "output.weight", "norm.weight"} <= set(rest[0])
    assert all(model.get_parameter(name).ndim == 2 for name in hidden[0])
    assert [name for name in rest[0] if "w2" in name] == [
        name for name in names.values() if "layers.0" in name and "w2" in name
    ]
    assert (hidden[1]["lr"], rest[1]["lr"]) == (0.05, 1e-3)
    assert sorted(name for each, _ in groups for name in each) == sorted(names.values())
    assert "AdamW steps tok_embeddings.weight" in caplog.text


@pytest.mark.parametrize("in_list", [False, True])
def test_outputs_are_told_from_hidden_matrices_of_the_same_shape(in_list: bool) -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 8)
            self.blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
            self.head = nn.Linear(8, 8, bias=False)

    model: nn.Module = Square()
    if in_list:
        model = nn.Sequential(model.embed, *model.blocks, model.head)  # type: ignore[arg-type, misc]
    optimizer = muon(model)
    names = {id(param): name for name, param in model.named_parameters()}
    rest = [names[id(param)] for param in optimizer.param_groups[1]["params"]]
    assert rest == (["0.weight", "3.weight"] if in_list else ["embed.weight", "head.weight"])


def test_what_muon_cannot_step_is_named() -> None:
    model = tiny_llama(layers=1)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"adamw": ["layer.*"]}, r"adamw: unknown parameter 'layer.\*'"),
        ({"split_rows": {"*.wqq.weight": 2}}, r"split_rows: unknown parameter '\*.wqq.weight'"),
        ({"split_rows": {"*.wq.weight": 7}}, r"split_rows: \(36, 36\) cannot be split into 7 equal matrices"),
        ({"split_rows": {"*.wq.weight": 0}}, "split_rows: expected a positive number, found 0"),
        ({"lr": -1.0}, r"lr: expected a number of at least 0, found -1.0"),
        ({"momentum": 1.0}, "momentum: expected from 0 to less than 1, found 1.0"),
        ({"adamw_betas": (0.9, 1.0)}, r"betas: expected from 0 to less than 1, found \(0.9, 1.0\)"),
        ({"iterations": 0}, "iterations: expected a positive number, found 0"),
        ({"scale": "rms"}, "scale: expected 'original' or 'match_rms_adamw', found 'rms'"),
        ({"adamw": ["*"]}, "model: it has no hidden matrix that muon could step"),
    ]
    for options, message in bad:
        with pytest.raises(ValueError, match=message):
            muon(model, **options)
    with pytest.raises(ValueError, match=r"params: muon steps real matrices, found \(36,\) of torch.float32"):
        Muon([model.norm.weight])
    with pytest.raises(TypeError, match="compiled: expected True or False, found 'max-autotune'"):
        muon(model, compiled="max-autotune")  # type: ignore[arg-type]
    optimizer = Muon([model.output.weight])
    with pytest.raises(ValueError, match="algorithm: expected 'muon' or 'adamw', found 'sgd'"):
        optimizer.add_param_group({"params": [model.norm.weight], "algorithm": "sgd"})
    assert len(optimizer.param_groups) == 1


def test_sharded_parameters_have_the_values_of_one_process(four_ranks: Ranks) -> None:
    four_ranks.run(_train)


def _train() -> None:
    plain = tiny_llama(layers=2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: llama.Llama = simple_fsdp(tiny_llama(layers=2), mesh, mode="hybrid_shard")
    options: Any = {"split_rows": {"*.wq.weight": 6}, "adamw_lr": 0.01, "exchange_bytes": 20_000}
    optimizers = [muon(each, 0.05, **options) for each in (plain, model)]
    for step in range(3):
        loss = model(*batch(step, 0))  # the same batch on all ranks
        loss.backward()
        expected = plain(*batch(step, 0))
        expected.backward()
        torch.testing.assert_close(loss, expected)
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            gradient = whole(param.grad)
            torch.testing.assert_close(gradient, other.grad, rtol=1e-4, atol=1e-6)
            other.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(whole(param), other.detach()), name
