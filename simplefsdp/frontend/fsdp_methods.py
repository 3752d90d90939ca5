"""Methods of FSDP2's ``FSDPModule`` that change a sharded model between steps, under the same names."""

import math
from dataclasses import replace
from typing import Any

from inductor_passes.torch_compat.dynamo import inside_torch_compile, skip_code
from simplefsdp.frontend import eager_resharding
from simplefsdp.frontend import gradient_accumulation as accumulation
from simplefsdp.frontend.gradient_accumulation import sharded_attributes
from simplefsdp.frontend.sharding import ShardedParameter


class FSDPMethods:
    """Methods of every sharded module.

    Each method acts on all sharded parameters below the module, also on those of parts that were sharded by calls of
    their own.
    """

    def unshard(self) -> None:
        """Gather the weights now and keep them unsharded.

        They stay unsharded until ``reshard()``, the end of the next call of a sharded module, or the next step of an
        optimizer. Every rank must call this method. Meanwhile reading an attribute (``model.output.weight``) gives the
        full weight, also outside of a call; ``parameters()`` and ``state_dict()`` still give shards. Compiled code
        gathers by itself.
        """
        eager_resharding.hold_unsharded([(each.param, each.info, each.proxy) for each in sharded_attributes(self)])

    def reshard(self) -> None:
        """Free weights that ``unshard()`` gathered, and those that ``reshard_after_forward=False`` keeps for backward.

        Backward gathers the latter again. Compiled code keeps what it has saved.
        """
        params = [each.param for each in sharded_attributes(self)]
        eager_resharding.release_unsharded(params)
        eager_resharding.drop_kept(params)

    def set_reshard_after_forward(self, reshard_after_forward: bool) -> None:
        """Choose whether full weights are freed after forward. Compiled code is compiled again after a change."""
        _check_outside("set_reshard_after_forward")
        _change(self, reshard_after_forward=_check_bool("reshard_after_forward", reshard_after_forward))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of all ranks' gradients by ``factor`` instead of the number of ranks.

        Compiled code is compiled again after a change.
        """
        _check_outside("set_gradient_divide_factor")
        _change(self, divide_factor=check_divide_factor("factor", factor))

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Choose whether gradients are reduced in backward; ``False`` accumulates full gradients on each rank.

        ``True`` comes before the last micro-batch's backward: that backward reduces the accumulated gradients, once,
        and adds them to ``param.grad``. Compiled code reduces them in the buckets of its plan. In eager mode, and if
        the last forward ran before the switch, they are reduced together at the end of that backward, with nothing to
        hide under. An optimizer that steps, and ``clip_grad_norm_``, raise while a gradient of theirs has been
        accumulated and not reduced. ``zero_grad()`` clears ``param.grad`` and leaves what was accumulated. If this
        method is called between forward and backward of an activation checkpoint that is not compiled itself, around
        what ``torch.compile`` returned, torch raises a CheckpointError.

        Full gradients are accumulated in ``reduce_dtype``, apart from ``param.grad``, and take the memory of the whole
        parameters. If a compiled backward fails meanwhile, the next call of this method, or the next backward, raises
        and drops what was accumulated. Code is compiled once for ``False``, and once for the last backward.
        """
        _check_outside("set_requires_gradient_sync")
        _check_bool("requires_gradient_sync", requires_gradient_sync)
        found = sharded_attributes(self)
        eager_resharding.release_unsharded([each.param for each in found])
        if requires_gradient_sync:
            accumulation.reduce_in_next_backward(found)
        else:
            accumulation.begin_accumulation(found)


def _check_outside(method: str) -> None:
    if inside_torch_compile():
        raise RuntimeError(f"{method}() was called inside torch.compile; call it between calls of what is compiled")


# Dynamo would trace them, and where it gives up run them by half.
for _method in (
    FSDPMethods.set_reshard_after_forward,
    FSDPMethods.set_gradient_divide_factor,
    FSDPMethods.set_requires_gradient_sync,
):
    skip_code(_method.__code__)


def _change(root: FSDPMethods, **policy: Any) -> None:
    changed: dict[int, ShardedParameter] = {}
    for each in sharded_attributes(root):
        if id(each.param) not in changed:
            comm = each.info.communication._replace(**policy)
            changed[id(each.param)] = replace(each.info, communication=comm)
        each.params[each.name] = each.param.simple_fsdp_info = changed[id(each.param)]  # type: ignore[attr-defined]


def _check_bool(option: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{option}: expected True or False, found {value!r}")
    return value


def check_divide_factor(option: str, factor: Any) -> float:
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        raise TypeError(f"{option}: expected a number, found {factor!r}")
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"{option}: expected a positive number, found {factor!r}")
    return float(factor)
