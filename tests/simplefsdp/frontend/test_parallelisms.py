"""Beside context, expert and pipeline parallelism, made with torch's means: as in a single process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from inductor_passes.collectives import FQNS
from inductor_passes.runtime.record import is_collective
from simplefsdp import rehearsal, simple_fsdp
from simplefsdp.training.pipeline import PipelineStage
from tests.compare import EVERY_LOWERING, assert_same, lowered
from tests.graphs import capture
from tests.models import PROFILE
from tests.ranks import Ranks

DIM = 6


def of_step(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(step))


def compare_gradients(model: nn.Module, plain: nn.Module) -> None:
    ours, expected = ({name: p.grad for name, p in m.named_parameters()} for m in (model, plain))
    assert_same(ours, expected, tolerance=1e-5)
    model.zero_grad()
    plain.zero_grad()


class Attention(nn.Module):
    """Causal, over a sequence of which each rank of ``mesh`` has a part: keys and values are gathered."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.group = mesh.get_group() if mesh else None
        self.rank = mesh.get_local_rank() if mesh else 0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        if self.group is not None:
            k = all_gather_tensor_autograd(k.contiguous(), 1, self.group)
            v = all_gather_tensor_autograd(v.contiguous(), 1, self.group)
        positions = self.rank * q.shape[1] + torch.arange(q.shape[1])
        mask = torch.arange(k.shape[1]) <= positions[:, None]
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def attentions(mesh: DeviceMesh | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Attention(mesh) for _ in range(3)))


@pytest.mark.parametrize(
    ("sizes", "lowering"),
    [
        ((2, 2), "eager"),
        ((2, 2), "aot_eager"),
        ((2, 2), "inductor"),
        pytest.param((1, 4), "auto", marks=pytest.mark.slow),
    ],
)
def test_parameters_are_sharded_over_data_and_context_parallel_ranks(
    four_ranks: Ranks, sizes: tuple[int, int], lowering: str
) -> None:
    four_ranks.run(_contexts, sizes, lowering)


def _contexts(sizes: tuple[int, int], lowering: str) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "cp"))
    plain, model = attentions(), simple_fsdp(attentions(mesh["cp"]), mesh["dp", "cp"]._flatten("dp_cp"))
    forward = lowered(model, lowering, fullgraph=True)
    for step in range(2):
        whole = of_step(step, 2 * sizes[0], 8)
        mine = whole.chunk(sizes[0])[mesh["dp"].get_local_rank()].chunk(sizes[1], dim=1)[mesh["cp"].get_local_rank()]
        plain(whole).square().mean().backward()
        forward(mine).square().mean().backward()
        compare_gradients(model, plain)


class Experts(nn.Module):
    """Map (experts, tokens, DIM) to the same shape, by a matrix an expert; sharded weights are this rank's experts."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up = nn.Parameter(0.3 * torch.randn(number, DIM, 9))
        self.down = nn.Parameter(0.3 * torch.randn(number, 9, DIM))

    def forward(self, x: Tensor) -> Tensor:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        return torch.bmm(torch.bmm(x, up).relu(), down)


class Mixture(nn.Module):
    """One of four experts for each token, which is sent to the rank of ``mesh`` that has it; room for all of them."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(DIM), nn.Linear(DIM, 4), Experts(4)
        self.group = mesh.get_group() if mesh else None
        self.ranks = mesh.size() if mesh else 1

    def exchange(self, x: Tensor) -> Tensor:
        """Parts (ranks, ...) for each rank to parts from each."""
        if self.group is None:
            return x
        return all_to_all_single_autograd(x.contiguous(), None, None, self.group)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        weight, expert = self.router(normed).softmax(-1).max(-1)
        chosen = F.one_hot(expert, 4)
        place = F.one_hot((chosen.cumsum(0) * chosen).sum(1) - 1, len(x))
        slots = (chosen[:, :, None] * place[:, None]).to(x.dtype)  # (tokens, experts, places)
        sent = torch.einsum("tep,td->epd", slots, normed).unflatten(0, (self.ranks, -1))
        done = self.experts(self.exchange(sent).transpose(0, 1).flatten(1, 2)).unflatten(1, (self.ranks, -1))
        back = self.exchange(done.transpose(0, 1)).flatten(0, 1)
        return x + weight[:, None] * torch.einsum("tep,epd->td", slots, back)


def mixtures(mesh: DeviceMesh | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Mixture(mesh), Mixture(mesh))


def expert_parallel(mesh: DeviceMesh) -> nn.Module:
    """Over a mesh (rest, ep): experts dealt to ``ep``, each sharded over ``rest``; all else sharded over both."""
    model = mixtures(mesh["ep"])
    for experts in (module for module in model.modules() if isinstance(module, Experts)):
        for name, weight in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(distribute_tensor(weight.detach(), mesh["ep"], [Shard(0)])))
        simple_fsdp(experts, mesh["rest"], gradient_divide_factor=mesh.size())
    return simple_fsdp(model, mesh["rest", "ep"]._flatten("all"))


