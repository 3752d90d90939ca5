"""Weights of torchao's float8 linear layers that FSDP2 would gather in float8, as plain parameters.

Under ``Float8LinearConfig(enable_fsdp_float8_all_gather=True)`` such a weight is a tensor subclass that brings FSDP2's
``fsdp_pre_all_gather``. Of a plain weight the same layer computes the same bits, and a compiled graph casts it before
its gather by itself (``inductor_passes/cast_before_gather.py``).
"""

from collections.abc import Collection
from typing import Any

from torch import nn


def unwrap_float8_weights(model: nn.Module, ignored: Collection[int]) -> dict[int, nn.Parameter]:
    """Replace such weights by the plain parameters inside of them; tied ones stay tied.

    Args:
        ignored: ``id`` of each parameter to leave as it is.

    Returns:
        The former weight of each new parameter, by the parameter's ``id``. The layer casts the parameter from its own
        dtype, so ``mp_policy`` must not cast it before: FSDP2 does not either.
    """
    former: dict[int, nn.Parameter] = {}
    plain: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and id(param) not in ignored and _is_float8_weight(param):
                inner: Any = param
                if id(param) not in plain:
                    new = nn.Parameter(inner._tensor.detach(), requires_grad=param.requires_grad)
                    plain[id(param)], former[id(new)] = new, param
                module._parameters[name] = plain[id(param)]
    return former


def _is_float8_weight(param: nn.Parameter) -> bool:
    kind = type(param)
    return kind.__module__.startswith("torchao.float8") and kind.__name__ == "WeightWithDynamicFloat8CastTensor"
