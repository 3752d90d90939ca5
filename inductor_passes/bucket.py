"""Merge the collectives of a bucket into one, on a forward, backward or inference graph (after partitioning).

::

    shard_0 - [pad] - [cast] - all_gather - wait -> ...        shard_0 -+                             +-> ...
    shard_1 - [pad] - [cast] - all_gather - wait -> ...  ==>   shard_1 -+- all_gather - wait - unpack +-> ...

    grad_0 - [cast] - [pad] - reduce_scatter - wait -> ...     grad_0 -+                                 +- view -> ...
    grad_1 - [cast] - [pad] - reduce_scatter - wait -> ... ==> grad_1 -+- pack - reduce_scatter - wait - +- view -> ...

In a bucket of the form ``"grouped"`` members keep their own memory, and nothing is copied but what is cast or padded::

    shard_0 -+                    +- wait -> ...       grad_0 -+                        +- wait -> ...
    shard_1 -+- all_gather_group -+- wait -> ...       grad_1 -+- reduce_scatter_group -+- wait -> ...

Gathers cast and pad their shards themselves, also that of one shard (``ops/gather_shards.py``). Gradients that must be
cast, padded, divided or made contiguous are packed, and their buffer is one more member of the group. Gathers of
several dtypes are packed where the backend is not NCCL, and so are all-reduces, and reduce-scatters that an all-reduce
follows.

In a wire format members are encoded into the buffer and decoded out of it, also a member that stays alone, and whatever
the form of the bucket; gradients then travel by an all-to-all, over several nodes by two, and each rank adds up what it
gets::

    shard_0 -+                                      +-> ...   grad_0 -+                                   +- view -> ...
    shard_1 -+- encode - all_gather - wait - decode +-> ...   grad_1 -+- encode - all_to_all - wait - sum +- view -> ...

All-reduces, also those that follow a reduce-scatter, are merged in the same way. Packing order is the bucket's own:
rank r's part of the buffer holds member 0's rows of rank r, then member 1's, as in FSDP2; ``ops/pack.py`` has the
other operators. A bucket is carried out by one collective or group for all members that are alike: of one process
group and wire format and, for reductions, one dtype, operator and all-reduce that follows. A member that the graph does
not gather (or reduce) is left out, and a collective that stays alone is not touched but for its cast and pad.
"""

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.multiprocessing.reductions import StorageWeakRef

from inductor_passes.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BUCKET,
    FQNS,
    REDUCE_SCATTER,
    REDUCE_SCATTER_GROUP,
    TWO_STEPS,
    WAIT,
    WIRE_FORMAT,
    Collective,
    before_cast_and_pad,
    erase_unused_chain,
    gathers,
    gathers_of_shards,
    groups,
    reductions,
)
from inductor_passes.fusion import can_be_reduced_in_place, is_fused_cast, mixes_dtypes, shard_before_cast_and_pad
from inductor_passes.ops.encode import DECODE_SUMS, DECODE_WEIGHTS, ENCODE_GRADIENTS, ENCODE_SHARDS, ENCODE_SUMS
from inductor_passes.ops.gather_shards import GATHER_SHARDS, GATHER_SHARDS_GROUP
from inductor_passes.ops.pack import PACK_GRADIENTS, UNPACK_WEIGHTS
from inductor_passes.rounding import ROUNDED_TO
from inductor_passes.scheduling.issue_points import Bucket, PlanError
from inductor_passes.torch_compat.fx import insert_call, move_before, stable_topological_sort

_aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default


def assign(graph: Graph, gather_buckets: Sequence[Bucket], reduction_buckets: Sequence[Bucket]) -> None:
    """Write each marked collective's bucket into its ``meta``, where later passes find it, also on lowered nodes.

    Raises:
        PlanError: a collective of a parameter is in no bucket.
    """
    for found, buckets, what in (
        (gathers(graph), gather_buckets, "gathers"),
        (reductions(graph), reduction_buckets, "reduces"),
    ):
        by_fqn: Mapping[str, Bucket] = {fqn: bucket for bucket in buckets for fqn in bucket.fqns}
        missing = [c.fqns[0] for c in found if c.fqns[0] not in by_fqn]
        if missing:
            raise PlanError(f"plan: this graph {what} {', '.join(missing)}, but no bucket of the plan does")
        for collective in found:
            for step in collective.steps:
                step.meta[BUCKET] = by_fqn[collective.fqns[0]]