@pytest.mark.parametrize("lowering", EVERY_LOWERING)
def test_experts_may_be_on_another_mesh_than_the_rest(four_ranks: Ranks, lowering: str) -> None:
    four_ranks.run(_experts, lowering)


def _experts(lowering: str) -> None:
    plain, model = mixtures(), expert_parallel(init_device_mesh("cpu", (2, 2), mesh_dim_names=("rest", "ep")))
    assert model[0].experts.up.to_local().shape[0] == 1
    forward = lowered(model, lowering, fullgraph=True)
    for step in range(2):
        tokens = of_step(step, 4, 10)
        plain(tokens.flatten(0, 1)).square().mean().backward()
        forward(tokens[dist.get_rank()]).square().mean().backward()
        compare_gradients(model, plain)


@pytest.mark.compile
@pytest.mark.parametrize("plan", ["block", "auto"])
def test_each_mesh_has_buckets_of_its_own_and_tokens_travel_as_they_did(plan: str) -> None:
    with rehearsal.world(8, PROFILE.network):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("rest", "ep"))
        model = expert_parallel(mesh)
        captured = capture(model, of_step(0, 10), plan=plan, profile=PROFILE)
        exchange = mesh["ep"].get_group().group_name
        joint = [str(node.target) for node in captured.joint.nodes if is_collective(node) and FQNS not in node.meta]
    gathered: list[set[bool]] = []
    own = []
    for graph in (captured.forward, captured.backward):
        for node in filter(is_collective, graph.nodes):
            if node.args[-1] == exchange:
                own.append(str(node.target))
                assert FQNS not in node.meta
            else:
                gathered.append({".experts." in fqn for fqn in node.meta[FQNS]})
    assert own == [name for name in joint if "all_to_all" in name]
    assert len(own) == 8
    assert all(len(of_experts) == 1 for of_experts in gathered), "a bucket is of one mesh"
    assert len(gathered) < 3 * len(list(model.parameters()))


def stage_modules(number: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(DIM, 9), nn.Tanh(), nn.Linear(9, DIM)) for _ in range(number)]


@pytest.mark.parametrize(
    ("schedule", "lowering"),
    [
        (ScheduleGPipe, "eager"),
        (Schedule1F1B, "aot_eager"),
        (Schedule1F1B, "inductor"),
        pytest.param(ScheduleInterleaved1F1B, "auto", marks=pytest.mark.slow),
        (ScheduleInterleavedZeroBubble, "eager"),  # torch refuses compiled stages there
    ],
)
def test_stages_of_a_pipeline_reduce_once_a_step(four_ranks: Ranks, schedule: Any, lowering: str) -> None:
    four_ranks.run(_pipeline, schedule, lowering)


def _pipeline(schedule: Any, lowering: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    ranks, several = 2, schedule not in (ScheduleGPipe, Schedule1F1B)
    mine = range(mesh["pp"].get_local_rank(), 2 * ranks if several else ranks, ranks)
    number = len(mine) * ranks
    plain, group = nn.Sequential(*stage_modules(number)), mesh["pp"].get_group()
    models = {i: simple_fsdp(stage_modules(number)[i], mesh["dp"]) for i in mine}
    stages = [
        PipelineStage(lowered(model, lowering), i, number, torch.device("cpu"), group=group)
        for i, model in models.items()
    ]
    run = schedule(stages if several else stages[0], 4, loss_fn=lambda out, target: (out - target).square().mean())
    for step in range(3):
        whole = of_step(step, 2, 8)
        batch = whole[mesh["dp"].get_local_rank()]
        (plain(whole) - whole).square().mean().backward()
        with profile(activities=[ProfilerActivity.CPU]) as events:
            run.step(*[batch] * (0 in mine), **{"target": batch} if number - 1 in mine else {})
        reductions = [(e.key, e.count) for e in events.key_averages() if "functional::reduce_scatter" in e.key]
        assert reductions == [("_c10d_functional::reduce_scatter_tensor_coalesced", len(mine))]
        if step == 1:  # the gradients of two steps are added up
            run.eval(*[batch] * (0 in mine), **{"target": batch} if number - 1 in mine else {})
            continue
        for i, model in models.items():
            compare_gradients(model, plain[i])


@pytest.mark.usefixtures("one_of_four")
def test_a_stage_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(TypeError, match=r"submodule: expected a module that simple_fsdp\(\) has sharded, found Linear"):
        PipelineStage(nn.Linear(2, 2), 0, 4, torch.device("cpu"))
