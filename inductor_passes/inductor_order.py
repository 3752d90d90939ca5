"""``order`` for the kernels of TorchInductor's scheduler, after fusion, and what may not be fused for its sake."""

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch._ops import OpOverload
from torch.fx import Node
from torch.utils._pytree import tree_map

from inductor_passes.collectives import FQNS, GROUPS, WAIT
from inductor_passes.fusion import adds_rows
from inductor_passes.ops.encode import ENCODE_SUMS
from inductor_passes.ops.gather_shards import GATHERS_OF_SHARDS
from inductor_passes.order import check_order, order
from inductor_passes.runtime.agreement import AGREE
from inductor_passes.runtime.graph_dump import DUMP_NAMES, Report
from inductor_passes.runtime.record import Record, awaited_collective, collective_name, is_collective, recorded_sequence
from inductor_passes.scheduling.order_items import PACKS, UNPACKS, OrderItem, is_all_reduce_after, order_item
from inductor_passes.torch_compat.inductor import (
    horizontal_fusion,
    inductor_ir,
    is_ordering_only,
    register_lowering,
)


@contextmanager
def no_sums_across_matmuls() -> Iterator[None]:
    """Let TorchInductor meanwhile fuse no sum with a kernel behind a matmul for what both of them read.

    Fused, the sum would be taken where the other kernel runs: what is summed up would be in memory until then, and a
    gradient would be reduced later than the plan says, such as that of a norm's weight with the next norm's.
    """
    alone: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()

    def is_allowed(scheduler: Any, one: Any, other: Any) -> bool:
        first, second = sorted((one, other), key=lambda kernel: kernel.min_order)
        if not first.is_reduction():
            return True
        if (places := alone.get(scheduler)) is None:
            places = alone[scheduler] = [kernel.min_order for kernel in scheduler.nodes if _computes_alone(kernel)]
        return bisect_right(places, first.max_order) >= bisect_left(places, second.min_order)

    with horizontal_fusion(is_allowed):
        yield


def _computes_alone(kernel: Any) -> bool:
    """Return whether ``kernel`` computes what no other kernel can compute with it: a matmul, attention, or the like."""
    ir = inductor_ir()
    communicates = isinstance(kernel.node, ir._CollectiveKernel | ir._WaitKernel | ir.MultiOutput)
    return (kernel.is_extern() or kernel.is_template()) and not communicates and _fx_node(kernel.node) is None


def order_kernels(kernels: list[Any], report: Report | None = None) -> list[Any]:
    """Return ``kernels`` (``BaseSchedulerNode``) in the order of the plan whose buckets their collectives carry.

    Both orders are written to ``report``.

    Raises:
        PlanError: see ``order``.
    """
    kernels = _add_rows_late(kernels)
    before = kernel_items(kernels)
    ordered = [kernels[i] for i in order(before)]
    after = kernel_items(ordered)
    check_order(after)
    for record in _records(kernels):
        old = record.content
        changed = replace(old, **recorded_sequence(old, _steps(ordered)))
        if report is not None:
            *_, written, reordered, _ = DUMP_NAMES[changed.direction]
            report.write_text(f"{written}.txt", render_kernels(kernels, before))
            report.write_text(f"{reordered}.txt", render_kernels(ordered, after))
            changed = replace(changed, report=report.packed())
        record.content = changed
        _watch(record, ordered)
    for kernel in ordered:
        _forget_what_was_reduced(kernel)
    return ordered


def _add_rows_late(kernels: Sequence[Any]) -> list[Any]:
    """Return ``kernels``, each that adds rows right before the first that needs the sum, behind zeros that it adds to.

    TorchInductor fuses such a kernel with what it reads, and runs it where the first of that was. The sum is as large
    as an embedding: it would take time and memory before the gradients of smaller parameters are complete.
    """
    kernels = [*kernels]
    adding = [kernel for kernel in kernels if any(map(adds_rows, _operators(kernel)))]
    read = {dep.name for kernel in adding for dep in kernel.unmet_dependencies}
    zeros = [kernel for kernel in kernels if not kernel.read_writes.reads and read & {*kernel.get_buffer_names()}]
    for kernel in (*reversed(adding), *zeros):
        made = kernel.get_buffer_names()
        users = (i for i, user in enumerate(kernels) if any(dep.name in made for dep in user.unmet_dependencies))
        kernels.insert(next(users, len(kernels)), kernel)
        kernels.remove(kernel)  # from where it was before, the first of both places
    return kernels


