"""Workloads that are rehearsed or planned: a model by name, its tokens, and the meshes of its parallelism."""

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from simplefsdp.models import llama
from simplefsdp.rehearsal.systems import Parallelism
from simplefsdp.text.messages import unknown

MODELS = {f"llama3-{name.lower()}": name for name in llama.CONFIGS}
"""Names of the Llama 3 models that commands know, and the keys of their configurations."""


@dataclass(frozen=True)
class Workload:
    """A model and its batches, the same under every system."""

    build: Callable[[], nn.Module]
    """Makes the model on torch's default device; the model maps tokens (batch, seq) to logits (batch, seq, vocab)."""
    batch: int
    seq: int
    vocab_size: int
    device: torch.device
    parallelism: Parallelism
    tensor_parallel: int = 1
    """Number of devices that work on the same tokens."""
    micro_batches: int = 1
    """Micro-batches of a step; their gradients are reduced with the last. More than one needs a system with
    ``set_requires_gradient_sync``."""

    def tokens(self, step: int) -> Tensor:
        """Return the int64 tokens (batch, seq + 1) of a step: inputs, and targets one token later."""
        generator = torch.Generator().manual_seed(step)
        return torch.randint(self.vocab_size, (self.batch, self.seq + 1), generator=generator).to(self.device)


@dataclass(frozen=True)
class RankLayout:
    """How many ranks there are, and how they are dealt to the dimensions of a mesh."""

    ranks: int
    """Ranks of the whole world."""
    ranks_per_node: int
    tensor_parallel: int = 1
    """Neighbouring ranks that the model is tensor parallel over."""
    hybrid: bool = False
    """Whether parameters are sharded inside a node and replicated over nodes."""

    def check(self) -> None:
        """Raise ``ValueError`` if the ranks cannot be dealt evenly; name the command's option."""
        if self.hybrid and (self.ranks % self.ranks_per_node or self.ranks <= self.ranks_per_node):
            raise ValueError(f"--hybrid: {self.ranks} ranks are not several nodes of {self.ranks_per_node}")
        among = self.ranks_per_node if self.hybrid else self.ranks
        tp = self.tensor_parallel
        if among % tp or (tp > 1 and tp >= among):
            raise ValueError(f"--tp: {among} ranks{' of a node' * self.hybrid} are not several groups of {tp}")

    def meshes(self, device: str) -> tuple[DeviceMesh, DeviceMesh | None]:
        """Return the mesh of data parallelism, and the mesh of tensor parallelism if there is any."""
        nodes = self.ranks // self.ranks_per_node if self.hybrid else 1
        dims = {"replicate": nodes, "shard": self.ranks // nodes // self.tensor_parallel, "tp": self.tensor_parallel}
        names = ["replicate"] * self.hybrid + ["shard"] + ["tp"] * (self.tensor_parallel > 1)
        mesh = init_device_mesh(device, tuple(dims[name] for name in names), mesh_dim_names=tuple(names))
        if self.tensor_parallel == 1:
            return mesh, None
        return mesh["replicate", "shard"] if self.hybrid else mesh["shard"], mesh["tp"]


def model_factory(
    model: str, *, seq: int, layers: int | None = None, activation_checkpointing: str = "none"
) -> Callable[[], nn.Module]:
    """Return a function that makes the model that ``model`` names: a key of ``MODELS``, or ``package.module:factory``.

    Args:
        seq: tokens of a sequence.
        layers: number of blocks, instead of the model's own number.
        activation_checkpointing: ``"none"``, ``"block"`` or ``"selective"``.

    Raises:
        ValueError: an argument is not valid; names the command's option.
    """
    if layers is not None and layers < 1:
        raise ValueError(f"--layers: expected a positive number, found {layers}")
    if model in MODELS:
        config = llama.CONFIGS[MODELS[model]]
        config = dataclasses.replace(
            config,
            layers=layers or config.layers,
            max_seq_len=max(seq, 1024),
            activation_checkpointing=activation_checkpointing,
        )
        return lambda: llama.Llama(config)
    if ":" not in model:
        raise ValueError("--model: " + unknown("model", model, MODELS) + ", or package.module:factory")
    for option, value in (("--layers", layers), ("--activation-checkpointing", activation_checkpointing)):
        if value not in (None, "none"):
            raise ValueError(f"{option}: {model} has to see to that itself")
    factory = imported("--model", model)
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise ValueError(f"--model {model}: expected a function without arguments: {error}") from None

    def build() -> nn.Module:
        made = factory()
        if not isinstance(made, nn.Module):
            raise ValueError(f"--model {model}: expected a torch.nn.Module from it, found a {type(made).__name__}")
        return made

    return build


def imported(option: str, path: str) -> Callable[..., Any]:
    """Return what ``path``, ``package.module:name``, names; modules of the working directory are found too.

    Raises:
        ValueError: there is no such module or name, or it cannot be called; names the command's option.
    """
    module, _, name = path.partition(":")
    sys.path.insert(0, "")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{option} {path}: {error}") from error
    if not callable(found):
        raise ValueError(f"{option} {path}: expected package.module:function")
    return found


def parallelized(model: Any, mesh: DeviceMesh | None) -> nn.Module:
    """Return ``model`` made tensor parallel over ``mesh`` by the model's own method ``parallelize(mesh)``.

    Raises:
        ValueError: the model has no such method, or the method refuses.
    """
    if mesh is None:
        return model
    if not hasattr(model, "parallelize"):
        raise ValueError(f"--tp: {type(model).__name__} has no method parallelize(mesh)")
    try:
        model.parallelize(mesh)
    except ValueError as error:
        raise ValueError(f"--tp: {error}") from error
    return model
