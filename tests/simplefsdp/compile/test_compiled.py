"""Compiled models on two ranks: the collectives that really run, and models that do not fit one static graph."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.modules.module import register_module_forward_hook

from simplefsdp import simple_fsdp
from tests.compare import LOWERINGS
from tests.models import batch, local, tiny_llama, train, whole_weights_saved
from tests.ranks import Ranks

AOT_EAGER: Any = LOWERINGS["aot_eager"]
INDUCTOR: Any = {"plan": "block"}
PARAMETERS, BLOCKS = 30, 5  # of tiny_llama; its buckets


def compiled(model: nn.Module, options: dict[str, Any], **kwargs: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="simplefsdp", options=options, **kwargs)


def collectives_run(fn: Callable[[], Any]) -> tuple[int, int]:
    """All-gathers and reduce-scatters executed by ``fn``."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        fn()
    names = [event.name for event in profile.events() or []]
    gathers = sum(names.count(f"{library}::all_gather_into_tensor") for library in ("_c10d_functional", "simplefsdp"))
    return gathers, names.count("_c10d_functional::reduce_scatter_tensor")


def step_counts(model: nn.Module, forward: Callable[..., Tensor]) -> list[tuple[int, int]]:
    """Return the numbers of gathers and reductions of forward, backward and a forward without gradients."""
    tokens, targets = batch(0, dist.get_rank())
    forward(tokens, targets).backward()  # compile
    losses: list[Tensor] = []
    counts = [
        collectives_run(lambda: losses.append(forward(tokens, targets))),
        collectives_run(lambda: losses[0].backward()),
    ]
    model.eval()
    with torch.no_grad():
        forward(tokens, targets)
        counts.append(collectives_run(lambda: forward(tokens, targets)))
    model.train()
    return counts


@pytest.mark.parametrize(
    ("checkpointing", "lower_with"),
    [("none", "aot_eager"), ("selective", "inductor")],
)
def test_each_bucket_is_gathered_once_a_direction(two_ranks: Ranks, lower_with: str, checkpointing: str) -> None:
    two_ranks.run(_gathered_once, {"lower_with": lower_with, "plan": "block"}, checkpointing)


def _gathered_once(options: dict[str, Any], checkpointing: str) -> None:
    model = simple_fsdp(tiny_llama(activation_checkpointing=checkpointing))
    counts = step_counts(model, compiled(model, options, fullgraph=True))
    # The embedding, a bucket of its own, is not needed in backward.
    assert counts == [(BLOCKS, 0), (BLOCKS - 1, BLOCKS), (BLOCKS, 0)]


def test_without_a_plan_each_parameter_is_gathered_by_itself(two_ranks: Ranks) -> None:
    two_ranks.run(_by_itself, {"lower_with": "aot_eager", "plan": "none"})


def _by_itself(options: dict[str, Any]) -> None:
    model = simple_fsdp(tiny_llama(tie_embeddings=True))
    assert len(list(model.parameters())) == PARAMETERS - 1
    counts = step_counts(model, compiled(model, options, fullgraph=True))
    # The tied weight is read twice and, in backward, needed by the output: 29 each way, in inference too.
    assert counts == [(PARAMETERS - 1, 0), (PARAMETERS - 1, PARAMETERS - 1), (PARAMETERS - 1, 0)]


@pytest.mark.slow
def test_switching_resharding_holds_with_a_warm_cache() -> None:
    """The second pair of processes finds the first one's artifacts of both settings, and must not mix them up."""
    with tempfile.TemporaryDirectory() as cache:
        runs = []
        for _ in range(2):
            ranks = Ranks(2)
            try:
                runs.append(ranks.run(_switch, cache))
            finally:
                ranks.close()
    # Three buckets: what precedes the one block, the block, what follows it.
    unsharded, resharded = [(3, 0), (0, 3), (3, 0)], [(3, 0), (2, 3), (3, 0)]
    matrices = 7 + 1  # of the block and the output
    for counts, saved, _ in runs[0] + runs[1]:
        assert counts == [resharded, unsharded, resharded]
        assert saved == [0, matrices, 0]
    assert [hits > 0 for _, _, hits in runs[1]] == [True, True]


