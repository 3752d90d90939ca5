"""GaLore: its search of subspaces, its formula, its bytes, and its values on sharded parameters."""

import logging
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from simplefsdp import distribute_optimizer, galore, simple_fsdp
from simplefsdp.models import llama
from simplefsdp.training.checkpoint import StrictLoadPlanner
from simplefsdp.training.optimizers.low_rank import GaLore, has_rows, search_subspace
from simplefsdp.training.optimizers.ownership import name_of
from simplefsdp.training.optimizers.probe import way_of
from tests.models import tiny_llama
from tests.ranks import Ranks, fake_group
from tests.simplefsdp.training.optimizers.test_distribute import MODES, Model, assert_same_values, set_gradients
from tests.watch import Collectives


def decaying(rows: int, columns: int, decay: float) -> Tensor:
    """A matrix whose singular values fall by a factor each."""
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(size, min(rows, columns)))[0] for size in (rows, columns))
    return left @ torch.diag(decay ** torch.arange(min(rows, columns)).float()) @ right.mT


@pytest.mark.parametrize("shape", [(40, 60), (40, 40), (7, 90), (60, 40)])
def test_a_subspace_keeps_nearly_as_much_as_singular_vectors_do(shape: tuple[int, int]) -> None:
    for decay in (0.5, 0.9, 0.99):
        matrix = decaying(*shape, decay)
        rank = 5
        vectors, energy = search_subspace(matrix, rank, seed=3)
        assert vectors.shape == (shape[0], rank)
        torch.testing.assert_close(vectors.mT @ vectors, torch.eye(rank), atol=1e-5, rtol=0)
        best = torch.linalg.svdvals(matrix).square()
        share = best[:rank].sum() / best.sum()
        assert (0.9 if decay == 0.99 else 0.98) * share <= energy <= share * (1 + 1e-5)
        torch.testing.assert_close((vectors.mT @ matrix).norm() ** 2 / matrix.norm() ** 2, energy)


def test_a_matrix_of_that_rank_is_kept_whole_and_one_of_zeros_is_no_trouble() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(20, 4) @ torch.randn(4, 30)
    vectors, energy = search_subspace(matrix.bfloat16().float(), 6, seed=0)
    assert energy > 0.999
    torch.testing.assert_close(vectors @ (vectors.mT @ matrix), matrix, atol=0.05, rtol=0.05)
    assert search_subspace(torch.zeros(5, 6), 3, seed=0)[1] == 0
    assert search_subspace(torch.ones(5, 2), 4, seed=0)[0].shape == (5, 4)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8), (6, 5, 2)])
