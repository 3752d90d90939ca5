"""How many bytes a graph's compute holds, node by node: liveness of what its kernels store."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.fx import Node

from inductor_passes.torch_compat.cuda import matmul_workspace_bytes
from inductor_passes.torch_compat.fx import size_hint

_aten = torch.ops.aten
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_backward.default
_CUBLAS = (_aten.mm, _aten.bmm, _aten.baddbmm)
"""Operators that cuBLAS computes; ``addmm`` is computed by cuBLASLt, with a workspace of a MiB."""


class LiveBytes(NamedTuple):
    """Bytes in use around ``n`` compute nodes."""

    during: list[int]
    """Bytes in use while each compute node runs, ``n`` numbers."""
    before: list[int]
    """Bytes in use before each compute node and at the end, ``n + 1`` numbers."""


def live_bytes(
    compute: Sequence[Node],
    stored: Mapping[Node, int],
    runs: Mapping[Node, Node],
    users: Callable[[Node], Collection[Node]],
    held: Collection[Node] = (),
) -> LiveBytes:
    """Return the bytes in use by ``stored`` values, each from the kernel that makes it to the last that reads it.

    ``compute``: the nodes in order. ``runs``: the node in whose place one that is fused with others runs. ``users``:
    who reads a node's memory. Values among ``stored`` that are inputs of the graph live from its start, outputs to its
    end, as do ``held`` values; what is read by no compute, but by a collective, is gone once made.
    """
    count = len(compute)
    index = {node: i for i, node in enumerate(compute)}

    def runs_at(node: Node) -> int | None:
        return index.get(runs.get(node, node))

    changes = [0] * (count + 1)
    last = [0] * (count + 1)
    for node, nbytes in stored.items():
        made = 0 if node.op == "placeholder" else runs_at(node)
        if made is None:
            continue
        readers = users(node)
        outlives = node in held or any(user.op == "output" for user in readers)
        read = max((at for user in readers if (at := runs_at(user)) is not None), default=made)
        changes[made] += nbytes
        last[count if outlives else max(made, read)] += nbytes
    born = list(accumulate(changes))
    died = list(accumulate(last, initial=0))
    during = [born[i] - died[i] + temporary_bytes(node) for i, node in enumerate(compute)]
    placeholders = sum(nbytes for node, nbytes in stored.items() if node.op == "placeholder")
    before = [placeholders, *(born[i] - died[i + 1] for i in range(count))]
    return LiveBytes(during, before)


def most_in_use(
    during: Sequence[int], begin: int, end: int, made: Iterable[tuple[int, int]], freed: Iterable[tuple[int, int]]
) -> int:
    """Return the most bytes in use in a step, from ``begin`` to ``end``, beside the gradients and weights of a replay.

    A replay counts them in the whole step, so they are subtracted here until they are made and once they are freed.

    Args:
        during: bytes in use while each compute node runs, without weights and gradients that are made for reductions.
        made: for each such gradient of the step the position of the compute node that makes it, and its bytes.
        freed: for each weight that is last read in the step the position of the next compute node, and its bytes.
    """
    in_use = list(during[begin:end])
    for node, nbytes in made:
        for i in range(min(node, end) - begin):
            in_use[i] -= nbytes
    for node, nbytes in freed:
        for i in range(node - begin, end - begin):
            in_use[i] -= nbytes
    return max(in_use)


def temporary_bytes(node: Node) -> int:
    """Return how many bytes an operator takes besides its results while it runs.

    A matmul on a GPU has a workspace. Flash attention's backward sums up the gradient of queries in float32, and makes
    gradients of keys and values for each head of the queries where these share them (``mha_bwd`` in torch's
    ``flash_api.cpp``).
    """
    if getattr(node.target, "_overloadpacket", None) in _CUBLAS and node.meta["val"].is_cuda:
        return matmul_workspace_bytes()
    if node.target is not _FLASH_BACKWARD:
        return 0
    query, key = (node.args[i].meta["val"] for i in (1, 2))  # type: ignore[union-attr]
    values = size_hint(query.numel())
    expanded = 2 * values * query.element_size() if query.shape[1] != key.shape[1] else 0
    return 4 * values + expanded
