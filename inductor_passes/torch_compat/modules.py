"""Hooks that torch runs on all modules beside their own, and the registry of what a module was given to."""

from torch.distributed._composable.contract import REGISTRY_KEY as COMPOSABLE_REGISTRY
from torch.nn.modules.module import _global_backward_hooks as global_backward_hooks
from torch.nn.modules.module import _global_backward_pre_hooks as global_backward_pre_hooks
from torch.nn.modules.module import _global_forward_hooks as global_forward_hooks
from torch.nn.modules.module import _global_forward_pre_hooks as global_forward_pre_hooks

__all__ = [
    "COMPOSABLE_REGISTRY",
    "global_backward_hooks",
    "global_backward_pre_hooks",
    "global_forward_hooks",
    "global_forward_pre_hooks",
]
