"""Other schedules to compare with: Inductor's own overlap passes on our frontend, torchtitan where it is installed.

Inductor's passes are given the rehearsed network and this machine's speed as their cost model: what they ask a GPU for
by themselves cannot be answered on a CPU. They run before our passes, which with ``plan="none"`` leave the graph alone.
"""

import hashlib
import importlib.util
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._runtime_estimation as runtime_estimation
from torch import Tensor, nn
from torch._C._distributed_c10d import _resolve_process_group
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from simplefsdp.hardware.profile import Network
from simplefsdp.plan.grouping import block_buckets, block_of
from simplefsdp.rehearsal.systems import Parallelism, System, simplefsdp_system

_CONFIG = "aten_distributed_optimizations."
_KEEP_THE_ORDER = {"reorder_for_peak_memory": False}  # or torch 2.13 undoes what these passes did
_KINDS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "all_reduce": "all_reduce"}


class Costs:
    """Milliseconds of a node: of matmuls and attention by their operations, of collectives by the network."""

    def __init__(self, network: Network, flops_per_s: float):
        self.network, self.flops_per_s = network, flops_per_s

    def __call__(self, node: Node, override_size: int | None = None) -> float | None:
        """``override_size``: bytes of a bucket that Inductor considers."""
        packet = getattr(node.target, "overloadpacket", None)
        kind = _KINDS.get(str(packet).rpartition(".")[2])
        if kind is not None:
            whole: Any = node if kind == "all_gather" else node.args[0]
            group: Any = node.args[-1]
            ranks = dist.get_process_group_ranks(_resolve_process_group(group))
            return 1e3 * self.network.seconds(kind, ranks, override_size or whole.meta["val"].nbytes)
        if packet in flop_registry:
            args, kwargs = pytree.tree_map_only(Node, lambda n: n.meta["val"], (node.args, node.kwargs))
            return 1e3 * flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]) / self.flops_per_s
        return None

    def __reduce__(self) -> Any:  # part of the compile cache's key
        return Costs, (self.network, self.flops_per_s)


class ManualBlocks(CustomGraphPass):
    """Inductor's pass for buckets by module, which finds them by the modules' names."""

    def __init__(self, buckets: list[Any]):
        self.buckets = buckets

    def __call__(self, graph: Graph) -> None:
        from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing

        gm: Any = graph.owning_module
        manual_overlap_bucketing(gm, module_bucket_plans=self.buckets, insert_overlap_deps=True)

    def uuid(self) -> str:
        return hashlib.sha256(repr((self.buckets, torch.__version__)).encode()).hexdigest()


def baselines(network: Network) -> Mapping[str, System]:
    _answer_for_the_device()

    def auto(model: nn.Module, parallelism: Parallelism) -> Callable[[Tensor], Any]:
        config = {
            "enable_overlap_scheduling": True,
            "collective_bucketing": True,
            "compute_estimator": "analytical",
            "custom_runtime_estimation": Costs(network, matmul_flops_per_s()),
            "pre_bucketing_fsdp_collectives": False,  # it knows GPUs only, and would put all into one bucket
        }
        inductor = {_CONFIG + name: value for name, value in config.items()} | _KEEP_THE_ORDER
        return simplefsdp_system("none", inductor).wrap(model, parallelism)

    def manual(model: nn.Module, parallelism: Parallelism) -> Callable[[Tensor], Any]:
        inductor = {"post_grad_custom_pre_pass": ManualBlocks(modules_of_blocks(model))} | _KEEP_THE_ORDER
        return simplefsdp_system("none", inductor).wrap(model, parallelism)

    found = {"inductor-auto": System(auto, compiled=True), "inductor-manual": System(manual, compiled=True)}
    if importlib.util.find_spec("torchtitan"):
        found["torchtitan"] = System(_torchtitan, compiled=True)
    return found


def _torchtitan(model: nn.Module, parallelism: Parallelism) -> Callable[[Tensor], Any]:
    """Its simple_fsdp frontend and block buckets under torch.compile; it keeps weights unsharded until backward."""
    from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig
    from torchtitan.experiments.graph_trainer.jit_backend import get_compile_backend_with_passes
    from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

    buckets = modules_of_blocks(model)
    mode = "fully_shard" if parallelism.mesh.ndim == 1 else "hybrid_shard"
    sharded: Any = data_parallel(model, parallelism.mesh, mode)
    config = GraphTrainerCompileConfig(
        enable=True, mode="jit", backend="inductor", passes=["transformer_block_bucketing"]
    )
    return torch.compile(sharded, backend=get_compile_backend_with_passes(config, buckets), fullgraph=True)


def modules_of_blocks(model: nn.Module) -> list[Any]:
    """The buckets of the block plan as names of modules, a list where several share one."""
    found: list[Any] = []
    for bucket in block_buckets(tuple(fqn for fqn, _ in model.named_parameters())):
        owners = list(dict.fromkeys(block_of(fqn) or fqn.rpartition(".")[0] for fqn in bucket))
        found.append(owners[0] if len(owners) == 1 else owners)
    return found


def matmul_flops_per_s() -> float:
    """Return the measured matmul rate of this machine, with the threads in use."""
    x = torch.randn(512, 512)
    x @ x
    began = time.perf_counter()
    for _ in range(5):
        x @ x
    return 5 * 2 * 512**3 / (time.perf_counter() - began)


def _answer_for_the_device() -> None:
    """Inductor asks triton for the GPU's speed even where a cost model is given."""
    for name, value in (("get_gpu_dram_gbps", 20.0), ("get_device_dram_gbps", 20.0), ("get_device_tflops", 0.05)):
        if hasattr(runtime_estimation, name):
            setattr(runtime_estimation, name, lambda *_, value=value, **__: value)
