"""The collectives of sharded parameters, as graphs have them: what is marked on them, and how passes find them.

::

    shard - [to_device] - [permute] - [pad] - [cast] - all_gather - wait - ...                      its gather chain
    full gradient - [add_up] - [cast] - [permute] - [pad] - reduction - wait - unary* - gradient    its reduction chain

where the reduction is a reduce-scatter, an all-reduce (of a replicated parameter), or one and then another. In a
bucket with a wire format (``bucket.py``) a gather's weights are decoded behind its wait, and an all-to-all takes the
place of a reduce-scatter, or over several nodes two::

    shards - encode - all_gather - wait - decode - ...     full gradients - encode - all_to_all - wait - decode - ...
        full gradients - encode - all_to_all inside - wait - encode sums - all_to_all between - wait - decode - ...

In hybrid shard the second of these is an all-gather among replicas, in place of the all-reduce.

A chain belongs to a parameter because it starts at the placeholder of its shard, or ends at the output that is
its shard's gradient, and for no other reason (names and positions of nodes mean nothing). What ``identify.py`` finds is
marked on the collective itself, ``node.meta["simplefsdp_fqns"]``; the mark survives partitioning and lowering passes,
which keep collectives. A collective without a mark belongs to the user and is never touched.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Graph, Node

from inductor_passes.ops.encode import DECODE_SUMS, ENCODE_GRADIENTS, ENCODE_SHARDS, ENCODE_SUMS
from inductor_passes.ops.gather_shards import GATHER_SHARDS, GATHER_SHARDS_GROUP
from inductor_passes.ops.offload import TO_DEVICE

FQNS = "simplefsdp_fqns"
WIRE_FORMAT = "simplefsdp_wire_format"
"""Key in ``node.meta`` for the wire format (``ops/wire_formats.py``) that a gather or reduce-scatter is to get."""
TWO_STEPS = "simplefsdp_two_steps"
"""Key in ``node.meta`` for the ``TwoSteps`` in which a reduce-scatter with a wire format is to reduce."""
SHARD = "simplefsdp_shard"
"""Key in ``node.meta`` for the placeholder of the shard whose errors a reduce-scatter is to feed back."""
EXCHANGED = "simplefsdp_exchanged"
"""Key in ``node.meta`` for the FQN of the embedding whose tokens or embeddings a collective exchanges."""
BUCKET = "simplefsdp_bucket"
"""Key in ``node.meta`` for the bucket of the plan that a marked collective is a member of, or carries out."""

_C10D = "c10d"
_c10d = torch.ops._c10d_functional
ALL_GATHER = _c10d.all_gather_into_tensor.default
REDUCE_SCATTER = _c10d.reduce_scatter_tensor.default
ALL_REDUCE = _c10d.all_reduce.default
ALL_TO_ALL = _c10d.all_to_all_single.default
REDUCTIONS = (REDUCE_SCATTER, ALL_REDUCE)
REDUCE_SCATTER_GROUP = _c10d.reduce_scatter_tensor_coalesced.default
GROUPS = (GATHER_SHARDS_GROUP, REDUCE_SCATTER_GROUP)
"""Collectives that are issued together; they return a list, of which each tensor is awaited."""
WAIT = _c10d.wait_tensor.default

CASTS = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)
PADS = (torch.ops.aten.constant_pad_nd.default,)
COPIES = (torch.ops.aten.clone.default,)
MOVES = (torch.ops.aten.permute.default,)
_REINTERPRETED = (torch.ops.aten.view_as_real.default, torch.ops.aten.view.dtype)
_VIEW_AS_COMPLEX = torch.ops.aten.view_as_complex.default
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten.detach.default)


class TwoSteps(NamedTuple):
    """How a gradient in a wire format is reduced over several nodes; see [Note: reductions in two steps].

    In hybrid shard the ranks with different shards take the place of a node, and replicas that of nodes.
    """

    inside: str
    """Process group of the ranks of this rank's node."""
    ranks: int
    """Number of ranks of each node."""
    between: str
    """Process group of the ranks that have this rank's place on their nodes."""
    nodes: int
    between_format: str
    """Wire format of what travels between nodes."""
    to_replicas: bool = False
    """Whether all ranks of ``between`` need the same sums, as they hold the same shard."""
    feeds_back: bool = False
    """Whether what rounding takes from a rank's sums is added to its next ones (``ops/error_feedback.py``)."""

    @property
    def parts(self) -> int:
        """Number of ranks of ``between`` that a rank sends different sums."""
        return 1 if self.to_replicas else self.nodes


