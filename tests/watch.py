"""Watching operators, collectives and memory without a profiler."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watch(TorchDispatchMode):
    """Counts operators, and the bytes of the tensors made meanwhile that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.made: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.counts[func.overloadpacket.__name__] += 1
        seen = {storage._cdata for storage in _storages((args, kwargs))} - set(self.made)
        for storage in _storages(out):
            if storage._cdata not in seen:  # a view of something older
                self.made[storage._cdata] = StorageWeakRef(storage)
        return out

    def alive(self) -> int:
        storages = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.made.values()]
        return sum(storage.nbytes() for storage in storages if storage is not None)


class Collectives(TorchDispatchMode):
    """Collects the names of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    tensors = [t for t in tree_leaves(tree) if isinstance(t, Tensor) and not hasattr(t, "_local_tensor")]
    return [tensor.untyped_storage() for tensor in tensors]
