"""Systems that can be rehearsed: data parallelism of this library and of torch, each around the same model."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from simplefsdp.api import simple_fsdp
from simplefsdp.frontend.sharding import Reshard
from simplefsdp.frontend.wire_format import WireFormat
from simplefsdp.hardware.profile import HardwareProfile
from simplefsdp.plan.grouping import block_buckets, block_of, blocks


class Parallelism(NamedTuple):
    """Settings that are the same for all systems."""

    mesh: DeviceMesh
    """The mesh of data parallelism. 1-D: fully sharded; 2-D: hybrid, replicated over the first dimension."""
    mp_policy: MixedPrecisionPolicy
    reshard_after_forward: bool
    profile: HardwareProfile | None = None
    """Profile for plans that are searched for, and for predictions of other plans."""
    embedding_lookup: str = "gather"
    """``embedding_lookup`` of ``simple_fsdp``; other systems gather."""
    wire: WireFormat | None = None
    """``wire`` of ``simple_fsdp``; other systems have no formats."""
    narrows: bool = False
    """Whether the planner of ``"auto"`` chooses what travels in its format."""


class System(NamedTuple):
    """A system of data parallelism: ``wrap(model, parallelism)`` shards in place and returns what to call instead."""

    wrap: Callable[[nn.Module, Parallelism], Callable[[Tensor], Any]]
    compiled: bool
    """Whether the loss is compiled too, as its own function."""
    sharded: bool = True
    """Whether parameters become shards; if so, ``wrap`` is called while they are on the meta device."""
    own_streams: bool = False
    """Whether, on CUDA, streams of the system's own wait for collectives: the record then does not show compute."""


def simplefsdp_system(
    plan: Any = "block",
    inductor: Mapping[str, Any] | None = None,
    budget: int | None = None,
    reshard: Reshard | None = None,
    wire: WireFormat | None = None,
    narrows: bool = False,
    ranks_per_node: int | None = None,
) -> System:
    """Return this library as a system, with a plan.

    Args:
        budget: memory budget in bytes, for plans that are searched for.
        reshard: ``reshard_after_forward``, in place of the setting that all systems share.
        wire: the format of all weights and gradients, in place of that which all systems share.
        narrows: let the planner choose what travels in its format.
        ranks_per_node: ranks of a node, for reductions in two steps; ``None``: as the profile's network says.
    """

    def wrap(model: nn.Module, parallelism: Parallelism) -> Callable[[Tensor], Any]:
        mesh, mp_policy, reshards, profile, embedding_lookup, of_all, all_narrow = parallelism
        chosen = reshards if reshard is None else reshard
        on_node = ranks_per_node
        if profile is not None and on_node is None:
            on_node = profile.network.whole_node(dist.get_world_size())
        simple_fsdp(
            model,
            mesh,
            mp_policy=mp_policy,
            reshard_after_forward=chosen,
            wire=of_all if wire is None else wire,
            ranks_per_node=on_node,
            embedding_lookup=embedding_lookup,
        )
        options: Any = {"plan": plan, "inductor": dict(inductor or {}), "memory_budget": budget}
        if narrows or (all_narrow and plan == "auto"):
            options["wire"] = "auto"
        if plan != "none":
            options["profile"] = profile
        return torch.compile(model, backend="simplefsdp", options=options)

    return System(wrap, compiled=True)


def _fsdp2(model: nn.Module, parallelism: Parallelism) -> Callable[[Tensor], Any]:
    """Shard by FSDP2, with a group for each repeated block, one for what precedes them and one for what follows.

    As torchtitan does, what follows the blocks is not freed after forward, because backward begins with it.
    """
    mesh, mp_policy, reshard, *_ = parallelism
    settings: Any = {"mesh": mesh, "mp_policy": mp_policy, "reshard_after_forward": reshard}
    fqns = tuple(fqn for fqn, _ in model.named_parameters())
    buckets = block_buckets(fqns)
    for bucket in buckets:
        block = block_of(bucket[0])
        owners = dict.fromkeys(model.get_submodule(fqn.rpartition(".")[0]) for fqn in bucket)
        if block is not None:
            fully_shard(model.get_submodule(block), **settings)
        elif model not in owners:
            own_settings = {"reshard_after_forward": False} if bucket is buckets[-1] else {}
            fully_shard(list(owners), **settings | own_settings)
    return cast(nn.Module, fully_shard(model, **settings))


def _fsdp2_compile(model: nn.Module, parallelism: Parallelism) -> Callable[[Tensor], Any]:
    """Shard by FSDP2 and compile each repeated block, once for all of them, as FSDP2's own users do."""
    for block in blocks(tuple(fqn for fqn, _ in model.named_parameters())):
        model.get_submodule(block).compile()
    return _fsdp2(model, parallelism)


def _ddp(model: nn.Module, parallelism: Parallelism) -> Callable[[Tensor], Any]:
    """Replicate by DistributedDataParallel over all ranks, under autocast for mixed precision."""
    wrapped = DistributedDataParallel(model)
    dtype = parallelism.mp_policy.param_dtype
    if dtype is None:
        return wrapped

    def forward(tokens: Tensor) -> Any:
        with torch.autocast(tokens.device.type, dtype):
            return wrapped(tokens)

    return forward


def _single(model: nn.Module, _parallelism: Parallelism) -> Callable[[Tensor], Any]:
    """Use no data parallelism: the cost of compute alone."""
    return torch.compile(model)


SYSTEMS: Mapping[str, System] = {
    "block": simplefsdp_system("block"),
    "auto": simplefsdp_system("auto"),
    "auto-kept": simplefsdp_system("auto", reshard="auto"),
    "greedy": simplefsdp_system("greedy"),
    "inductor": simplefsdp_system("none"),
    "fsdp2": System(_fsdp2, compiled=False, own_streams=True),
    "fsdp2-compile": System(_fsdp2_compile, compiled=True, own_streams=True),
    "ddp": System(_ddp, compiled=False, sharded=False, own_streams=True),
    "single": System(_single, compiled=True, sharded=False),
}
"""Systems by name.

``auto-kept``: the planner also decides which weights stay unsharded until backward. ``inductor``: this library's
frontend without buckets or order: what the installed torch makes of it.
"""


def cross_entropy(output: Any, targets: Tensor) -> Tensor:
    """Return the mean loss in nats of logits (batch, seq, vocabulary), or of an object with ``logits``."""
    logits = getattr(output, "logits", output)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