def _forget_what_was_reduced(kernel: Any) -> None:
    """Let the input of a reduce-scatter be freed by the wait for it, not by that for the all-reduce that follows.

    The all-reduce works in place on the reduce-scatter's result, and Inductor takes every wait for such a result for a
    wait for the reduce-scatter, which reads its input until then.
    """
    node = _step(kernel.node)
    if node is not None and node.target is WAIT and is_all_reduce_after(awaited_collective(node)):
        awaited = {source.get_name() for source in kernel.node.get_volatile_reads()}
        kernel.read_writes.reads = type(kernel.read_writes.reads)(
            dep for dep in kernel.read_writes.reads if dep.name not in awaited
        )


class _KeptRecord:
    """The record of a graph, as the constant argument of the kernel that compares records."""

    def __init__(self, kernel: Any):
        self._kernel = kernel

    @property
    def content(self) -> Record:
        return Record.from_json(*self._kernel.constant_args)

    @content.setter
    def content(self, record: Record) -> None:
        self._kernel.constant_args = (record.to_json(),)


def _records(kernels: Sequence[Any]) -> list[_KeptRecord]:
    """Return the graph's record, or none for a graph without collectives of parameters."""
    return [_KeptRecord(kernel.node) for kernel in kernels if _is_agreement(kernel.node)]


def _steps(kernels: Sequence[Any]) -> list[Node]:
    """Return the FX nodes of the collectives and waits among the kernels."""
    return [node for kernel in kernels if (node := _step(kernel.node)) is not None]


def _step(kernel: Any) -> Node | None:
    ir = inductor_ir()
    if isinstance(kernel, ir._WaitKernel):
        return _origin(kernel, WAIT)
    if isinstance(kernel, ir._CollectiveKernel):
        return max((node for node in kernel.origins if is_collective(node)), default=None)
    return None


def _watch(record: _KeptRecord, ordered: Sequence[Any]) -> None:
    """Add a warning to ``record`` if another pass moves a collective or a wait before code is generated."""
    scheduler = ordered[0].scheduler
    generate = scheduler.codegen

    def codegen() -> Any:
        if names := moved_steps(ordered, scheduler.nodes):
            warning = f"another pass has moved, after the plan was carried out: {'; '.join(names)}"
            record.content = replace(record.content, warnings=(*record.content.warnings, warning))
        return generate()

    scheduler.codegen = codegen


def moved_steps(before: Sequence[Any], after: Sequence[Any]) -> list[str]:
    """Return the names of collectives and waits that changed their place among the kernels of compute."""
    steps = {kernel.get_name(): node for kernel in before if (node := _step(kernel.node))}
    places = [_places(kernels, steps) for kernels in (before, after)]
    return [_name(node) for name, node in steps.items() if places[0][name] != places[1].get(name)]


def _places(kernels: Sequence[Any], steps: Mapping[str, Node]) -> dict[str, int]:
    """Return the number of kernels of compute before each of ``steps``."""
    computed, found = 0, {}
    for kernel in kernels:
        if kernel.get_name() in steps:
            found[kernel.get_name()] = computed
        else:
            computed += 1
    return found


def _name(step: Node) -> str:
    issued = awaited_collective(step) if step.target is WAIT else step
    first, *more = issued.meta.get(FQNS, (issued.name,))
    what = f"{first} and {len(more)} more" if more else first
    return f"{'' if issued is step else 'the wait for '}{collective_name(issued)} of {what}"


def kernel_items(kernels: list[Any]) -> list[OrderItem]:
    """Return an ``OrderItem`` for each kernel."""
    ir = inductor_ir()
    producer = {name: i for i, kernel in enumerate(kernels) for name in kernel.get_buffer_names()}
    communicates = [isinstance(kernel.node, ir._CollectiveKernel) for kernel in kernels]
    first = next((i for i, kernel in enumerate(kernels) if _is_agreement(kernel.node)), None)
    items = []
    for i, kernel in enumerate(kernels):
        needs = set()
        for dep in kernel.unmet_dependencies:
            need = producer.get(dep.name, i)
            # Between two collectives or waits this is the order that they happen to be in, unless one writes what the
            # other reads; anywhere else it may stand for a write after a read.
            free = is_ordering_only(dep) and communicates[i] and communicates[need]
            if need != i and not (free and not _overwrites(kernel, kernels[need])):
                needs.add(need)
        if communicates[i] and first is not None and first != i:
            needs.add(first)
        reads_inputs = any(dep.name not in producer for dep in kernel.read_writes.reads)
        items.append(_item(kernel, OrderItem(frozenset(needs), reads_inputs), producer))
    return items


