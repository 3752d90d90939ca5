"""Fully sharded data parallel training, scheduled by the compiler (SimpleFSDP, arXiv 2411.00284).

::

    model = simple_fsdp(model)
    model = torch.compile(model, backend="simplefsdp")
"""

from . import backend as backend  # importing it registers the torch.compile backend
from .api import simple_fsdp
from .clip import clip_grad_norm_
from .hardware import HardwareProfile
from .initialization import sharded_init
from .measurement import Measurement
from .measuring import measure
from .optimizers import step_on_shards
from .parametrization import register_fsdp_forward_method
from .plan import BucketPlan
from .wrap import manual_plan

__all__ = [
    "BucketPlan",
    "HardwareProfile",
    "Measurement",
    "clip_grad_norm_",
    "manual_plan",
    "measure",
    "register_fsdp_forward_method",
    "sharded_init",
    "simple_fsdp",
    "step_on_shards",
]
