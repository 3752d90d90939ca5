"""TorchInductor: passes and their cache keys, configuration, IR, lowerings and generated code."""

import copy
import ctypes
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor_config
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch._inductor.custom_graph_pass import get_hash_for_files as get_hash_for_files
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import has_symbolic_sizes_strides

FREE_AT_LAST_USE: dict[str, Any] = {"allow_buffer_reuse": False}
"""Inductor configuration under which generated code frees memory behind its last use.

Otherwise code holds memory from there until it needs as much again, although torch's allocator could hand the memory
out meanwhile: to what a collective returns, or to what the code of another graph computes.
"""
CustomSchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", object)
"""The base class of passes on kernels. Before torch 2.12 such a pass is any callable, and not in the cache's key."""
NO_OTHER_REORDERING: dict[str, Any] = {
    "combo_kernels": False,
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
    "triton.reorder_for_reducing_graph_partitions": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
}
"""Inductor configuration under which no pass moves kernels after ``_post_fusion_custom_pass``."""
if not hasattr(inductor_config.aten_distributed_optimizations, "enable_simple_overlap"):  # before 2.14
    del NO_OTHER_REORDERING["aten_distributed_optimizations.enable_simple_overlap"]


@contextmanager
def unchanged_is_same() -> Iterator[None]:
    """Let TorchInductor see meanwhile that what is the very same fake tensor has not changed.

    Before and after each pass that changes a graph, it computes the shapes again of what may have changed. It takes the
    results of every ``invoke_subgraph`` for changed, because it expects a result with another storage, and so whatever
    is computed of them.
    """
    from torch._inductor import fx_utils  # seconds to import, so not before it is needed

    compare = getattr(fx_utils, "_is_fake_tensor_same", None)
    if compare is None:
        yield
        return

    def is_same(new: Any, old: Any, *args: Any, **kwargs: Any) -> bool:
        return new is old or compare(new, old, *args, **kwargs)

    with patch.object(fx_utils, "_is_fake_tensor_same", is_same):
        yield


