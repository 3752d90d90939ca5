"""``order`` for the kernels of TorchInductor's scheduler, after fusion."""

from typing import Any

from torch.fx import Node

from ._compat import inductor_ir, is_ordering_only
from .collectives import ALL_GATHER, MARK, REDUCTIONS, WAIT
from .copies import PACK_GRADIENTS, UNPACK_WEIGHTS
from .order import Item, item_for, order


def order_kernels(kernels: list[Any]) -> list[Any]:
    """``kernels`` (``BaseSchedulerNode``) in the order of the plan whose buckets their collectives carry.

    Raises:
        PlanError: see ``order``.
    """
    return [kernels[i] for i in order(kernel_items(kernels))]


def kernel_items(kernels: list[Any]) -> list[Item]:
    """What ``order`` asks of each kernel."""
    ir = inductor_ir()
    producer = {name: i for i, kernel in enumerate(kernels) for name in kernel.get_buffer_names()}
    communicates = [isinstance(kernel.node, ir._CollectiveKernel) for kernel in kernels]
    items = []
    for i, kernel in enumerate(kernels):
        needs = set()
        for dep in kernel.unmet_dependencies:
            need = producer.get(dep.name, i)
            # Between two collectives or waits this is the order that they happen to be in; anywhere else it may stand
            # for a write after a read.
            if need != i and not (is_ordering_only(dep) and communicates[i] and communicates[need]):
                needs.add(need)
        reads_inputs = any(dep.name not in producer for dep in kernel.read_writes.reads)
        items.append(_item(kernel.node, Item(frozenset(needs), reads_inputs), producer))
    return items


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
        return _origin(kernel, ALL_GATHER, *REDUCTIONS, PACK_GRADIENTS)
    return None


def _origin(kernel: Any, *targets: Any) -> Node | None:
    """The FX node that became ``kernel``; others may have been fused into its inputs."""
    found = [node for node in kernel.origins if node.target in targets]
    return max(found) if found else None
