"""What differs between torch 2.11 and 2.15, and the torch-internal names that the passes and the frontend use.

Everything here exists under the same name in 2.11, 2.13 and 2.15. What only one module is about is imported there:
``backend.py`` registers with Dynamo, ``gloo.py`` and ``rehearsal`` make process groups.
"""

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    PlainAOTInput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    TangentAOTInput,
)
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import CompileContext
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import has_side_effect
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "NOTHING_ELSE_MOVES",
    "OUT_FORMS_REACH_PYTHON_GROUPS",
    "REDUCES_IN_OWN_DTYPE",
    "CheckpointPolicy",
    "CustomGraphPass",
    "CustomPartitionerFn",
    "CustomSchedulerPass",
    "DTensorSpec",
    "Halves",
    "StridedShard",
    "after_backward",
    "compile_id",
    "concatenated",
    "current_backward",
    "default_store",
    "dispatch_modes",
    "dtensor",
    "dtypes_of",
    "get_eval_frame_callback",
    "get_hash_for_files",
    "group_ranks",
    "has_side_effect",
    "hint",
    "in_backward",
    "inductor_config",
    "inductor_ir",
    "inductor_options",
    "inside_torch_compile",
    "is_backward",
    "is_body",
    "is_ordering_only",
    "load_cpp",
    "local_of",
    "local_part",
    "min_cut_rematerialization_partition",
    "opaque_objects_last",
    "opaque_objects_weigh_nothing",
    "parameter_gradients",
    "parameter_inputs",
    "pop_saved_tensors_hooks",
    "push_saved_tensors_hooks",
    "register_lowering",
    "running_code",
    "saved_tensors_hooks",
    "skip_code",
    "stable_topological_sort",
    "stands_alone",
    "take_gradients_as_they_are",
    "temporarily_clear_interpreter_stack",
    "trace_artifact",
    "without_dispatch_modes",
]

Halves = tuple[GraphModule, GraphModule]

CustomSchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", object)
"""Before 2.12 a pass on kernels is any callable, and not in the key of the compile cache."""

NOTHING_ELSE_MOVES: dict[str, Any] = {
    "combo_kernels": False,
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
    "triton.reorder_for_reducing_graph_partitions": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
}
"""Inductor configuration under which no pass moves kernels after ``_post_fusion_custom_pass``."""
if not hasattr(inductor_config.aten_distributed_optimizations, "enable_simple_overlap"):  # before 2.14
    del NOTHING_ELSE_MOVES["aten_distributed_optimizations.enable_simple_overlap"]

_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

OUT_FORMS_REACH_PYTHON_GROUPS = _VERSION >= (2, 15)
"""Of functional collectives; before, they need a backend in C++."""

REDUCES_IN_OWN_DTYPE = _VERSION >= (2, 15)
"""Whether ``MixedPrecisionPolicy.reduce_dtype=None`` is the dtype of the parameter; before, that of the gradient."""


def take_gradients_as_they_are(ctx: Any) -> None:
    """Let an autograd function with one output get its gradient in the dtype that it has, where FSDP2 does; before 2.15
    it is always cast to that of the output."""
    if hasattr(ctx, "set_output_grad_dtype"):
        ctx.set_output_grad_dtype(None)


def dtensor(local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size) -> DTensor:
    """``DTensor.from_local(local, mesh, placements, shape=shape)``, contiguous, detached, in a tenth of the time."""
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)