def _switch(cache: str) -> Any:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch._dynamo.utils.counters.clear()
    counts, saved = [], []
    for reshard in (True, False, True):
        model = simple_fsdp(tiny_llama(layers=1), reshard_after_forward=reshard)
        forward = compiled(model, INDUCTOR, fullgraph=True)
        counts.append(step_counts(model, forward))
        saved.append(len(whole_weights_saved(model, forward, *batch(0, dist.get_rank()))))
    counters = torch._dynamo.utils.counters
    hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
    return counts, saved, hits


@pytest.mark.slow
def test_processes_that_are_given_the_artifacts_of_others_compile_nothing(tmp_path: Path) -> None:
    """One file a rank: uneven shards have other graphs. With tensor parallelism graphs take meshes."""
    runs = []
    for name in ("first", "second"):
        ranks = Ranks(2)
        try:
            runs.append(ranks.run(_train_from_artifacts, str(tmp_path), name))
        finally:
            ranks.close()
    first, second = runs
    assert [(found.hits, found.misses) for found in first] == [(0, 2)] * 2
    assert [(found.hits, found.misses) for found in second] == [(2, 0)] * 2
    assert [found.losses for found in first] == [found.losses for found in second]


class Started(NamedTuple):
    hits: int
    misses: int
    losses: list[float]


