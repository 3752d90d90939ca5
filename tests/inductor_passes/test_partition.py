"""Every rank gets the same graphs, whatever part of the parameters it holds."""

import re
import traceback

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx import Graph
from torch.utils.checkpoint import checkpoint

from inductor_passes.collectives import source_chain
from inductor_passes.partition import partition
from inductor_passes.torch_compat.aot_autograd import parameter_inputs
from simplefsdp import simple_fsdp
from tests.graphs import ALL_GATHER, REDUCE_SCATTER, capture, nodes
from tests.models import batch, tiny_llama
from tests.ranks import fake_group

pytestmark = pytest.mark.compile

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 6)
        self.mix = nn.Conv1d(6, 1, 1)
        self.up, self.down = nn.Linear(6, 9, bias=False), nn.Linear(9, 6, bias=False)

    def forward(self, x):
        weights = zip(self.qkv.weight.chunk(3), self.qkv.bias.chunk(3), strict=True)
        q, k, v = (nn.functional.linear(x, weight, bias) for weight, bias in weights)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(nn.functional.silu(self.up(x)))


class Uneven(nn.Module):
    """On four ranks most shards are uneven, and several of the last rank's are empty. Weighing them by size made
    ranks recompute different things, and hang."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 6)
        self.one, self.two = nn.Parameter(torch.randn(1, 6)), nn.Parameter(torch.randn(2))
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.a, self.b = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.randn(3, 6))

    def forward(self, tokens):
        x = self.embed(tokens) * (1 + self.one) + self.two.sum()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x = self.norm(x)
        y = nn.functional.linear(x, torch.cat([self.a, self.b])) + x @ self.embed.weight.t() @ self.embed.weight
        return y.square().mean()


def on_ranks(fn, ranks):
    results = []
    for rank in ranks:
        with fake_group(4, rank):
            torch.manual_seed(0)
            results.append(fn(simple_fsdp(Uneven(), mp_policy=BF16)))
    return results


TOKENS = torch.arange(8).remainder(5).view(2, 4)


@pytest.mark.parametrize("partitioner", ["min_cut", pytest.param("default", marks=pytest.mark.slow)])
@pytest.mark.parametrize("plan", [pytest.param("none", marks=pytest.mark.slow), "block"])
def test_ranks_issue_the_same_collectives_in_the_same_order(plan, partitioner):
    def collectives(model):
        captured = capture(model, TOKENS, plan=plan, partitioner=partitioner)
        return [
            (node.target, node.args[1:], node.meta["simplefsdp_fqns"], node.meta["val"].shape)
            for graph in (captured.forward, captured.backward)
            for node in graph.nodes
            if node.target in (ALL_GATHER, REDUCE_SCATTER)
        ]

    first, *others = on_ranks(collectives, (0, 2, 3))  # the first, one of fewer rows, and one with empty shards
    assert [target for target, *_ in first].count(REDUCE_SCATTER) == {"none": 23, "block": 4}[plan]
    assert others == [first] * 2


@pytest.mark.slow
def test_inductor_generates_the_same_sequence_on_every_rank():
    def sequence(model):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="simplefsdp", options={"plan": "none"}, fullgraph=True)
        with (
            torch._inductor.config.patch(fx_graph_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            _, code = run_and_get_code(lambda: compiled(TOKENS).backward())
        return [re.findall(r"(all_gather_into_tensor|reduce_scatter_tensor)\.default\(", part) for part in code]

    first, last = on_ranks(sequence, (0, 3))
    assert [part.count("reduce_scatter_tensor") for part in first] == [0, 23]
    assert first[0].count("all_gather_into_tensor") == 23
    assert first == last


@pytest.mark.usefixtures("one_of_four")
def test_nodes_before_a_gather_are_in_both_graphs_and_shards_keep_their_shapes():
    model = simple_fsdp(tiny_llama(layers=1, ffn_dim=9), mp_policy=BF16)
    captured = capture(model, *batch(0, 0))
    shards = {fqn: p.to_local().shape for fqn, p in model.named_parameters()}
    shapes = set(shards.values())
    for graph in (captured.forward, captured.backward):
        for index, (shard,) in parameter_inputs(graph).items():
            # Also of the embedding, which backward does not gather.
            assert shard.meta["val"].shape == shards[captured.params[index].fqn]
        for gather in nodes(graph, ALL_GATHER):
            (cast,) = gather.all_input_nodes
            assert cast.meta["val"].dtype is torch.bfloat16
            shard = source_chain(gather)[0].all_input_nodes[0]
            assert shard.meta["val"].dtype is torch.float32
            assert shard.meta["val"].shape in shapes


class GathersTwice(nn.Linear):
    """Reads its weight, cast, and its shard by a gather of its own, not cast."""

    def forward(self, x):
        shard = self._parameters["weight"].to_local()
        whole = torch.ops._c10d_functional.all_gather_into_tensor(shard, 4, self._parameters["weight"].group)
        return super().forward(x) + torch.ops._c10d_functional.wait_tensor(whole).sum()


@pytest.mark.usefixtures("one_of_four")
def test_two_gathers_that_read_one_shard_in_different_ways_stay_two():
    model = simple_fsdp(GathersTwice(4, 8, bias=False), mp_policy=BF16)
    model._parameters["weight"].group = model._parameters["weight"].device_mesh.get_group().group_name
    captured = capture(model, torch.zeros(2, 4))
    dtypes = {node.meta["val"].dtype for node in nodes(captured.forward, ALL_GATHER)}
    assert dtypes == {torch.bfloat16, torch.float32}


@pytest.mark.usefixtures("one_of_four")
def test_partitioners_generate_no_code(monkeypatch):
    generated = []
    generate = Graph.python_code

    def counted(graph, *args, **kwargs):
        generated.append({frame.f_code for frame, _ in traceback.walk_stack(None)})
        return generate(graph, *args, **kwargs)

    monkeypatch.setattr(Graph, "python_code", counted)
    captured = capture(simple_fsdp(Uneven()), torch.zeros(2, 3, dtype=torch.int64))
    assert nodes(captured.backward, REDUCE_SCATTER)
    assert generated
    assert not [codes for codes in generated if partition.__code__ in codes]