@dataclass(frozen=True)
class GraphParameter:
    """A sharded parameter, as the passes know it."""

    fqn: str
    reshard: bool | None
    """Whether backward gathers the weight again (else the weight is saved); ``None``: unless the planner keeps it."""
    dtype: torch.dtype
    """Dtype of the full weight, and so of its gradient."""
    groups: tuple[str, ...]
    """Process groups that the gradient is reduced over, in this order."""
    gather_format: str | None = None
    """Wire format of the gather; ``None``: the weight travels in ``dtype``."""
    reduce_format: str | None = None
    """Wire format of the reduce-scatter; ``None``: the gradient travels in the dtype of its reduction."""
    two_steps: TwoSteps | None = None
    """How a gradient with a wire format is reduced over several nodes; ``None``: in one step."""
    is_exchanged: bool = False
    """Whether it is an embedding of which no weight travels: tokens and embeddings are exchanged."""


@dataclass(frozen=True)
class Collective:
    """A marked collective and the wait for it."""

    fqns: tuple[str, ...]
    node: Node
    wait: Node
    all_reduce_after: "Collective | None" = None
    """The all-reduce, over another group, that follows on this collective's result; or the second step of two."""

    @property
    def input(self) -> Node:
        return self.node.all_input_nodes[0]

    @property
    def result(self) -> Node:
        """The wait for the collective, or for the all-reduce that follows it."""
        return self.all_reduce_after.result if self.all_reduce_after else self.wait

    @property
    def is_encoded(self) -> bool:
        """Whether the collective moves values in a wire format already."""
        return self.input.target in (ENCODE_SHARDS, ENCODE_GRADIENTS, ENCODE_SUMS)

    @property
    def wire_format(self) -> str | None:
        """The wire format that the collective is to get; ``None``: none, or it has got one."""
        found: str | None = self.node.meta.get(WIRE_FORMAT)
        return found

    @property
    def two_steps(self) -> TwoSteps | None:
        """The two steps in which the collective is to reduce in its wire format; ``None``: it has one step."""
        found: TwoSteps | None = self.node.meta.get(TWO_STEPS) if self.wire_format else None
        return found

    @property
    def shard(self) -> Node | None:
        """The placeholder of the shard whose errors the collective is to feed back."""
        found: Node | None = self.node.meta.get(SHARD) if self.wire_format else None
        return found

    @property
    def options(self) -> tuple[Any, ...]:
        """All arguments but the input: gather ``(ranks, group)``, reduce-scatter ``(operator, ranks, group)``,
        all-reduce ``(operator, group)``."""
        return self.node.args[1:]

    @property
    def steps(self) -> list[Node]:
        """The collective and the all-reduce that follows it, if there is one."""
        return [self.node, *(self.all_reduce_after.steps if self.all_reduce_after else [])]

    def gather_kind(self) -> tuple[Any, ...]:
        """The properties that gathers must have in common to be merged into one."""
        return (
            self.options
            if self.wire_format is None
            else (*self.options, self.wire_format, self.input.meta["val"].dtype)
        )

    def reduction_kind(self) -> tuple[Any, ...]:
        """The properties that reductions must have in common to be merged into one."""
        all_reduce = self.all_reduce_after.reduction_kind() if self.all_reduce_after else ()
        # Behind an odd number of reals a complex number would not be aligned.
        return (
            self.node.target,
            self.options,
            self.input.meta["val"].dtype,
            _becomes_complex(self.result),
            *all_reduce,
            *([] if self.wire_format is None else [self.wire_format, self.two_steps]),
        )


def gathers(graph: Graph) -> list[Collective]:
    """Return the marked all-gathers of one weight, or of encoded ones, that are not part of a group, in graph order."""
    found = [node for node in _marked(graph, ALL_GATHER) if not gathers_sums(node)]
    return [Collective(node.meta[FQNS], node, wait_of(node)) for node in found]


def gathers_sums(gather: Node) -> bool:
    """Return whether an all-gather is the second step of a reduction, among replicas."""
    return gather.all_input_nodes[0].target is ENCODE_SUMS