def choose_formats(
    graph: Graph, gathered: Mapping[str, tuple[str, ...]], reduced: Mapping[str, tuple[str, ...]]
) -> None:
    """Let only the gathers and reductions of these parameters have wire formats, and these: one for each step."""
    for found, chosen in ((gathers(graph), gathered), (reductions(graph), reduced)):
        for collective in found:
            if collective.wire_format is None:
                continue
            meta, formats = collective.node.meta, chosen.get(collective.fqns[0])
            if formats is None:
                del meta[WIRE_FORMAT]
                continue
            meta[WIRE_FORMAT] = formats[0]
            if (two_steps := collective.two_steps) is not None:
                meta[TWO_STEPS] = two_steps._replace(between_format=formats[1])


def bucket(graph: Graph) -> None:
    """Merge gathers and reductions, each within the bucket that ``assign`` gave it.

    Raises:
        PlanError: the members of a bucket that can be merged do not have exactly one collective.
    """
    before = _fqns(graph)
    for members in _members(gathers(graph), Collective.gather_kind):
        _merge_gathers(graph, members)
    for members in _members(reductions(graph), Collective.reduction_kind):
        _merge_reductions(graph, members)
    # The results of a merged reduction are there later than the members' were: their users move behind it.
    stable_topological_sort(graph)
    graph.lint()
    left = [*_members(gathers(graph), Collective.gather_kind), *_members(reductions(graph), Collective.reduction_kind)]
    if left or _fqns(graph) != before:
        lost = {fqn for fqn, _ in before - _fqns(graph)} | {member.fqns[0] for members in left for member in members}
        raise PlanError(f"the plan is not carried out: not merged, or lost: {', '.join(sorted(lost))}")


def let_none_work_in_place_on_the_input_of_another(graph: Graph) -> None:
    """Copy the input of an all-reduce that another collective reads too, in a graph that no pass looks at any more.

    TorchInductor's passes would take the copy for superfluous.
    Inductor makes an all-reduce work in place where nothing reads its input later, and a plan may issue the all-reduce
    before another collective with the same input (a sum of two weights gives both one gradient) is done.
    """
    found = reductions(graph)
    inputs = Counter(_storage(collective.input) for collective in found)
    inputs.update(_storage(node) for group in groups(graph) for node in group.all_input_nodes)
    for collective in found:
        if collective.node.target is ALL_REDUCE and inputs[_storage(collective.input)] > 1:
            with graph.inserting_before(collective.node):
                own = insert_call(_aten.clone.default, collective.input)
            collective.node.replace_input_with(collective.input, own)


def _storage(node: Node) -> StorageWeakRef:
    return StorageWeakRef(_val(node).untyped_storage())


def _fqns(graph: Graph) -> Counter[tuple[str, bool]]:
    """Return the FQNs of all gathers, and of all reductions."""
    found = {False: gathers(graph), True: reductions(graph)}
    fqns = Counter((fqn, reduces) for reduces, of in found.items() for collective in of for fqn in collective.fqns)
    merged = [*groups(graph), *gathers_of_shards(graph)]
    fqns.update((fqn, node.target is REDUCE_SCATTER_GROUP) for node in merged for fqn in node.meta[FQNS])
    return fqns


def _members(found: list[Collective], kind: Callable[[Collective], Any]) -> list[list[Collective]]:
    """Return the collectives to merge: those of one bucket and one kind, in packing order. What is still to be encoded,
    or to cast or pad its shard itself, is returned although it is alone."""
    mergeable: dict[tuple, list[Collective]] = {}
    for collective in found:
        if collective.is_encoded:
            continue
        bucket = _bucket_of(collective)
        mergeable.setdefault((bucket or collective, kind(collective)), []).append(collective)
    for (bucket, _), members in mergeable.items():
        if len(members) > 1:
            place = {fqn: i for i, fqn in enumerate(bucket.fqns)}
            members.sort(key=lambda c: place[c.fqns[0]])
    return [members for members in mergeable.values() if len(members) > 1 or _changes_alone(members[0])]


def _changes_alone(collective: Collective) -> bool:
    """Return whether another collective is to take the place of this one, although it is not merged with any."""
    if collective.wire_format is not None:
        return True
    planned_gather = collective.node.target is ALL_GATHER and _bucket_of(collective) is not None
    return planned_gather and shard_before_cast_and_pad(collective) is not collective.input


def _bucket_of(member: Collective) -> Bucket | None:
    bucket: Bucket | None = member.node.meta.get(BUCKET)
    return bucket


