"""Embeddings that are looked up where their shards are: training is the same, the weight does not travel."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from inductor_passes.collectives import ALL_TO_ALL, EXCHANGED, FQNS
from inductor_passes.ops.add_rows import ADD_ROWS, add_rows
from inductor_passes.runtime.agreement import forget_failures
from simplefsdp import simple_fsdp
from tests.compare import EVERY_LOWERING, LOWERINGS, lowered, same_steps, whole
from tests.graphs import ALL_GATHER, REDUCE_SCATTER, capture, nodes
from tests.models import batch, tiny_llama, train
from tests.ranks import Ranks

WORDS, COLUMNS = 11, 8


class Model(nn.Module):
    """Embeddings of words and, in between, of positions."""

    def __init__(self, padding_idx: int | None = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, COLUMNS, padding_idx=padding_idx)
        self.positions = nn.Embedding(5, COLUMNS)
        self.output = nn.Linear(COLUMNS, 3)

    def forward(self, tokens: Tensor) -> Any:
        return self.output(self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))


def tokens(step: int, rank: int, length: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(WORDS, (2, length), generator=generator)


def exchanged(model: nn.Module, **kwargs: Any) -> nn.Module:
    return simple_fsdp(model, embedding_lookup="exchange", **kwargs)


@pytest.mark.parametrize("lowering", EVERY_LOWERING)
def test_training_is_that_of_the_whole_model(two_ranks: Ranks, lowering: str) -> None:
    two_ranks.run(_trains, lowering)


def _trains(lowering: str) -> None:
    model: Any = same_steps(Model, lowering, wrap=exchanged, inputs=tokens, fullgraph=True)
    for embedding in (model.words, model.positions):
        assert embedding.weight.placements == (Shard(1),)
    assert model.output.weight.placements == (Shard(0),)


def test_a_divisor_and_an_output_dtype_are_kept_on_four_ranks(four_ranks: Ranks) -> None:
    four_ranks.run(_divided)


def _divided() -> None:
    same_steps(
        Model, wrap=lambda m: exchanged(m, gradient_divide_factor=4.0, mp_policy=MixedPrecisionPolicy()), inputs=tokens
    )
    one, other = (
        simple_fsdp(Model().double(), gradient_divide_factor=3.0, embedding_lookup=lookup)
        for lookup in ("gather", "exchange")
    )
    other.load_state_dict({name: whole(value) for name, value in one.state_dict().items()})
    for model in (one, other):
        model(tokens(0, dist.get_rank())).square().mean().backward()
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(whole(b.grad), whole(a.grad), msg=name)


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_gradients_of_bf16_embeddings_are_summed_in_float32(two_ranks: Ranks, lowering: str) -> None:
    two_ranks.run(_sums, lowering)


def _sums(lowering: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = exchanged(nn.Sequential(nn.Embedding(2, 4)), mp_policy=policy)
    # A sum in bfloat16 would stay at 256. Tokens need not lie side by side.
    lowered(model, lowering)(torch.ones(1200, dtype=torch.int64)[::2]).sum().backward()
    assert whole(model[0].weight.grad).tolist() == [[0.0] * 4, [600.0] * 4]


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
def test_tokens_and_embeddings_travel_and_no_weight_of_an_embedding() -> None:
    model = exchanged(tiny_llama(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    graphs = capture(model, *batch(0, 0), plan="block")
    fqn = "tok_embeddings.weight"
    forward, backward = graphs.forward, graphs.backward
    for graph in (forward, backward):
        marked = [node for node in graph.nodes if fqn in node.meta.get(FQNS, ())]
        assert not marked
    own = [node for node in nodes(forward, ALL_GATHER) if node.meta.get(EXCHANGED) == fqn]
    assert [node.meta["val"].dtype for node in own] == [torch.int64]
    for graph in (forward, backward):
        (exchange,) = nodes(graph, ALL_TO_ALL)
        assert exchange.meta[EXCHANGED] == fqn
        value = exchange.meta["val"]
        assert value.dtype is torch.bfloat16
        assert value.numel() == batch(0, 0)[0].numel() * 36
    assert len(nodes(backward, ADD_ROWS)) == 1
    assert nodes(backward, REDUCE_SCATTER)


def test_compiled_graphs_of_other_numbers_of_tokens_on_two_ranks_are_an_error_on_both(two_ranks: Ranks) -> None:
    two_ranks.run(_other_numbers)


def _other_numbers() -> None:
    torch.manual_seed(0)
    forward = torch.compile(exchanged(Model()), backend="simplefsdp", options=LOWERINGS["aot_eager"], dynamic=True)
    forward(tokens(0, 0)).sum().backward()
    with pytest.raises(RuntimeError, match=r"all_gather_into_tensor of int64\[\d+\].*words.weight"):
        forward(tokens(0, 0, length=3 + dist.get_rank())).sum().backward()
    dist.barrier()
    forget_failures()


def test_eager_lookups_of_other_parameters_are_an_error_before_the_step(two_ranks: Ranks) -> None:
    two_ranks.run(_other_lookups)


class OfRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(4, 2), nn.Embedding(4, 2)])

    def forward(self, tokens: Tensor) -> Any:
        return self.embeddings[dist.get_rank()](tokens)


def _other_lookups() -> None:
    torch.manual_seed(0)
    model = exchanged(OfRank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(3)).sum().backward()
    with pytest.raises(RuntimeError, match=r"lookup of 3 tokens in embeddings.[01].weight"):
        optimizer.step()
    dist.barrier()
    forget_failures()  # or the watch finds the difference once more where a later test pauses


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_an_accumulation_has_the_sum_of_its_parts(two_ranks: Ranks, lowering: str) -> None:
    two_ranks.run(_accumulates, lowering)


def _accumulates(lowering: str) -> None:
    torch.manual_seed(0)
    plain = Model()
    torch.manual_seed(0)
    model: Any = exchanged(Model())
    forward = lowered(model, lowering)
    for part in range(3):
        model.set_requires_gradient_sync(part == 2)
        batches = [tokens(part, rank) for rank in range(dist.get_world_size())]
        plain(torch.cat(batches)).square().mean().backward()
        forward(batches[dist.get_rank()]).square().mean().backward()
    for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(whole(found.grad), expected.grad, msg=name)


def test_a_second_derivative_is_that_of_a_gathered_weight(two_ranks: Ranks) -> None:
    two_ranks.run(_second_derivative)


def _second_derivative() -> None:
    found = []
    for lookup in ("gather", "exchange"):
        torch.manual_seed(0)
        model: Any = simple_fsdp(Model(), embedding_lookup=lookup)
        params = list(model.parameters())
        first = torch.autograd.grad(model(tokens(0, dist.get_rank())).pow(3).mean(), params, create_graph=True)
        second = torch.autograd.grad(first[0].square().sum().full_tensor(), params[:1])
        found.append([whole(each) for each in (*first, *second)])
    torch.testing.assert_close(found[1], found[0])


def test_a_weight_that_forward_reads_otherwise_too_is_gathered_there(two_ranks: Ranks) -> None:
    two_ranks.run(_read_otherwise)


class Tied(Model):
    def forward(self, tokens: Tensor) -> Any:
        return super().forward(tokens) @ self.output.weight @ self.words.weight.t()


def _read_otherwise() -> None:
    for lowering in ("eager", "aot_eager"):
        same_steps(lambda: Tied(padding_idx=None), lowering, wrap=exchanged, inputs=tokens, steps=2)


@pytest.mark.usefixtures("one_of_four")
def test_what_cannot_be_exchanged_is_gathered_or_refused_if_it_was_chosen() -> None:
    model: Any = exchanged(nn.Sequential(nn.Embedding(5, 8), nn.Embedding(5, 6)))
    assert [each.weight.placements for each in model] == [(Shard(1),), (Shard(0),)]
    columns = r"its 6 columns cannot be dealt to 4 ranks in equal parts"
    with pytest.raises(ValueError, match=rf"embedding_lookup: 0.weight: {columns}"):
        simple_fsdp(nn.Sequential(nn.Embedding(5, 6)), embedding_lookup={"0.*": "exchange"})
    with pytest.raises(ValueError, match=rf"embedding_lookup='exchange': no weight can stay where it is: .*{columns}"):
        exchanged(nn.Sequential(nn.Embedding(5, 6)))
    with pytest.raises(ValueError, match="another module holds it too"):
        exchanged(tiny_llama(tie_embeddings=True))
    with pytest.raises(ValueError, match=r"the model has no torch.nn.Embedding"):
        exchanged(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="it is offloaded"):
        exchanged(Model(), offload_policy=CPUOffloadPolicy())
    with pytest.raises(ValueError, match="mode 'replicate' holds several copies of each shard"):
        exchanged(Model(), mode="replicate")
    with pytest.raises(ValueError, match=r"0.weight: a Linear does not look it up as torch.nn.Embedding does"):
        simple_fsdp(nn.Sequential(nn.Linear(4, 4)), embedding_lookup={"*": "exchange"})
    with pytest.raises(ValueError, match=r"embedding_lookup: unknown choice 'exchanges'.*'exchange'"):
        simple_fsdp(Model(), embedding_lookup="exchanges")
    with pytest.raises(ValueError, match=r"embedding_lookup: unknown pattern 'word\*x'"):
        simple_fsdp(Model(), embedding_lookup={"word*x": "exchange"})
    with pytest.raises(TypeError, match=r"embedding_lookup: expected 'gather', 'exchange' or {glob: one}, found True"):
        simple_fsdp(Model(), embedding_lookup=True)  # type: ignore[arg-type]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallel = parallelize_module(Model(padding_idx=None), mesh["tp"], {"words": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"words.weight: it is tensor parallel"):
        simple_fsdp(parallel, mesh["dp"], embedding_lookup={"words*": "exchange"})


@pytest.mark.parametrize("padding_idx", [-1, 1])
def test_rows_of_a_token_are_added_up(padding_idx: int) -> None:
    rows, indices = torch.randn(6, 3), torch.tensor([1, 0, 1, 3, 3, 1])
    expected = torch.zeros(5, 3)
    for row, index in zip(rows, indices.tolist(), strict=True):
        expected[index] += row if index != padding_idx else 0
    torch.testing.assert_close(add_rows(rows, indices, 5, padding_idx), expected)


def test_functional_call_looks_up_what_it_is_given(two_ranks: Ranks) -> None:
    two_ranks.run(_functional)


def _functional() -> None:
    model: Any = exchanged(Model())
    weight = torch.ones(WORDS, COLUMNS)
    found = torch.func.functional_call(model, {"words.weight": weight}, (tokens(0, 0),))
    assert found.shape == (2, 5, 3)
    assert isinstance(model.words.weight, DTensor)


def test_losses_of_a_llama_are_those_of_gathering(two_ranks: Ranks) -> None:
    two_ranks.run(_llama)


def _llama() -> None:
    one = simple_fsdp(tiny_llama())
    other = exchanged(tiny_llama())
    expected, *_ = train(one, one, 2, dist.get_rank())
    found, *_ = train(other, other, 2, dist.get_rank())
    torch.testing.assert_close(found, expected)
