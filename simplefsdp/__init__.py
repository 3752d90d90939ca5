"""Fully sharded data parallel training, scheduled by the compiler (SimpleFSDP, arXiv 2411.00284).

::

    model = simple_fsdp(model)
    model = torch.compile(model, backend="simplefsdp")

[Note: import when used]
``import simplefsdp`` imports nothing: torch's compiler alone takes seconds, which no command that prints a help text
should spend. The first access to a name below imports its module, and the one that registers the backend.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simplefsdp.analysis.measurement import Measurement
    from simplefsdp.analysis.measuring import measure
    from simplefsdp.api import simple_fsdp
    from simplefsdp.frontend.initialization import sharded_init
    from simplefsdp.frontend.parametrization import register_fsdp_forward_method
    from simplefsdp.frontend.wire_format import WireFormat
    from simplefsdp.hardware.profile import HardwareProfile
    from simplefsdp.plan.bucket_plan import BucketPlan
    from simplefsdp.plan.grouping import manual_plan
    from simplefsdp.training.clip_grad import clip_grad_norm_
    from simplefsdp.training.error_feedback import ErrorFeedback
    from simplefsdp.training.full_state_dict import full_state_dict
    from simplefsdp.training.hadamard import hadamard_transform
    from simplefsdp.training.optimizers.distribute import distribute_optimizer
    from simplefsdp.training.optimizers.galore import galore
    from simplefsdp.training.optimizers.muon import muon
    from simplefsdp.training.optimizers.on_shards import step_on_shards
    from simplefsdp.training.optimizers.ranger21 import Ranger21
    from simplefsdp.training.wire_errors import wire_errors

__all__ = [
    "BucketPlan",
    "ErrorFeedback",
    "HardwareProfile",
    "Measurement",
    "Ranger21",
    "WireFormat",
    "clip_grad_norm_",
    "distribute_optimizer",
    "full_state_dict",
    "galore",
    "hadamard_transform",
    "manual_plan",
    "measure",
    "muon",
    "register_fsdp_forward_method",
    "sharded_init",
    "simple_fsdp",
    "step_on_shards",
    "wire_errors",
]

_MODULES = {
    "BucketPlan": "plan.bucket_plan",
    "ErrorFeedback": "training.error_feedback",
    "HardwareProfile": "hardware.profile",
    "Measurement": "analysis.measurement",
    "Ranger21": "training.optimizers.ranger21",
    "WireFormat": "frontend.wire_format",
    "clip_grad_norm_": "training.clip_grad",
    "distribute_optimizer": "training.optimizers.distribute",
    "full_state_dict": "training.full_state_dict",
    "galore": "training.optimizers.galore",
    "hadamard_transform": "training.hadamard",
    "manual_plan": "plan.grouping",
    "measure": "analysis.measuring",
    "muon": "training.optimizers.muon",
    "register_fsdp_forward_method": "frontend.parametrization",
    "sharded_init": "frontend.initialization",
    "simple_fsdp": "api",
    "step_on_shards": "training.optimizers.on_shards",
    "wire_errors": "training.wire_errors",
}
"""The module of each public name."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(f"{__name__}.compile.backend")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