def _is_grouped(member: Collective) -> bool:
    bucket = _bucket_of(member)
    return bucket is not None and bucket.form == "grouped" and member.wire_format is None


def _merge_gathers(graph: Graph, members: list[Collective]) -> None:
    first = min(member.node for member in members)
    wire_format = members[0].wire_format
    strip = shard_before_cast_and_pad if wire_format is None else lambda member: before_cast_and_pad(member.input)
    shards = [*map(strip, members)]
    for shard in shards:
        move_before(first, shard)
    ranks, group = members[0].options
    numels = [_val(member.input).numel() for member in members]
    dtypes = [_val(member.input).dtype for member in members]
    can_be_grouped = len(members) > 1 and (len(set(dtypes)) == 1 or mixes_dtypes(members[0]))
    with graph.inserting_before(first):
        if _is_grouped(members[0]) and can_be_grouped:
            options = numels, dtypes, ranks, group
            _replace(members, _group(GATHER_SHARDS_GROUP, shards, [(member,) for member in members], options))
            return
        if wire_format is None:
            gathered = _collective(GATHER_SHARDS, shards, members, numels, dtypes, ranks, group)
            if len(members) == 1:
                _replace(members, [gathered])
                return
            unpacked = insert_call(UNPACK_WEIGHTS, gathered, ranks, numels, dtypes)
        else:
            packed = insert_call(ENCODE_SHARDS, shards, numels, wire_format)
            gathered = _collective(ALL_GATHER, packed, members, ranks, group)
            unpacked = insert_call(DECODE_WEIGHTS, gathered, ranks, numels, wire_format, dtypes[0])
        _replace(members, [insert_call(operator.getitem, unpacked, i) for i in range(len(members))])


def _merge_reductions(graph: Graph, members: list[Collective]) -> None:
    last = max(member.node for member in members)
    ranks = members[0].options[1] if members[0].node.target is REDUCE_SCATTER else 1
    dtype = _val(members[0].input).dtype
    own = [member for member in members if _is_grouped(member) and can_be_reduced_in_place(member)]
    rest = [member for member in members if member not in own]
    with graph.inserting_before(last):
        if own:
            inputs = [member.input for member in own]
            parts: list[tuple[Collective, ...]] = [(member,) for member in own]
            if rest:
                inputs.append(_packed(rest, ranks, dtype))
                parts.append(tuple(rest))
            reduced = _group(REDUCE_SCATTER_GROUP, inputs, parts, members[0].options)
            of_rest = _parts(reduced[-1], rest) if rest else []
            _replace([*own, *rest], [*reduced[: len(own)], *of_rest])
            return
        step: Collective | None = members[0]
        if members[0].wire_format is None:
            packed = _packed(members, ranks, dtype)
        else:
            packed = _encoded_and_reduced(members, ranks, dtype)
            two_steps = members[0].two_steps
            step = None if two_steps and two_steps.to_replicas else members[0].all_reduce_after
        while step:
            packed = _collective(step.node.target, packed, members, *step.options)
            step = step.all_reduce_after
        _replace(members, _parts(packed, members))


def _encoded_and_reduced(members: Sequence[Collective], ranks: int, dtype: torch.dtype) -> Node:
    """Insert the collectives of gradients in a wire format; return the reduced members, one after the other."""
    operator, _, group = members[0].options
    wire_format, two_steps = members[0].wire_format, members[0].two_steps
    numels = [_val(member.node).numel() for member in members]
    divisor = float(ranks) if operator == "avg" else 1.0
    sent = _packed(members, ranks, dtype)
    if two_steps is not None:
        received = _exchanged(sent, members, two_steps.ranks, two_steps.inside)
        options = two_steps.ranks, two_steps.parts, numels, wire_format, two_steps.between_format
        shards = [member.shard for member in members if member.shard is not None]
        sent = insert_call(ENCODE_SUMS, received, *options, *([shards] if shards else []))
        group, ranks, wire_format = two_steps.between, two_steps.nodes, two_steps.between_format
    if two_steps is not None and two_steps.to_replicas:
        all_reduce = members[0].all_reduce_after
        divisor *= ranks if all_reduce and all_reduce.options[0] == "avg" else 1
        received = _collective(ALL_GATHER, sent, members, ranks, group)
    else:
        received = _exchanged(sent, members, ranks, group)
    return insert_call(DECODE_SUMS, received, ranks, numels, wire_format, dtype, divisor)


