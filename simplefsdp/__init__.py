"""Fully sharded data parallel training, scheduled by the compiler (SimpleFSDP, arXiv 2411.00284).

::

    model = simple_fsdp(model)
    model = torch.compile(model, backend="simplefsdp")
"""

from simplefsdp.analysis.measurement import Measurement
from simplefsdp.analysis.measuring import measure
from simplefsdp.api import simple_fsdp
from simplefsdp.compile import backend as backend  # importing it registers the torch.compile backend
from simplefsdp.frontend.initialization import sharded_init
from simplefsdp.frontend.parametrization import register_fsdp_forward_method
from simplefsdp.hardware.profile import HardwareProfile
from simplefsdp.plan.bucket_plan import BucketPlan
from simplefsdp.plan.grouping import manual_plan
from simplefsdp.training.clip_grad import clip_grad_norm_
from simplefsdp.training.optimizers import step_on_shards

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