def _train_from_artifacts(folder: str, name: str) -> Started:
    rank = dist.get_rank()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, name, str(rank)))
    artifacts = Path(folder, f"{rank}.artifacts")
    torch._dynamo.utils.counters.clear()
    if artifacts.exists():
        torch.compiler.load_cache_artifacts(artifacts.read_bytes())
    losses = []
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(rank)
    x = torch.randn(4, 6)
    for is_parallel in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 6))
        if is_parallel:
            parallelize_module(
                model, mesh["tp"], {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
            )
        sharded = simple_fsdp(model, mesh["dp"]) if is_parallel else simple_fsdp(model)
        forward = compiled(sharded, INDUCTOR, fullgraph=True)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        for _ in range(2):
            loss = forward(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    if not artifacts.exists():
        found = torch.compiler.save_cache_artifacts()
        assert found is not None
        artifacts.write_bytes(found[0])
    counters = torch._dynamo.utils.counters["aot_autograd"]
    return Started(counters["autograd_cache_hit"], counters["autograd_cache_miss"], losses)


def test_frozen_parameters_are_not_reduced(two_ranks: Ranks) -> None:
    two_ranks.run(_frozen)


def _frozen() -> None:
    model = tiny_llama()
    for name, param in model.named_parameters():
        param.requires_grad_("layers.1." in name)
    simple_fsdp(model)
    counts = step_counts(model, compiled(model, {"lower_with": "aot_eager", "plan": "none"}, fullgraph=True))
    assert [reductions for _, reductions in counts] == [0, 9, 0]
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }


class Broken(nn.Module):
    """Graph breaks between blocks and inside one, and a weight that is read where nothing is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 12)
        self.layers = nn.ModuleList(BreaksInside() for _ in range(2))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 12))
        self.head = nn.Linear(12, 30, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        x = self.rescale(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    @torch._dynamo.disable
    def rescale(self, x: Tensor) -> Tensor:
        assert not hasattr(self.scale, "placements"), "inside of a call a parameter is whole"
        return x * self.scale


class BreaksInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        torch._dynamo.graph_break()
        return x + self.down(hidden.relu())


@pytest.mark.parametrize("options", [AOT_EAGER, pytest.param(INDUCTOR, marks=pytest.mark.slow)])
def test_a_model_with_graph_breaks_trains_as_a_single_process(two_ranks: Ranks, options: dict[str, Any]) -> None:
    two_ranks.run(_graph_breaks, options)


def _graph_breaks(options: dict[str, Any]) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return simple_fsdp(Broken())

    eager, model = build(), build()
    expected = train(eager, eager, 3, dist.get_rank())
    found = train(model, compiled(model, options), 3, dist.get_rank())
    tolerance = 0 if options == AOT_EAGER else 1e-5
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("options", [AOT_EAGER, INDUCTOR])
def test_evaluation_other_batch_sizes_and_growing_lengths(two_ranks: Ranks, options: dict[str, Any]) -> None:
    two_ranks.run(_shapes, options)


def _shapes(options: dict[str, Any]) -> None:
    torch._dynamo.utils.counters.clear()
    model = simple_fsdp(tiny_llama(layers=1))
    forward = compiled(model, options)
    tokens = torch.arange(4 * 16).remainder(30).view(4, 16)
    for batch_size in (2, 4, 3):
        gradients = []
        for call in (forward, model):
            model.zero_grad()
            call(tokens[:batch_size], tokens[:batch_size]).backward()
            gradients.append(local(model.output.weight.grad).clone())
        torch.testing.assert_close(*gradients)
    model.eval()
    with torch.no_grad():
        for length in range(3, 14):
            torch.testing.assert_close(forward(tokens[:1, :length]), model(tokens[:1, :length]))
    # A static and a dynamic one, with gradients and without.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


@pytest.mark.parametrize("options", [AOT_EAGER, pytest.param(INDUCTOR, marks=pytest.mark.slow)])
def test_two_models_with_their_own_policies_and_the_same_names_in_one_graph(
    two_ranks: Ranks, options: dict[str, Any]
) -> None:
    two_ranks.run(_two_models, options)


def _two_models(options: dict[str, Any]) -> None:
    policies = [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)]

    def build() -> list[nn.Module]:
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6)) for _ in policies]
        return [simple_fsdp(model, mp_policy=policy) for model, policy in zip(models, policies, strict=True)]

    def distill(student: nn.Module, teacher: nn.Module, x: Tensor) -> Tensor:
        return (student(x) - teacher(x)).square().mean()

    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    results = []
    for forward in (distill, torch.compile(distill, backend="simplefsdp", options=options, fullgraph=True)):
        models = build()
        loss = forward(models[0], models[1], x)
        loss.backward()
        results.append([loss, *(local(p.grad) for model in models for p in model.parameters())])
    tolerance = 0 if options == AOT_EAGER else 1e-3
    torch.testing.assert_close(results[1], results[0], rtol=tolerance, atol=tolerance)


def test_blocks_compiled_one_by_one_share_their_code(two_ranks: Ranks) -> None:
    two_ranks.run(_regional)


def _regional() -> None:
    torch._dynamo.utils.counters.clear()
    eager, model = simple_fsdp(tiny_llama()), simple_fsdp(tiny_llama())
    for layer in model.layers:
        layer.compile(backend="simplefsdp", options=AOT_EAGER, fullgraph=True)
    expected = train(eager, eager, 2, dist.get_rank())
    torch.testing.assert_close(train(model, model, 2, dist.get_rank()), expected, rtol=0, atol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.compile
@pytest.mark.usefixtures("one_of_four")
@pytest.mark.parametrize("on_all", [False, True])
def test_hooks_of_one_module_and_of_all_modules_run(on_all: bool) -> None:
    model = simple_fsdp(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))

    def ones(module: nn.Module, _inputs: Any, output: Any) -> Any:
        return torch.ones_like(output) if module is model[1] else None

    hook = register_module_forward_hook(ones) if on_all else model[1].register_forward_hook(ones)
    try:
        assert torch.equal(torch.compile(model, backend="eager")(torch.ones(2, 4)), torch.ones(2, 4))
    finally:
        hook.remove()