def _exchanged(sent: Node, members: Sequence[Collective], ranks: int, group: str) -> Node:
    """Insert an all-to-all of as many bytes for each rank; return the wait for it."""
    splits = [_val(sent).numel() // ranks] * ranks
    return _collective(ALL_TO_ALL, sent, members, splits, splits, group)


def _packed(members: Sequence[Collective], ranks: int, dtype: torch.dtype) -> Node:
    """Return a buffer of the members' gradients: what their collective reads."""
    divisor, inputs = _divided([member.input for member in members])
    gradients = [_gradient(node, ranks) for node in inputs]
    if len(members) > 1:
        gradients = [_as_others(member, gradient) for member, gradient in zip(members, gradients, strict=True)]
    if (wire_format := members[0].wire_format) is not None:
        nodes = members[0].two_steps.parts if members[0].two_steps else 1
        return insert_call(ENCODE_GRADIENTS, gradients, ranks, wire_format, dtype, divisor or 1.0, nodes)
    if len({_val(gradient).dtype for gradient in gradients}) > 1:  # the kernel that packs them knows one cast
        gradients = [
            next((user for user in gradient.users if is_fused_cast(user) and _val(user).dtype is dtype), gradient)
            for gradient in gradients
        ]
    return insert_call(PACK_GRADIENTS, gradients, ranks, dtype, *([] if divisor is None else [divisor]))


def _parts(reduced: Node, members: Sequence[Collective]) -> list[Node]:
    """Return each member's part of what their reduction has made of the packed gradients, in the member's shape."""
    starts = accumulate((_val(member.node).numel() for member in members), initial=0)
    parts = []
    for member, start in zip(members, starts, strict=False):
        shape = list(_val(member.node).shape)
        strides = torch.empty(shape, device="meta").stride()
        parts.append(insert_call(_aten.as_strided.default, reduced, shape, list(strides), start))
    return parts


def _group(
    target: Any, inputs: list[Node], parts: Sequence[tuple[Collective, ...]], options: tuple[Any, ...]
) -> list[Node]:
    """Insert a group of collectives, one for each part of the members, and return the waits for them."""
    issued = insert_call(target, inputs, *options)
    results = [insert_call(operator.getitem, issued, i) for i in range(len(parts))]
    for node, members in ((issued, [*chain(*parts)]), *zip(results, parts, strict=True)):
        _mark(node, members)
    return [insert_call(WAIT, result) for result in results]


def _divided(inputs: list[Node]) -> tuple[float | None, list[Node]]:
    """Return the number that all of these nodes divide by, if they divide and by one number, and what they divide."""
    divisors = {node.args[1] if node.target is _aten.div.Tensor else None for node in inputs}
    (divisor,) = divisors if len(divisors) == 1 else (None,)
    if not isinstance(divisor, int | float):
        return None, inputs
    return float(divisor), [node.all_input_nodes[0] for node in inputs]


def _as_others(member: Collective, gradient: Node) -> Node:
    """Return a member's gradient, rounded to its weight's dtype: gradients of one dtype are packed by one kernel."""
    rounded = member.node.meta.get(ROUNDED_TO)
    return gradient if rounded is None else insert_call(_CAST, gradient, rounded)


def _gradient(node: Node, ranks: int) -> Node:
    """Return the gradient that ``pack_gradients`` makes ``node`` from."""
    source = before_cast_and_pad(node)
    if not _val(source).shape:
        return _view(source, [1])
    shape, padded = _val(source).shape, _val(node).shape
    return source if [-(-shape[0] // ranks) * ranks, *shape[1:]] == list(padded) else node


def _collective(target: Any, packed: Node | list[Node], members: Sequence[Collective], *options: object) -> Node:
    node = insert_call(target, packed, *options)
    _mark(node, members)
    return insert_call(WAIT, node)


def _mark(node: Node, members: Sequence[Collective]) -> None:
    """Note on ``node`` whose collective it is."""
    node.meta[FQNS] = tuple(fqn for member in members for fqn in member.fqns)
    if (bucket := _bucket_of(members[0])) is not None:
        node.meta[BUCKET] = bucket


def _replace(members: Sequence[Collective], results: Sequence[Node]) -> None:
    views = [_view(result, list(_val(member.node).shape)) for member, result in zip(members, results, strict=True)]
    for member, view in zip(members, views, strict=True):
        member.result.replace_all_uses_with(view)
        erase_unused_chain(member.result)


def _view(node: Node, shape: list[int]) -> Node:
    return node if list(_val(node).shape) == shape else insert_call(_aten.view.default, node, shape)


def _val(node: Node) -> Any:
    return node.meta["val"]