def _overwrites(kernel: Any, other: Any) -> bool:
    """Return whether ``kernel`` works in place on a buffer that ``other`` reads."""
    original = kernel.scheduler.mutation_real_name
    written = {original.get(name, name) for buffer in kernel.get_outputs() for name in buffer.get_mutations()}
    return any(original.get(dep.name, dep.name) in written for dep in other.read_writes.reads)


def _is_agreement(kernel: Any) -> bool:
    return isinstance(kernel, inductor_ir()._CollectiveKernel) and kernel.op_overload is AGREE


def _item(kernel: Any, plain: OrderItem, producer: dict[str, int]) -> OrderItem:
    node = _fx_node(kernel.node)
    if node is None:
        return plain
    # What works in place, as collectives of the user's do, gives a buffer another name.
    original = kernel.scheduler.mutation_real_name
    last: dict[str, int] = {}
    for dep in kernel.unmet_dependencies:
        name = original.get(dep.name, dep.name)
        last[name] = max(producer.get(dep.name, -1), last.get(name, -1))
    packed = isinstance(kernel.node, inductor_ir().MultiOutput)
    sources = [] if packed else [last.get(value.get_name(), -1) for value in kernel.node.inputs]
    return order_item(node, plain, sources)


def _fx_node(kernel: Any) -> Node | None:
    """Return the FX node that tells the role of ``kernel`` in communication, or ``None``."""
    ir = inductor_ir()
    if isinstance(kernel, ir.MultiOutput):
        unpack = _origin(kernel.inputs[0], *UNPACKS)
        several = unpack or next((n for n in kernel.inputs[0].origins if n.target in GROUPS), None)
        if several:
            return next((n for n in several.users if n.args[1] == kernel.indices[-1][1]), None)
        return _origin(kernel.inputs[0], *PACKS)
    if isinstance(kernel, ir._WaitKernel):
        return _origin(kernel, WAIT)
    if isinstance(kernel, ir.FallbackKernel):
        # Inductor makes all-reduces work in place, but keeps what is known of them.
        marked = (node for node in kernel.origins if FQNS in node.meta)
        return next(marked, None) or _origin(kernel, *PACKS, ENCODE_SUMS)
    return None


def _origin(kernel: Any, *targets: Any) -> Node | None:
    """Return the FX node of a kind that became ``kernel``; other nodes may have been fused into the kernel's inputs."""
    found = [node for node in kernel.origins if node.target in targets]
    return max(found) if found else None


def render_kernels(kernels: Sequence[Any], items: Sequence[OrderItem]) -> str:
    """Return one line a kernel: ``name: buffers = operators(what it reads)``, and FQNs for communication."""
    return "".join(_line(kernel, item) + "\n" for kernel, item in zip(kernels, items, strict=True))


def _line(kernel: Any, item: OrderItem) -> str:
    operators = [str(node.target).removesuffix(".default") for node in _operators(kernel)]
    buffers = ", ".join(sorted(kernel.get_buffer_names(), key=_number))
    reads = ", ".join(sorted({dep.name for dep in kernel.read_writes.reads}, key=_number))
    line = f"{kernel.get_name()}: {buffers} = {', '.join(operators)}({reads})"
    return f"{line}  # {item.kind}: {', '.join(item.fqns)}" if item.fqns else line


def _operators(kernel: Any) -> list[Node]:
    """Return the FX nodes that ``kernel`` computes, or of which it is a part."""
    if step := _step(kernel.node):  # others may have been fused into what it reads
        return [step]
    parts = (part.node.origins for part in kernel.get_nodes() if part.node is not None)
    return sorted({node for nodes in parts for node in nodes if node.op == "call_function"})


def _number(name: str) -> tuple[str, int]:
    """Return a sort key that puts buffers into the order of their numbers."""
    digits = name[len(name.rstrip("0123456789")) :]
    return name.rstrip("0123456789"), int(digits or 0)


def lower_agree() -> None:
    """Tell Inductor that ``agree`` must run, before the collectives that follow it."""
    ir = inductor_ir()

    def lowering(any: Any, record: str) -> Any:
        return ir.TensorBox.create(ir._CollectiveKernel.create_out_of_place(AGREE, any, record))

    register_lowering(AGREE, lowering)


def lower_gathers() -> None:
    """Tell Inductor that gathers of shards are collectives, whose results are to be awaited."""
    ir = inductor_ir()

    def lowering(op: OpOverload, shards: list[Any], *options: Any) -> Any:
        return tree_map(ir.TensorBox.create, ir._CollectiveKernel.create_out_of_place(op, shards, *options))

    for op in GATHERS_OF_SHARDS:
        register_lowering(op, functools.partial(lowering, op))


lower_agree()
lower_gathers()
