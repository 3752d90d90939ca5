"""Hooks on all modules of a process, which ``torch.nn.Module`` calls beside those of each module."""

from torch.nn.modules.module import _global_backward_hooks as global_backward_hooks
from torch.nn.modules.module import _global_backward_pre_hooks as global_backward_pre_hooks
from torch.nn.modules.module import _global_forward_hooks as global_forward_hooks
from torch.nn.modules.module import _global_forward_pre_hooks as global_forward_pre_hooks

__all__ = ["global_backward_hooks", "global_backward_pre_hooks", "global_forward_hooks", "global_forward_pre_hooks"]
