"""The one property, for models put together at random: five steps as in a single process."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from simplefsdp import simple_fsdp
from tests import zoo
from tests.compare import same_steps, vectors
from tests.ranks import Ranks

CONTAINERS = {
    "sequential": nn.Sequential,
    "residual": zoo.Residual,
    "checkpoint": zoo.Checkpointed,
    "reentrant checkpoint": zoo.CheckpointedReentrant,
}
LEAVES = {**zoo.PARAMETERS, **zoo.MODULES}
DOUBLE = {torch.float32: torch.float64, torch.complex64: torch.complex128}
"""The dtype of a tensor in place of single precision, whose rounding grows to 1 % of a gradient where a loss grows as
that of ``LOSS_GROWS`` does, sharded or not."""
MESHES = {"fully_shard": (2,), "replicate": (2,), "hybrid_shard": (1, 2), "hybrid_shard of one": (2, 1)}


@functools.cache
def _mesh(mode: str) -> DeviceMesh:
    """The mesh of a mode: each of two dimensions has process groups, and threads, of its own."""
    return init_device_mesh("cpu", MESHES[mode])


@dataclass(frozen=True)
class Tree:
    """A leaf of the zoo, or a container of several trees."""

    kind: str
    inner: tuple["Tree", ...] = ()

    def build(self) -> nn.Module:
        if self.inner:
            return CONTAINERS[self.kind](*(tree.build() for tree in self.inner))
        return LEAVES[self.kind]()

    def kinds(self) -> list[str]:
        return [self.kind, *(kind for tree in self.inner for kind in tree.kinds())]


@dataclass(frozen=True)
class Model:
    tree: Tree
    twice: bool
    """Whether the whole is called two times with the same weights."""
    lowering: str
    mode: str
    reshard: bool
    last_dim: bool
    parts_first: tuple[bool, ...]
    frozen: tuple[bool, ...]
    micro_batches: int
    """Number that a step adds up."""
    resumes: bool
    """Whether another model goes on in mid-training, with the state of the first."""

    def build(self) -> nn.Module:
        body = self.tree.build()
        first, last = nn.Linear(zoo.DIM, zoo.DIM), nn.Linear(zoo.DIM, zoo.DIM)
        model = nn.Sequential(first, body, *([nn.Tanh(), body] if self.twice else []), last)
        params = [p for p in body.parameters() if p.is_floating_point()]
        for param, frozen in zip(params, self.frozen, strict=False):
            param.requires_grad_(param.requires_grad and not frozen)
        return model._apply(lambda t: t.to(DOUBLE.get(t.dtype, t.dtype)))

    def shard(self, model: nn.Module) -> nn.Module:
        settings: dict[str, Any] = {
            "mesh": _mesh(self.mode),
            "mode": self.mode.split()[0],
            "reshard_after_forward": self.reshard,
            "shard_placement_fn": (lambda p: Shard(p.ndim - 1) if p.ndim else None) if self.last_dim else None,
        }
        parts = [m for m in model.children() if any(True for _ in m.parameters())]
        for part, first in zip(parts, self.parts_first, strict=False):
            if first and part is not model[1]:
                simple_fsdp(part, **settings)
        if len(self.parts_first) > 2 and self.parts_first[2]:
            simple_fsdp(model[1], **settings)
        return simple_fsdp(model, **settings)


leaves = st.sampled_from(sorted(LEAVES)).map(Tree)
trees = st.recursive(
    leaves,
    lambda inner: st.builds(
        Tree, st.sampled_from(sorted(CONTAINERS)), st.lists(inner, min_size=1, max_size=3).map(tuple)
    ),
    max_leaves=5,
)
booleans = st.lists(st.booleans(), max_size=4).map(tuple)
models = st.builds(
    Model,
    tree=trees,
    twice=st.booleans(),
    lowering=st.sampled_from(["eager", "eager", "aot_eager", "auto"]),  # a compiled one takes eight times as long
    mode=st.sampled_from(sorted(MESHES)),
    reshard=st.booleans(),
    last_dim=st.booleans(),
    parts_first=booleans,
    frozen=booleans,
    micro_batches=st.integers(1, 2),
    resumes=st.booleans(),
)


LOSS_GROWS = Model(
    tree=Tree(
        "checkpoint",
        (
            Tree("three dims"),
            Tree("checkpoint", (Tree("0-dim"),)),
            Tree("checkpoint", (Tree("0-dim"), Tree("0-dim"), Tree("0-dim"))),
        ),
    ),
    twice=True,
    lowering="eager",
    mode="fully_shard",
    reshard=False,
    last_dim=False,
    parts_first=(),
    frozen=(),
    micro_batches=1,
    resumes=False,
)
"""A model whose loss grows from 10 to 5,000 in five steps."""
READ_AROUND_A_CHECKPOINT = replace(
    LOSS_GROWS,
    tree=Tree("residual", (Tree("reentrant checkpoint", (Tree("GRU"),)), Tree("0-dim"))),
    lowering="aot_eager",
    micro_batches=2,
)
"""A model that reads a weight before and behind the backward that a checkpoint begins in backward."""


def batch(step: int, rank: int) -> torch.Tensor:
    """Input of a rank and a step, (3, 6), float64."""
    return vectors(step, rank).double()


def train_beside_a_single_process(model: Model) -> nn.Module:
    """Train ``model`` on a rank, and beside it in one process; raise ``AssertionError`` where they differ.

    Returns the sharded model.
    """
    torch.manual_seed(0)
    return same_steps(
        model.build,
        model.lowering,
        wrap=model.shard,
        inputs=batch,
        tolerance=1e-4 if "bf16 beside fp32" in model.tree.kinds() else 1e-9,
        micro_batches=model.micro_batches,
        resumes=model.resumes,
    )


def _trains_as_in_a_single_process(model: Model) -> None:
    """Return nothing: a sharded model cannot be sent to another process."""
    train_beside_a_single_process(model)


@pytest.mark.slow
def test_random_models_train_as_in_a_single_process(two_ranks: Ranks) -> None:
    @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @example(LOSS_GROWS)
    @example(READ_AROUND_A_CHECKPOINT)
    @given(models)
    def check(model: Model) -> None:
        two_ranks.run(_trains_as_in_a_single_process, model)

    check()