@contextmanager
def shapes_as_traced() -> Iterator[None]:
    """Let TorchInductor meanwhile take the shapes of a graph's nodes from the trace, where its inputs are as there.

    It runs every graph once more on fake tensors, which is a tenth of the first step of a deep model. What comes of it
    is what the nodes have already, unless an input has other strides since: code of forward may return what it saves
    in another layout.
    """
    from torch._inductor import compile_fx  # seconds to import, so not before it is needed

    propagate = compile_fx.fake_tensor_prop

    def propagate_what_is_new(module: GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        mode = detect_fake_mode(inputs)
        if mode is None or not _are_as_traced(module, inputs):
            return propagate(module, inputs, *args, **kwargs)
        return mode

    with patch.object(compile_fx, "fake_tensor_prop", propagate_what_is_new):
        yield


def _are_as_traced(module: GraphModule, inputs: Sequence[Any]) -> bool:
    """Return whether every node of a graph has a value, none of them with symbols, and ``inputs`` are those of it."""
    layouts = [_layout(value) for value in inputs]
    traced = [_layout(node.meta.get("val")) for node in module.graph.find_nodes(op="placeholder")]
    if None in layouts or layouts != traced:
        return False
    for node in module.graph.nodes:
        is_body = node.op == "get_attr" and isinstance(getattr(module, node.target, None), GraphModule)
        if "unbacked_bindings" in node.meta or not ("val" in node.meta or node.op == "output" or is_body):
            return False
    return True


def _layout(value: Any) -> Any:
    """Return what shapes that are computed of an input depend on; ``None`` where they depend on symbols."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return None
    if not isinstance(value, Tensor):
        return value
    if has_symbolic_sizes_strides(value):
        return None
    return value.dtype, value.device, value.shape, value.stride(), value.storage_offset(), value.layout


@contextmanager
def horizontal_fusion(is_allowed: Callable[[Any, Any, Any], bool]) -> Iterator[None]:
    """Let TorchInductor meanwhile ask ``is_allowed``, too, before it fuses kernels that read nothing of each other.

    Args:
        is_allowed: a function of the scheduler and of two of its nodes.
    """
    from torch._inductor.virtualized import V  # seconds to import, so not before it is needed

    choices: Any = copy.copy(V.choices)
    may_fuse = choices.can_fuse_horizontal

    def can_fuse_horizontal(scheduler: Any, one: Any, other: Any, *args: Any, **kwargs: Any) -> bool:
        return is_allowed(scheduler, one, other) and may_fuse(scheduler, one, other, *args, **kwargs)

    choices.can_fuse_horizontal = can_fuse_horizontal
    with V.set_choices_handler(choices):
        yield


@functools.cache
def find_vector_instructions() -> None:
    """Let a thread find out, once in a process, which vector instructions TorchInductor can use on this CPU.

    TorchInductor asks when it comes to the first C++ kernel, and waits for a build and a load with each set of
    instructions, one after the other. What the thread has found by then is not tried again, as torch keeps it.
    """
    from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401  # imported by one thread only

    threading.Thread(target=cpu_vec_isa.pick_vec_isa, name="vector instructions", daemon=True).start()


def load_cpp(source: str, *, vectorized: bool = False) -> ctypes.CDLL:
    """Compile C++ with the compiler and the cache of TorchInductor's own CPU kernels.

    Args:
        source: the code.
        vectorized: compile for the vector instructions of this CPU, as Inductor's own kernels are. From torch 2.12 on
            this is to be asked for.
    """
    from torch._inductor.codecache import CppCodeCache  # seconds to import, so not before it is needed

    asked = "needs_vec_isa" in inspect.signature(CppCodeCache.load_async).parameters
    options = {"needs_vec_isa": True} if vectorized and asked else {}
    return cast(ctypes.CDLL, CppCodeCache.load(source, **options))


def running_code() -> str:
    """Return the Python code that TorchInductor generated for the graph that calls; empty if there is none."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if str(frame.f_globals.get("__name__")).startswith("torch._inductor.runtime.compile_tasks."):
            return Path(frame.f_code.co_filename).read_text()
        frame = frame.f_back
    return ""


@functools.cache
def inductor_options() -> frozenset[str]:
    """Return the names that ``torch.compile(options=...)`` accepts for Inductor."""
    return frozenset(inductor_config.get_config_copy())


def inductor_ir() -> Any:
    """Return the module of TorchInductor's IR nodes."""
    from torch._inductor import ir  # seconds to import, so not before it is needed

    return ir


def register_lowering(op: Any, lowering: Callable[..., Any]) -> None:
    """Let TorchInductor make IR of calls of ``op`` by ``lowering``."""
    from torch._inductor import lowering as inductor_lowering

    inductor_lowering.register_lowering(op, type_promotion_kind=None)(lowering)


def joint_graph_passes(module: GraphModule, options: Mapping[str, Any]) -> None:
    """Run the passes that TorchInductor runs on joint graphs, but for that which numbers the seeds of a graph.

    Args:
        module: any graph.
        options: of TorchInductor.
    """
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes as passes  # seconds to import

    value = next((node.meta["val"] for node in module.graph.find_nodes(op="placeholder")), None)
    with inductor_config.patch({**options, "joint_custom_post_pass": None, "fallback_random": True}):
        passes(module, getattr(value, "device", None))


def number_seeds(module: GraphModule) -> None:
    """Let random operators of a graph draw from seeds of TorchInductor's, as it does in joint graphs."""
    from torch._inductor.fx_passes.replace_random import replace_random_passes  # seconds to import

    if not inductor_config.fallback_random:
        replace_random_passes(module)


def sees_joint_graphs(options: Mapping[str, Any]) -> bool:
    """Return whether a pass of the user's is the first to see TorchInductor's joint graphs."""
    return options.get("joint_custom_pre_pass", inductor_config.joint_custom_pre_pass) is not None


def uses_cpp_wrapper(options: Mapping[str, Any]) -> bool:
    """Return whether TorchInductor generates C++ around its kernels, which cannot call the body of another graph."""
    return bool(options.get("cpp_wrapper", inductor_config.cpp_wrapper))


def is_ordering_only(dep: Any) -> bool:
    """Return whether a kernel's dependency carries no data: Inductor's mark for "after that", for whatever reason."""
    from torch._inductor.dependencies import WeakDep  # seconds to import, so not before it is needed

    return isinstance(dep, WeakDep) and dep.is_fake
