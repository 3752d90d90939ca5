"""Let each kernel of a GPU compute again what is cheap, and not read what another kernel has stored for it.

::

    kernel 1: s = silu(x), s * y     kernel 2: s * error          s is in memory from one to the other
    ==>
    kernel 1: silu(x) * y            kernel 2: silu(x) * error    x is

TorchInductor does so within one graph, where it stores what its own rules say (``should_realize_on_reuse`` in
``torch/_inductor/ir.py``). A body (``compile_once.py``) that ends between both kernels would store ``silu(x)``, and
often ``x`` in float32; and ``scheduling/cost_model.py`` counts as stored what one kernel reads of another.
"""

from collections import defaultdict

import torch
from torch.fx import Graph, Node

from inductor_passes.collectives import CASTS
from inductor_passes.fusion import (
    communicates,
    fused_regions,
    is_view,
    nbytes_of,
    storage_of,
    tensors_of,
    writes_to_inputs,
)
from inductor_passes.torch_compat.fx import move_before

_DEVICE = "cuda"
"""Type of the device: on a CPU what is computed again takes longer than what is read, and TorchInductor stores it."""
_LEAST_BYTES = 1 << 20
"""Smaller values stay: they are not worth further nodes."""
_MOST_OPERATORS = 30
"""Number of operators that are computed again for one value (``realize_opcount_threshold`` of TorchInductor)."""
_MOST_KERNELS = 4
"""Number of further kernels that compute a value (``realize_reads_threshold`` of TorchInductor)."""


def compute_again(graph: Graph) -> int:
    """Compute pointwise values in every kernel that reads them, where that takes less memory; return how many.

    Each kernel must be able to compute the value, in a few operators, from what is in memory then or takes fewer bytes.
    Values that anything else reads, such as a matmul, are stored in any case, and stay.
    """
    kernels = _Kernels(graph)
    return sum([kernels.compute_again(node) for node in [*graph.nodes] if kernels.may_compute_again(node)])


class _Kernels:
    """The kernels of a graph, while values are moved into them."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._of = fused_regions(graph)
        self._place = {node: i for i, node in enumerate(graph.nodes)}
        self._copies: dict[tuple[Node, Node], Node] = {}
        """The node that stands for a value in a kernel that computes it again."""

    def may_compute_again(self, node: Node) -> bool:
        """Return whether several kernels, and nothing else, read a value that is pointwise and large."""
        if node not in self._of or not _is_cheap(node) or nbytes_of(node) < _LEAST_BYTES:
            return False
        return self._is_stored(node) and all(user in self._of for user in node.users)

    def compute_again(self, node: Node) -> bool:
        """Compute a value in every kernel that reads it, if that takes less memory."""
        readers: dict[Node, list[Node]] = defaultdict(list)
        for user in node.users:
            if self._of[user] is not self._of[node]:
                readers[self._of[user]].append(user)
        first = {kernel: min(users, key=self._place.__getitem__) for kernel, users in readers.items()}
        if len(first) > _MOST_KERNELS or not all(self._is_worth_it(node, reader) for reader in first.values()):
            return False
        for kernel, users in readers.items():
            copied = self._copy(node, first[kernel])
            for user in users:
                user.replace_input_with(node, copied)
        return True

    def _is_worth_it(self, node: Node, first: Node) -> bool:
        """Return whether the kernel of ``first``, its first reader of a value, is to compute the value."""
        kernel = self._of[first]
        computed = self._computed_for(node, kernel)
        if computed is None or len(computed) > _MOST_OPERATORS:
            return False
        inside = {*computed, *(source for source, copied_to in self._copies if copied_to is kernel)}
        sources = {source: None for each in computed for source in each.all_input_nodes if source not in inside}
        stored = dict.fromkeys(map(storage_of, sources))
        longer = [source for source in stored if not self._is_read_from(source, first)]
        if any(map(_is_changed, stored)) or any(map(communicates, longer)):  # a plan frees what was gathered
            return False
        return sum(map(nbytes_of, longer)) < nbytes_of(node)

    def _computed_for(self, node: Node, kernel: Node) -> dict[Node, None] | None:
        """Return what ``kernel`` has to compute for a value of another one, in order; ``None``: it cannot."""
        computed: dict[Node, None] = {}
        for source in node.all_input_nodes:
            inside = self._of.get(source) is self._of[node]
            if inside and (source, kernel) not in self._copies and not self._is_stored(source):
                further = self._computed_for(source, kernel) if _is_cheap(source) else None
                if further is None:
                    return None
                computed.update(further)
        return {**computed, node: None}

    def _copy(self, node: Node, before: Node) -> Node:
        kernel = self._of[before]
        for each in self._computed_for(node, kernel) or ():
            with self.graph.inserting_before(before):
                copied = self.graph.node_copy(each, lambda source: self._copies.get((source, kernel), source))
            for source in copied.all_input_nodes:  # a copy that was made for a later reader
                move_before(copied, source)
            self._copies[each, kernel] = copied
            self._of[copied], self._place[copied] = kernel, self._place[before]
        return self._copies[node, kernel]

    def _is_stored(self, node: Node) -> bool:
        return any(self._of.get(user) is not self._of[node] for user in node.users)

    def _is_read_from(self, source: Node, reader: Node) -> bool:
        """Return whether something reads ``source`` at the place of ``reader`` or later: then it is in memory there."""
        return any(
            self._is_read_from(user, reader) if is_view(user) else self._place[user] >= self._place[reader]
            for user in source.users
        )


def _is_cheap(node: Node) -> bool:
    """Return whether ``node`` is computed value by value on a GPU."""
    if not isinstance(node.target, torch._ops.OpOverload) or writes_to_inputs(node):
        return False
    pointwise = torch.Tag.pointwise in node.target.tags or node.target in CASTS
    return pointwise and all(value.device.type == _DEVICE for value in tensors_of(node))


def _is_changed(value: Node) -> bool:
    """Return whether something writes to a value, or to a view of it."""
    return any(_is_changed(user) if is_view(user) else writes_to_inputs(user) for user in value.users)