def local_part(value: Any) -> Any:
    """What this rank has of a ``DTensor``, the same memory and not differentiable; anything else as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value


def concatenated(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """The mesh with the dimensions of both, which are parts of one.

    Raises:
        RuntimeError: they are not.
    """
    return DeviceMesh._concatenate([outer, inner])


def local_of(param: DTensor) -> Tensor:
    """``param.to_local()``, whose gradient is moved to the mesh's device wherever it is, and before torch 2.12 has no
    gradient itself, is zeros where there is none, and has strides that differ between ranks where shards are uneven,
    for which autograd then gathers on some of them."""
    return cast(Tensor, _Local.apply(param))


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx, param):
        ctx.spec = param._spec
        ctx.set_materialize_grads(False)
        return param._local_tensor.view_as(param._local_tensor)

    @staticmethod
    def backward(ctx, grad):
        return None if grad is None else _Global.apply(grad, ctx.spec)


class _Global(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local, spec):
        ctx.spec, ctx.device = spec, local.device
        return DTensor(local, spec, requires_grad=False)

    @staticmethod
    def backward(ctx, grad):
        local = _Local.apply(grad.redistribute(ctx.spec.mesh, ctx.spec.placements))
        return local.to(ctx.device), None


def inside_torch_compile() -> bool:
    """Whether the caller is being traced, or runs between the graphs of a compiled function."""
    return torch.compiler.is_compiling() or callable(get_eval_frame_callback())


def in_backward() -> bool:
    """Whether autograd runs a backward on this thread."""
    return current_backward() != -1


def current_backward() -> int:
    """Which backward autograd runs on this thread; -1: none."""
    return torch._C._current_graph_task_id()


def after_backward(callback: Callable[[], None]) -> None:
    """Call it at the end of the backward that runs."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def saved_tensors_hooks() -> tuple[Any, Any] | None:
    """The ``torch.autograd.graph.saved_tensors_hooks`` that are in force: how to pack, and how to unpack."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def push_saved_tensors_hooks(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
    """Enter ``torch.autograd.graph.saved_tensors_hooks`` without the context manager, at whose frame Dynamo stops."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_saved_tensors_hooks() -> None:
    torch._C._autograd._pop_saved_tensors_default_hooks()


def dispatch_modes() -> int:
    """How many ``TorchDispatchMode`` are in force."""
    return torch._C._len_torch_dispatch_stack()


def load_cpp(source: str) -> ctypes.CDLL:
    """Compile C++ with the compiler and the cache of TorchInductor's own CPU kernels."""
    from torch._inductor.codecache import CppCodeCache  # seconds to import, so not before it is needed

    return cast(ctypes.CDLL, CppCodeCache.load(source))


def trace_artifact(name: str, json: Callable[[], str]) -> None:
    """Add a file to torch's own structured trace (``TORCH_TRACE``, which tlparse shows), if there is one."""
    torch._logging.trace_structured("artifact", lambda: {"name": name, "encoding": "json"}, payload_fn=json)


def running_code() -> str:
    """The Python code that TorchInductor generated for the graph that calls; empty if none did, or it is in C++."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if str(frame.f_globals.get("__name__")).startswith("torch._inductor.runtime.compile_tasks."):
            return Path(frame.f_code.co_filename).read_text()
        frame = frame.f_back
    return ""


def compile_id() -> str:
    """Dynamo's id of the graph that is being compiled, ``frame_attempt``, as in torch's own logs."""
    return str(CompileContext.current_compile_id()).replace("/", "_")


@functools.cache
def inductor_options() -> frozenset[str]:
    """Names that ``torch.compile(options=...)`` accepts for Inductor."""
    return frozenset(inductor_config.get_config_copy())


def parameter_inputs(graph: Graph) -> dict[int, Node]:
    """Placeholder of the local shard of each DTensor input, by position among the inputs that Dynamo passed."""
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        match node.meta.get("desc"):
            case SubclassGetAttrAOTInput(base=PlainAOTInput(idx=idx), attr="_local_tensor"):
                found[idx] = node
    return found


def parameter_gradients(graph: Graph) -> dict[int, Node]:
    """Node returned as the local gradient of each DTensor input, by position; empty for forward graphs."""
    found = {}
    for node, desc in zip(_outputs(graph), graph.output_node().meta.get("desc", ()), strict=False):
        match desc:
            case SubclassGetAttrAOTOutput(base=GradAOTOutput(grad_of=PlainAOTInput(idx=idx)), attr="_local_tensor"):
                if isinstance(node, Node):
                    found[idx] = node
    return found


def _outputs(graph: Graph) -> list[Any]:
    return list(cast(Any, graph.output_node().args[0]))


def is_backward(graph: Graph) -> bool:
    """Whether a graph takes gradients of outputs (a backward or joint graph)."""
    return any(_is_tangent(node.meta.get("desc")) for node in graph.find_nodes(op="placeholder"))


def is_body(graph: Graph) -> bool:
    """Whether a graph is the body of a higher-order operator (a branch of ``torch.cond``) in the one at hand."""
    return not any("desc" in node.meta for node in graph.find_nodes(op="placeholder"))


def _is_tangent(desc: object) -> bool:
    while isinstance(desc, SubclassGetAttrAOTInput):
        desc = desc.base
    return isinstance(desc, TangentAOTInput)


def default_store() -> Any:
    """The store that all ranks were initialised with."""
    return torch.distributed.distributed_c10d._get_default_store()


def hint(size: Any) -> int:
    """The value of a size that may be symbolic, as far as it is known; for estimates only, it sets no guard."""
    if isinstance(size, int):
        return size
    return int(known) if (known := size.node._hint) is not None else 1


def group_ranks(name: str) -> list[int]:
    """Global ranks of the process group that functional collectives call ``name``."""
    return torch.distributed.get_process_group_ranks(_group(name))


def stands_alone(name: str) -> bool:
    """Whether there is only this process, as one rank of many, in the process group called ``name``."""
    return torch.distributed.get_backend(_group(name)) in ("fake", "rehearsal")


def _group(name: str) -> Any:
    return torch.distributed.distributed_c10d._resolve_process_group(cast(Any, name))


def dtypes_of(dtypes: Sequence[torch.dtype | int]) -> list[torch.dtype]:
    """What an operator written in Python gets for a ``ScalarType[]``: before 2.12 these are numbers."""
    return [dtype if isinstance(dtype, torch.dtype) else _dtype(dtype) for dtype in dtypes]


@functools.cache
def _dtype(number: int) -> torch.dtype:
    return torch.ops.aten.empty.memory_format([0], dtype=cast(Any, number), device="meta").dtype


def inductor_ir() -> Any:
    """The module of TorchInductor's IR nodes."""
    from torch._inductor import ir  # seconds to import, so not before it is needed

    return ir


