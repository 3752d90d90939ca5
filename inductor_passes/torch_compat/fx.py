"""FX graphs: order of nodes, side effects, and sizes that may be symbolic."""

from typing import Any

from torch._inductor.pattern_matcher import stable_topological_sort as stable_topological_sort
from torch.fx.node import has_side_effect as has_side_effect


def size_hint(size: Any) -> int:
    """Return the value of a size that may be symbolic, as far as it is known; for estimates only: it sets no guard."""
    if isinstance(size, int):
        return size
    return int(known) if (known := size.node._hint) is not None else 1
