"""Functions of other tools that would shard a sharded model again, or take its shards for whole weights: they raise.

``DistributedDataParallel`` and ``FullyShardedDataParallel`` put the model into a module of their own, which
``validation.refuse_other_wrappers`` sees.
"""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from inductor_passes.torch_compat.modules import COMPOSABLE_REGISTRY

_COMPOSABLE = ("fully_shard", "replicate")


def parallel_already(name: str) -> ValueError:
    """Return the error of a tool that was given a sharded model to make it data parallel."""
    return ValueError(
        f"{name}: its model is data parallel by simple_fsdp already; train it as it is. mode='replicate' and "
        "mode='hybrid_shard' of simple_fsdp() make replicas"
    )


class _RefusesDataParallel(OrderedDict[str, Any]):
    """The registry of a module, into which torch's composable functions enter themselves before they change it."""

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name in _COMPOSABLE:
            raise parallel_already(name)
        return super().setdefault(name, default)


def refuse_composable(module: nn.Module) -> None:
    """Let torch's ``fully_shard`` and ``replicate`` raise ``ValueError`` when they are given ``module``."""
    known = module.__dict__.get(COMPOSABLE_REGISTRY, {})
    module.__dict__[COMPOSABLE_REGISTRY] = _RefusesDataParallel(known)


def refusing_methods(base: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Return methods to take the place of those of ``base`` that need whole weights, as HuggingFace's models have."""
    found = {"save_pretrained": _save_pretrained, "resize_token_embeddings": _resize_token_embeddings}
    return {name: refusing(getattr(base, name)) for name, refusing in found.items() if hasattr(base, name)}


def _save_pretrained(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def save_pretrained(self, *args, **kwargs):
        given = inspect.signature(method).bind(self, *args, **kwargs).arguments
        state = given.get("state_dict", kwargs.get("state_dict"))
        if state is None or any(isinstance(value, DTensor) for value in state.values()):
            raise ValueError(
                "save_pretrained: the model's parameters are shards; on all ranks: state = "
                "simplefsdp.full_state_dict(model), and then on rank 0: model.save_pretrained(..., state_dict=state)"
            )
        return method(self, *args, **kwargs)

    return save_pretrained


def _resize_token_embeddings(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def resize_token_embeddings(self, *args, **kwargs):
        if all(each is None for each in (*args, *kwargs.values())):  # returns the embeddings as they are
            return method(self)
        raise RuntimeError("resize_token_embeddings: the model's parameters are shards; resize before simple_fsdp()")

    return resize_token_embeddings