def register_lowering(op: Any, lowering: Callable[..., Any]) -> None:
    """Let TorchInductor make IR of calls of ``op`` by ``lowering``."""
    from torch._inductor import lowering as inductor_lowering

    inductor_lowering.register_lowering(op, type_promotion_kind=None)(lowering)


def is_ordering_only(dep: Any) -> bool:
    """Whether a kernel's dependency carries no data: Inductor's mark for "after that", of whatever reason."""
    from torch._inductor.dependencies import WeakDep  # seconds to import, so not before it is needed

    return isinstance(dep, WeakDep) and dep.is_fake


def opaque_objects_weigh_nothing() -> AbstractContextManager[None]:
    """For a partitioner that weighs all inputs (under ``torch._functorch.config.activation_memory_budget``), and from
    2.13 on refuses to weigh the mesh of a DTensor."""
    name = "unsafe_treat_script_objects_as_zero_size"
    if not hasattr(functorch_config, name):
        return nullcontext()
    return cast(AbstractContextManager[None], functorch_config.patch({name: True}))


def opaque_objects_last(forward: GraphModule, backward: GraphModule, num_fwd_outputs: int) -> Halves:
    """Put saved random states before saved opaque objects, where AOTAutograd looks for them.

    AOTAutograd saves tensors, then opaque objects (the mesh of a DTensor gradient), then symbolic sizes. Partitioners
    of torch 2.13 append the random states of recomputed attention behind the opaque objects, and the first step fails
    with "expected all tensors_saved_with_vc_check to be Tensors".
    """
    placeholders = list(backward.graph.find_nodes(op="placeholder"))
    states = [node for node in placeholders if node.name.startswith("rng_state_output")]
    if not states:
        return forward, backward
    opaque = [node for node in placeholders[: placeholders.index(states[0])] if _saved_kind(node) == 1]
    for node in reversed(opaque):
        states[-1].append(node)
    values = _outputs(forward.graph)
    forward.graph.output_node().args = (
        (*values[:num_fwd_outputs], *sorted(values[num_fwd_outputs:], key=_saved_kind)),
    )
    for half in (forward, backward):
        half.graph.lint()
        half.recompile()
    return forward, backward


def _saved_kind(node: Node) -> int:
    """0: tensor, 1: opaque object, 2: symbolic size."""
    match node.meta["val"]:
        case torch.Tensor():
            return 0
        case torch.SymInt() | torch.SymFloat() | torch.SymBool() | int() | float():
            return 2
    return 1
