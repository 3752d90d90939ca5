"""What FSDP2's ``FSDPModule`` lets a training loop change between steps, under the same names."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from torch import nn
from torch.distributed.tensor import DTensor

from . import recompute
from .sharding import ShardedParameter


class Controls:
    """Methods of every sharded module. Each acts on all sharded parameters below the module, those of parts that were
    sharded by calls of their own included."""

    def unshard(self) -> None:
        """Gather the weights now, and keep them whole until ``reshard()`` or the end of the next outermost call.

        Every rank must call it. Meanwhile reading an attribute (``model.output.weight``) gives the full weight, also
        outside of a call; ``parameters()`` and ``state_dict()`` still give shards. Compiled code gathers by itself.
        """
        recompute.hold([(param, info) for _, _, param, info in _sharded(self)])

    def reshard(self) -> None:
        """Drop the weights that ``unshard()`` gathered."""
        recompute.release([(param, info) for _, _, param, info in _sharded(self)])

    def set_reshard_after_forward(self, reshard_after_forward: bool) -> None:
        """Whether full weights are dropped after forward. Compiled code is compiled again for it."""
        if not isinstance(reshard_after_forward, bool):
            raise TypeError(f"reshard_after_forward: expected True or False, found {reshard_after_forward!r}")
        _change(self, reshard_after_forward=reshard_after_forward)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of all ranks' gradients by ``factor``, and no longer by the number of ranks.

        Compiled code is compiled again for it.
        """
        _change(self, divide_factor=check_divide_factor("factor", factor))


def check_divide_factor(option: str, factor: Any) -> float:
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        raise TypeError(f"{option}: expected a number, found {factor!r}")
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"{option}: expected a positive number, found {factor!r}")
    return float(factor)


def _sharded(root: Any) -> Iterator[tuple[Any, str, DTensor, ShardedParameter]]:
    """Every sharded parameter below ``root`` with its module and attribute name; a tied one as often as it is held."""
    for module in cast(nn.Module, root).modules():
        if isinstance(module, Controls):
            for name, info in list(module._simple_fsdp.params.items()):  # type: ignore[attr-defined]
                if (param := cast(Any, module)._parameters[name]) is not None:
                    yield module, name, param, info


def _change(root: Controls, **policy: Any) -> None:
    changed: dict[int, ShardedParameter] = {}
    for module, name, param, info in _sharded(root):
        if id(param) not in changed:
            changed[id(param)] = replace(info, communication=info.communication._replace(**policy))
        module._simple_fsdp.params[name] = param.simple_fsdp_info = changed[id(param)]  # type: ignore[attr-defined]
