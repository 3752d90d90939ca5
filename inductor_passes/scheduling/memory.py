"""How many bytes a graph's compute holds, node by node: liveness of what its kernels store."""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from torch.fx import Node


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
    during = [born[i] - died[i] for i in range(count)]
    placeholders = sum(nbytes for node, nbytes in stored.items() if node.op == "placeholder")
    before = [placeholders, *(born[i] - died[i + 1] for i in range(count))]
    return LiveBytes(during, before)