def test_steps_are_those_of_the_paper(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    value = torch.randn(shape)
    gradients = [torch.randn(shape) for _ in range(5)]
    weight = nn.Parameter(value.clone())
    optimizer = GaLore([weight], 3, lr=0.1, refresh=2, scale=0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2, seed=7)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    expected, transposed = value.flatten(1), shape == (10, 6)
    first = second = projection = torch.zeros(())
    for t, gradient in enumerate(gradients):
        g = gradient.flatten(1).mT if transposed else gradient.flatten(1)
        if t % 2 == 0:
            projection, _ = search_subspace(g, 3, seed=7 + t)
        low = projection.mT @ g
        first, second = 0.8 * first + 0.2 * low, 0.9 * second + 0.1 * low**2
        normal = (first / (1 - 0.8 ** (t + 1))) / ((second / (1 - 0.9 ** (t + 1))).sqrt() + 1e-6)
        update = 0.5 * projection @ normal
        expected = expected * (1 - 0.1 * 0.2) - 0.1 * (update.mT if transposed else update)
    torch.testing.assert_close(weight.detach().flatten(1), expected, rtol=1e-4, atol=1e-5)
    assert all(isinstance(state, Tensor) for state in optimizer.state[weight].values())
    assert optimizer.state[weight]["exp_avg"].shape == (3, max(value.flatten(1).shape))


def low_gradients() -> list[Tensor]:
    """Gradients of a matrix of 8 rows, which GaLore of rank 8 turns and does not narrow."""
    torch.manual_seed(0)
    return [torch.randn(8, 96) * 10 ** -torch.rand(8, 96) for _ in range(4)]


def steps_of_galore(**settings: Any) -> tuple[list[Tensor], list[Tensor], GaLore]:
    """Return the projected gradients of each step, and what GaLore made of them at learning rate 1."""
    weight = nn.Parameter(torch.zeros(8, 96))
    optimizer = GaLore([weight], 8, lr=1.0, scale=1.0, refresh=10, **settings)
    low, made = [], []
    for gradient in low_gradients():
        before = weight.detach().clone()
        weight.grad = gradient
        optimizer.step()
        projection = optimizer.state[weight]["projection"]
        low.append(projection.mT @ gradient)
        made.append(projection.mT @ (before - weight.detach()))
    return low, made, optimizer


@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_factored_moments_are_those_of_torchs_adafactor(beta1: float) -> None:
    low, made, _ = steps_of_galore(moments="factored", betas=(beta1, 0.999))
    first = torch.zeros(8, 96)
    stand_in = nn.Parameter(torch.zeros(8, 96))
    # A learning rate that no root mean square of the parameter and no number of steps makes smaller.
    adafactor = torch.optim.Adafactor([stand_in], lr=0.25, eps=(None, 1.0))
    for gradient, found in zip(low, made, strict=True):
        with torch.no_grad():
            stand_in.zero_()
        stand_in.grad = gradient
        adafactor.step()
        first = beta1 * first - (1 - beta1) * stand_in.detach() / 0.25
        torch.testing.assert_close(found, first, rtol=1e-4, atol=1e-5)


def test_moments_in_8_bits_are_those_of_torchao() -> None:
    adam = pytest.importorskip("torchao.optim.adam")
    low, made, optimizer = steps_of_galore(moments="8bit", betas=(0.8, 0.9), eps=1e-6)
    moments = [adam.OptimState8bit.zeros((8, 96), signed) for signed in (True, False)]
    for step, (gradient, found) in enumerate(zip(low, made, strict=True)):
        value = torch.zeros(8, 96)
        rest = (None, torch.tensor(1.0), 0.8, 0.9, 0.0, 1e-6, True, False)
        adam.single_param_adam(value, gradient, torch.tensor(step + 1.0), *moments, *rest)
        torch.testing.assert_close(found, -value, rtol=1e-3, atol=1e-4)
    (state,) = optimizer.state.values()
    assert torch.equal(state["exp_avg_sq"], moments[1].codes)
    assert {n: (v.nbytes, v.numel()) for n, v in state.items() if n.startswith("exp_avg")} == {
        "exp_avg": (768, 768),
        "exp_avg_scale": (12, 3),
        "exp_avg_sq": (768, 768),
        "exp_avg_sq_scale": (12, 3),
    }


def test_moments_in_8_bits_need_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim.quant_utils", None)
    with pytest.raises(ImportError, match="moments: '8bit' needs the package torchao"):
        GaLore([nn.Parameter(torch.ones(4, 4))], 2, moments="8bit")


def test_the_trial_of_galore_finds_what_is_known_of_it() -> None:
    weight, bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    optimizer = GaLore([{"params": [weight]}, {"params": [bias], "algorithm": "adamw"}], 2)
    assert [way_of(optimizer, 0), way_of(optimizer, 1)] == ["owners", "shards"]


def test_state_takes_60_percent_less_than_that_of_adamw_at_the_settings_of_the_paper() -> None:
    # The shapes of a 7B Llama at a sixteenth of their sides; rank 1024 of 4096 is a quarter of the width.
    model = llama.build("debug", dim=256, layers=8, heads=8, kv_heads=8, ffn_dim=688, vocab_size=512, max_seq_len=8)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizers = [galore(model, rank=64), torch.optim.AdamW(model.parameters())]
    totals = []
    for optimizer in optimizers:
        optimizer.step()
        state = [value for of in optimizer.state.values() for value in of.values()]
        totals.append(sum(value.nbytes for value in state))
    assert totals[0] < 0.4 * totals[1]


def rows_of(model: Any) -> list[Any]:
    """Matrices of a model that can be stepped by rows."""
    return [
        p for p in model.parameters() if p.ndim == 2 and p.dtype == torch.float32 and p.requires_grad and has_rows(p)
    ]


def make(model: Any, distribute: bool, moments: Any = "full", on: str = "owners") -> Any:
    hidden = [p for p in model.parameters() if p.ndim == 2 and p.dtype == torch.float32 and p.requires_grad]
    rest = [p for p in model.parameters() if p.requires_grad and not any(p is other for other in hidden)]
    groups = [{"params": hidden, "on": on}, {"params": rest, "algorithm": "adamw"}]
    optimizer = GaLore(groups, 2, lr=0.1, refresh=3, moments=moments)
    return distribute_optimizer(optimizer, exchange_bytes=600) if distribute else optimizer


@pytest.mark.parametrize(
    ("mode", "moments"),
    [*((mode, "full") for mode in ("fully", "hybrid", "columns", "tensor parallel")), ("fully", "8bit")],
)
def test_sharded_parameters_have_the_values_of_one_process(four_ranks: Ranks, mode: str, moments: str) -> None:
    four_ranks.run(_sharded, mode, moments)


def _sharded(mode: str, moments: str) -> None:
    plain, model = Model(0), MODES[mode](Model(0))
    optimizers = [make(plain, distribute=False, moments=moments), make(model, distribute=True, moments=moments)]
    for step in range(8):
        set_gradients(plain, model, step)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_values(MODES[mode], plain, model)


@pytest.mark.parametrize(("mode", "count"), [("fully", 3), ("hybrid", 3), ("columns", 0), ("tensor parallel", 0)])
def test_rows_have_the_values_of_one_process_up_to_rounding(four_ranks: Ranks, mode: str, count: int) -> None:
    four_ranks.run(_by_rows, mode, count)


def _by_rows(mode: str, count: int) -> None:
    plain, model = Model(0), MODES[mode](Model(0))
    optimizers: list[Any] = [make(plain, distribute=False), make(model, distribute=True, on="rows")]
    for step in range(8):
        set_gradients(plain, model, step)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_values(MODES[mode], plain, model, to_rounding=True)
    by_rows = rows_of(model)
    assert len(by_rows) == count
    full: Any = get_optimizer_state_dict(model, optimizers[1], options=StateDictOptions(full_state_dict=True))
    for name, param in plain.named_parameters():
        for key, value in optimizers[0].state.get(param, {}).items():
            torch.testing.assert_close(full["state"][name][key], value, rtol=1e-4, atol=1e-5)
    for param in by_rows:
        state = optimizers[1].state[param]
        assert [*state] == ["step", "projection", "exp_avg", "exp_avg_sq"]
        assert state["projection"].shape == (param.shape[1], 2)
        assert state["exp_avg"].shape == (2, param.shape[0])
        assert state["exp_avg"]._local_tensor.shape == (2, param._local_tensor.shape[0])


def test_rows_send_nothing_between_searches(four_ranks: Ranks) -> None:
    four_ranks.run(_between_searches)


def _between_searches() -> None:
    model = MODES["fully"](Model(0))
    optimizer = distribute_optimizer(GaLore([{"params": rows_of(model), "on": "rows"}], 2, refresh=3))
    assert str(optimizer.simple_fsdp_distribution) == "GaLore steps 3 on rows"
    issued = []
    for _ in range(5):
        set_gradients(Model(0), model, 1)
        with Collectives() as collectives:
            optimizer.step()
        issued.append(len(collectives.seen))
    assert issued[0] == issued[3] > 0
    assert issued[1] == issued[2] == issued[4] == 0


def test_a_search_that_fails_leaves_no_rank_waiting(four_ranks: Ranks) -> None:
    four_ranks.run(_failing)


def _failing() -> None:
    model = MODES["fully"](Model(0))
    params = rows_of(model)
    optimizer = distribute_optimizer(GaLore([{"params": params, "on": "rows"}], 2))
    set_gradients(Model(0), model, 1)
    params[2].grad._local_tensor.fill_(math.nan)
    failure = None
    try:
        optimizer.step()
    except torch.linalg.LinAlgError as error:
        failure = str(error)
    found: list[Any] = [None] * 4
    torch.distributed.all_gather_object(found, failure)
    assert [each is None for each in found] == [True, True, False, True]


def test_a_model_is_stepped_by_rows_where_that_is_possible() -> None:
    with fake_group(4):
        model: Any = simple_fsdp(tiny_llama(layers=1))
        optimizer = galore(model, 8, on="rows")
        owned = {name_of(each.param) for each in optimizer.simple_fsdp_distribution.owned}
        assert owned == {
            f"layers.0.{name}.weight" for name in (*(f"attention.w{i}" for i in "qkvo"), "feed_forward.w2")
        }
        assert str(optimizer.simple_fsdp_distribution).startswith("GaLore steps 5 on owners, 2 on rows, ")


@pytest.mark.parametrize(
    ("moments", "mode", "before", "since"),
    [
        *((moments, "tensor parallel", "owners", "owners") for moments in ("full", "8bit", "factored")),
        *(("full", "fully", *places) for places in (("rows", "rows"), ("rows", "owners"), ("owners", "rows"))),
    ],
)
def test_a_run_is_resumed_in_the_middle_of_a_period_on_other_ranks(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, moments: str, mode: str, before: str, since: str
) -> None:
    four_ranks.run(_save, str(tmp_path), moments, mode, before)
    two_ranks.run(_load, str(tmp_path), moments, since, "rows" in (before, since))


def _save(folder: str, moments: str, mode: str, on: str) -> None:
    model = MODES[mode](Model(0))
    optimizer = make(model, distribute=True, moments=moments, on=on)
    for step in range(4):
        set_gradients(Model(0), model, step)
        optimizer.step()
    optimizer.zero_grad()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def _load(folder: str, moments: str, on: str, to_rounding: bool) -> None:
    plain, model = Model(0), MODES["fully"](Model(7))
    reference = make(plain, distribute=False, moments=moments)
    optimizer = make(model, distribute=True, moments=moments, on=on)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder, planner=StrictLoadPlanner())
    set_model_state_dict(model, weights)
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(strict=False))
    for step in range(8):
        set_gradients(plain, model, step)
        reference.step()
        if step >= 4:
            optimizer.step()
    assert_same_values(MODES["fully"], plain, model, to_rounding=to_rounding)