def reductions(graph: Graph) -> list[Collective]:
    """Return the marked reductions that are not part of a group, in graph order.

    An all-reduce of another's result is part of that reduction.
    """
    found: dict[Node, Collective] = {}
    among_replicas = [node for node in _marked(graph, ALL_GATHER) if gathers_sums(node)]
    for node in sorted([*_marked(graph, *REDUCTIONS, ALL_TO_ALL), *among_replicas], reverse=True):
        wait = wait_of(node)
        following = [found.pop(user) for user in received(wait).users if user in found]
        found[node] = Collective(node.meta[FQNS], node, wait, following[0] if following else None)
    return list(found.values())[::-1]


def received(wait: Node) -> Node:
    """Return what a collective brought: the wait for it, or the sums of what it brought in a wire format."""
    return next((user for user in wait.users if user.target in (DECODE_SUMS, ENCODE_SUMS)), wait)


def groups(graph: Graph) -> list[Node]:
    """Return the marked groups of collectives, in graph order."""
    return _marked(graph, *GROUPS)


def gathers_of_shards(graph: Graph) -> list[Node]:
    """Return the marked all-gathers into one buffer that cast and pad shards, in graph order."""
    return _marked(graph, GATHER_SHARDS)


def is_deterministic(node: Node) -> bool:
    """Return whether ``node`` computes a tensor (or a tuple of them) from other nodes and nothing else."""
    if not isinstance(node.meta.get("val"), torch.Tensor | list | tuple):
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    # Communication ends a chain; a random operator depends on the generator too.
    return not (_C10D in node.target.namespace or torch.Tag.nondeterministic_seeded in node.target.tags)


def source_chain(gather: Node) -> list[Node]:
    """Return the unary operators that lead from a placeholder to ``gather``, in order; raise for any other node."""
    chain: list[Node] = []
    node = gather
    while node.op != "placeholder" and (node := node.all_input_nodes[0]).op != "placeholder":
        assert prepares_a_shard(node), f"{node.name}: expected a pad, cast or view of a shard before its all-gather"
        chain.insert(0, node)
    return chain


def shard_of(gather: Node) -> Node:
    """Return the placeholder that ``gather`` gathers, before its casts, pads and views."""
    return (source_chain(gather) or [gather])[0].all_input_nodes[0]


def before_cast_and_pad(node: Node) -> Node:
    """Return the node that ``node`` copies, casts (once) or pads behind its last row."""
    was_cast = False
    while node.target in (*COPIES, *PADS, *CASTS):
        if node.target in PADS and not _pads_rows_with_zeros(node):
            break
        if node.target in CASTS and was_cast:
            break
        was_cast |= node.target in CASTS
        node = node.all_input_nodes[0]
    return node


def _pads_rows_with_zeros(node: Node) -> bool:
    """Return whether ``node`` pads zeros behind the last row (or a gradient's last column), and cuts nothing off."""
    amounts = list(cast(Sequence[int], node.args[1]))
    value = node.args[2] if len(node.args) > 2 else 0
    return bool(not any(amounts[:-1]) and amounts[-1] >= 0 and value == 0)


def prepares_a_shard(node: Node) -> bool:
    """Return whether ``node`` is one that may lie between a shard and its all-gather."""
    if node.target in _VIEWS:  # as DTensor.to_local takes, and as a view in another dtype leaves behind
        return node.meta["val"].shape == node.all_input_nodes[0].meta["val"].shape
    return node.target in (*CASTS, *PADS, *MOVES, *COPIES, *_REINTERPRETED, TO_DEVICE)


def _becomes_complex(node: Node) -> bool:
    following = [user for user in node.users if is_deterministic(user) and len(user.all_input_nodes) == 1]
    return any(user.target is _VIEW_AS_COMPLEX or _becomes_complex(user) for user in following)


def _marked(graph: Graph, *targets: Callable[..., Any]) -> list[Node]:
    found = [node for target in targets for node in graph.find_nodes(op="call_function", target=target)]
    return sorted(node for node in found if FQNS in node.meta)


def wait_of(collective: Node) -> Node:
    """Return the only wait for a collective."""
    (wait,) = collective.users
    assert wait.target is WAIT, f"{collective.name}: expected one wait, found {wait.name}"
    return wait


def erase_unused_chain(node: Node) -> None:
    """Erase ``node`` and the chain that leads to it, up to a node with another user."""
    while not node.users:
        before = node.all_input_nodes[0]
        node.graph.erase_node(node)
        node = before
