"""``order`` for the kernels of TorchInductor's scheduler, after fusion."""

from typing import Any

from torch.fx import Node

from ._compat import inductor_ir, is_ordering_only, register_lowering
from .agreement import AGREE, with_sequence
from .collectives import MARK, WAIT
from .copies import PACK_GRADIENTS, UNPACK_WEIGHTS
from .order import Item, check_order, item_for, order


def order_kernels(kernels: list[Any]) -> list[Any]:
    """``kernels`` (``BaseSchedulerNode``) in the order of the plan whose buckets their collectives carry.

    Raises:
        PlanError: see ``order``.
    """
    ordered = [kernels[i] for i in order(kernel_items(kernels))]
    check_order(kernel_items(ordered))
    _update_record([kernel.node for kernel in ordered])
    return ordered


def _update_record(kernels: list[Any]) -> None:
    """Let the ranks compare the order that the collectives are in now."""
    ir = inductor_ir()
    collectives = []
    for kernel in kernels:
        if isinstance(kernel, ir._CollectiveKernel) and not isinstance(kernel, ir._WaitKernel):
            collectives += [node for node in kernel.origins if MARK in node.meta]
    for kernel in kernels:
        if _is_agreement(kernel):
            (old,) = kernel.constant_args
            kernel.constant_args = (with_sequence(old, collectives),)


def kernel_items(kernels: list[Any]) -> list[Item]:
    """What ``order`` asks of each kernel."""
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
        items.append(_item(kernel.node, Item(frozenset(needs), reads_inputs), producer))
    return items


def _overwrites(kernel: Any, other: Any) -> bool:
    """Whether ``kernel`` works in place on a buffer that ``other`` reads."""
    original = kernel.scheduler.mutation_real_name
    written = {original.get(name, name) for buffer in kernel.get_outputs() for name in buffer.get_mutations()}
    return any(original.get(dep.name, dep.name) in written for dep in other.read_writes.reads)


def _is_agreement(kernel: Any) -> bool:
    return isinstance(kernel, inductor_ir()._CollectiveKernel) and kernel.op_overload is AGREE


def _item(kernel: Any, plain: Item, producer: dict[str, int]) -> Item:
    node = _fx_node(kernel)
    if node is None:
        return plain
    packed = isinstance(kernel, inductor_ir().MultiOutput)
    sources = [] if packed else [producer.get(value.get_name(), -1) for value in kernel.inputs]
    return item_for(node, plain, sources)


def _fx_node(kernel: Any) -> Node | None:
    """The FX node that says what ``kernel`` has to do with communication."""
    ir = inductor_ir()
    if isinstance(kernel, ir.MultiOutput):
        unpack = _origin(kernel.inputs[0], UNPACK_WEIGHTS)
        if unpack:
            return next((n for n in unpack.users if n.args[1] == kernel.indices[-1][1]), None)
        return _origin(kernel.inputs[0], PACK_GRADIENTS)
    if isinstance(kernel, ir._WaitKernel):
        return _origin(kernel, WAIT)
    if isinstance(kernel, ir.FallbackKernel):
        # Inductor makes all-reduces work in place, but keeps what is known of them.
        marked = (node for node in kernel.origins if MARK in node.meta)
        return next(marked, None) or _origin(kernel, PACK_GRADIENTS)
    return None


def _origin(kernel: Any, target: Any) -> Node | None:
    """The FX node of a kind that became ``kernel``; others may have been fused into its inputs."""
    found = [node for node in kernel.origins if node.target is target]
    return max(found) if found else None


def lower_agree() -> None:
    """Tell Inductor that ``agree`` must run, before the collectives that follow it."""
    ir = inductor_ir()

    def lowering(any: Any, record: str) -> Any:
        return ir.TensorBox.create(ir._CollectiveKernel.create_out_of_place(AGREE, any, record))

    register_lowering(AGREE, lowering)


lower_agree()