def test_a_model_is_split_and_what_a_search_keeps_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama(layers=2)
    with caplog.at_level(logging.INFO, "simplefsdp"):
        optimizer = galore(model, 12, lr=0.01, adamw=["*.wo.*"], refresh=2)
        for param in model.parameters():
            param.grad = param.detach().clone()
        for _ in range(3):
            optimizer.step()
    names = {id(param): name for name, param in model.named_parameters()}
    hidden, rest = ([names[id(param)] for param in group["params"]] for group in optimizer.param_groups)
    assert "layers.0.attention.wq.weight" in hidden
    assert "layers.0.attention.wk.weight" in rest  # 12 rows are no higher rank
    assert {"layers.0.attention.wo.weight", "tok_embeddings.weight", "output.weight", "norm.weight"} <= set(rest)
    assert caplog.text.count(f"GaLore searched {len(hidden)} subspaces, which keep ") == 2
    assert "AdamW steps tok_embeddings.weight" in caplog.text


def test_what_galore_cannot_step_is_named() -> None:
    model = tiny_llama(layers=1)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"rank": 0}, "rank: expected a positive number, found 0"),
        ({"rank": 40}, "rank: the model has no hidden matrix of a higher rank than 40"),
        ({"rank": 4, "refresh": 0}, "refresh: expected a positive number, found 0"),
        ({"rank": 4, "moments": "4bit"}, r"moments: expected one of \('full', 'factored', '8bit'\), found '4bit'"),
        ({"rank": 4, "on": "shards"}, "on: expected 'owners' or 'rows', found 'shards'"),
        ({"rank": 4, "on": "rows", "moments": "factored"}, "moments: of rows they are 'full', .* found 'factored'"),
        ({"rank": 4, "scale": -1.0}, "scale: expected a number of at least 0, found -1.0"),
        ({"rank": 4, "betas": (1.0, 0.9)}, r"betas: expected from 0 to less than 1, found \(1.0, 0.9\)"),
        ({"rank": 4, "adamw": ["nothing"]}, "adamw: unknown parameter 'nothing'"),
    ]
    for options, message in bad:
        with pytest.raises(ValueError, match=message):
            galore(model, **options)
    with pytest.raises(ValueError, match=r"params: GaLore projects real matrices, found \(36,\) of torch.float32"):
        GaLore([model.norm.weight], 4)
    optimizer = GaLore([model.output.weight], 4)
    with pytest.raises(ValueError, match="algorithm: expected 'galore' or 'adamw', found 'sgd'"):
        optimizer.add_param_group({"params": [model.norm.weight], "algorithm": "sgd"})
    assert len(optimizer.param_groups) == 1
