"""Training steps that are run and logged under the null GPU: a case each, with the shapes of Llama 3 8B.

Memory of the null GPU is reserved and not touched, and kernels return at once, so that a model of any width costs what
it takes to compile it.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from inductor_passes.scheduling.issue_points import Bucket
from inductor_passes.torch_compat.distributed import GROUPING_NCCL
from simplefsdp import BucketPlan, WireFormat, clip_grad_norm_, manual_plan, simple_fsdp
from simplefsdp.models import llama
from simplefsdp.null_gpu.log import Event, Module, Recorder
from simplefsdp.null_gpu.rank import null_rank

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
SEQ = 2048
LLAMA = replace(llama.CONFIGS["8B"], layers=2)
REDUCED_FROM_MATMUL = re.compile(r"reduce_scatter_tensor\.default\(mm_dtype\w*, .*# (\S+)$", re.MULTILINE)
"""A reduction, in the text of a graph, of what a matmul has put into memory in the dtype of the reduction."""


class UnevenNet(nn.Module):
    """Layers with biases and rows that no number of ranks divides; the last has fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(1030), nn.Linear(1030, 3090), nn.GELU(), nn.Linear(3090, 1030)) for _ in range(2)
        )
        self.output = nn.Linear(1030, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.output(x).float().square().mean()


class BrokenLlama(llama.Llama):
    """A Llama that Dynamo compiles in two graphs, of which the last block begins the second."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        assert targets is not None
        x = self.tok_embeddings(tokens)
        for layer in self.layers[:-1]:
            x = layer(x)
        torch._dynamo.graph_break()
        logits = self.output(self.norm(self.layers[-1](x)))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Case:
    """A way to shard and compile a model."""

    plan: Any = "block"
    mesh: Mapping[str, int] = field(default_factory=lambda: {"shard": 64})
    """Ranks of each dimension of the mesh."""
    tensor_parallel: int = 1
    policy: MixedPrecisionPolicy = BF16
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of ``simple_fsdp``."""
    checkpointing: str = "none"
    model: type[nn.Module] = llama.Llama
    max_norm: float | None = None
    backend: str = "nccl"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options of the backend."""
    lengths: tuple[int, ...] = (SEQ,)
    """Sequence lengths of the steps before the logged one, which has the last; several mean dynamic shapes."""
    micro_batches: int = 1


CASES: dict[str, Case] = {
    "none": Case(plan="none"),
    "block": Case(),
    "manual": Case(
        plan=manual_plan([["tok_embeddings", "layers.0.attention*"], "layers.0.f*", "layers.1", ["norm", "output"]]),
        backend=GROUPING_NCCL,
    ),
    "auto": Case(plan="auto", backend=GROUPING_NCCL),
    "budget": Case(plan="auto", backend=GROUPING_NCCL, options={"memory_budget": "6GiB"}),
    "auto-kept": Case(plan="auto", settings={"reshard_after_forward": "auto"}),
    "kept": Case(settings={"reshard_after_forward": False}, backend=GROUPING_NCCL),
    "fp32": Case(policy=MixedPrecisionPolicy(), backend=GROUPING_NCCL),
    "bf16-reductions": Case(policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16), backend=GROUPING_NCCL),
    "fp16": Case(policy=MixedPrecisionPolicy(torch.float16, torch.float16)),
    "hybrid": Case(mesh={"replicate": 8, "shard": 8}, settings={"mode": "hybrid_shard"}, backend=GROUPING_NCCL),
    "replicate": Case(settings={"mode": "replicate"}),
    "uneven": Case(model=UnevenNet, mesh={"shard": 64}, backend=GROUPING_NCCL),
    "shard-1": Case(settings={"shard_placement_fn": lambda param: Shard(param.ndim - 1)}, backend=GROUPING_NCCL),
    "offload": Case(settings={"offload_policy": CPUOffloadPolicy()}),
    "clipping": Case(max_norm=1.0),
    "tensor-parallel": Case(mesh={"shard": 16}, tensor_parallel=4, backend=GROUPING_NCCL),
    "checkpointing": Case(checkpointing="block", backend=GROUPING_NCCL),
    "selective-checkpointing": Case(checkpointing="selective"),
    "accumulation": Case(micro_batches=3, backend=GROUPING_NCCL),
    "graph-break": Case(model=BrokenLlama, backend=GROUPING_NCCL),
    "dynamic": Case(lengths=(SEQ, SEQ + 512, SEQ + 256), backend=GROUPING_NCCL),
}


WIRE_CASES: dict[str, Case] = {
    "one-step": Case(settings={"wire": WireFormat("fp8", "int8-hadamard"), "ranks_per_node": 64}),
    "two-steps": Case(settings={"wire": WireFormat("int8", "int8", between_nodes="int4"), "ranks_per_node": 8}),
    "two-steps-unbound": Case(
        settings={"wire": WireFormat("int8", "int8", between_nodes="int4"), "ranks_per_node": 8},
        backend=GROUPING_NCCL,
    ),
    "replicas": Case(
        mesh={"replicate": 8, "shard": 8},
        settings={
            "mode": "hybrid_shard",
            "wire": WireFormat("int8", "int8", between_nodes="int4", error_feedback=True),
        },
    ),
}
"""Cases in which weights and gradients travel in a wire format.

The backend of ``"two-steps-unbound"`` is not bound to a device when the groups of nodes are made; see
``new_groups_are_split``.
"""

LOOKUP_CASES: dict[str, Case] = {
    "lookup": Case(settings={"embedding_lookup": "exchange"}),
    "lookup-auto": Case(plan="auto", settings={"embedding_lookup": "exchange"}, backend=GROUPING_NCCL),
}
"""Cases in which tokens and embeddings travel in place of the embedding's weight."""

FLAT_CASES: dict[str, Case] = {
    f"{name}-flat": replace(CASES[name], options={**CASES[name].options, "compile_once": False})
    for name in ("block", "auto")
}
"""Cases whose blocks are traced and compiled one by one."""


@dataclass(frozen=True)
class Step:
    """The log of one step after the first ones, and the plan of that step."""

    name: str
    case: Case
    before: list[Event]
    """Events of all micro-batches but the last."""
    forward: list[Event]
    backward: list[Event]
    after: list[Event]
    """Events of clipping and of the optimizer."""
    plans: tuple[BucketPlan, ...]
    """The plan of each pair of graphs, in the order of forward; none for ``plan="none"``."""
    codes: tuple[tuple[str, ...], ...]
    """The code that TorchInductor generated for each pair of graphs: forward, backward."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of what is sharded of each parameter; with tensor parallelism that of this rank's part."""
    cast_in_matmuls: frozenset[str]
    """FQNs of the gradients that matmuls make in the dtype of their reduction."""
    loaded: list[Event]
    """Kernels that were loaded from cubins in the steps before, and were not loaded by an earlier case."""
    peak_bytes: int
    """Peak of torch's allocator in the step."""
    predicted_bytes: tuple[int, ...]
    """Predicted peak of each pair of graphs."""
    batch_bytes: int
    """Bytes of the batch, which is in memory in all of the step; no prediction counts them."""
    allocations: list[Any]
    """The allocator's own trace of the step."""


def run_step(name: str, folder: Path) -> Step:
    """Compile a case, train some steps and return the log of the last.

    Args:
        name: of ``CASES`` or of the cases below it.
        folder: for the report of the compilation.
    """
    torch._dynamo.reset()
    case = {**CASES, **WIRE_CASES, **LOOKUP_CASES, **FLAT_CASES}[name]
    ranks = math.prod([*case.mesh.values(), case.tensor_parallel])
    with null_rank(ranks, case.backend) as recorder:
        model, shapes = sharded(case)
        options = {"plan": case.plan, "report_dir": str(folder), **case.options}
        if case.plan != "none":
            options["profile"] = "h100/h100-8-nodes"
        compiled = torch.compile(model, backend="simplefsdp", options=options, dynamic=len(case.lengths) > 1 or None)
        optimizer = torch.optim.AdamW(model.parameters(), fused="offload_policy" not in case.settings)
        loaded: list[Event] = []
        with recorder.recording(pending=False):
            for length in (*case.lengths, case.lengths[-1]):
                for part in _train(case, model, compiled, optimizer, _inputs(case, length), recorder):
                    loaded += [event for event in part if isinstance(event.what, Module)]
        with recorder.recording():
            inputs = _inputs(case, case.lengths[-1])
            batch_bytes = sum(tensor.nbytes for tensor in {*inputs})
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.memory._record_memory_history(context=None)
            parts = _train(case, model, compiled, optimizer, inputs, recorder)
            peak = torch.cuda.max_memory_allocated()
            trace = torch.cuda.memory._snapshot()["device_traces"][0]
            torch.cuda.memory._record_memory_history(enabled=None)
        del compiled, optimizer, model, inputs
    graphs = _graphs(folder)
    plans = [BucketPlan.load(graph / "plan.json") for graph in graphs if (graph / "plan.json").exists()]
    predictions = [json.loads(path.read_text()) for graph in graphs if (path := graph / "prediction.json").exists()]
    before = [path.read_text() for graph in graphs for path in graph.glob("*_backward_before_bucket.txt")]
    cast = frozenset(fqn for text in before for fqn in REDUCED_FROM_MATMUL.findall(text))
    codes = tuple(tuple(path.read_text() for path in sorted(graph.glob("*_code.py"))) for graph in graphs)
    peaks = tuple(prediction["peak_bytes"] for prediction in predictions)
    return Step(name, case, *parts, tuple(plans), codes, shapes, cast, loaded, peak, peaks, batch_bytes, trace)


def sharded(case: Case, config: llama.LlamaConfig = LLAMA) -> tuple[nn.Module, dict[str, tuple[int, ...]]]:
    """Return the sharded model of a case, and the shapes of what is sharded."""
    names = (*case.mesh, "tp") if case.tensor_parallel > 1 else tuple(case.mesh)
    sizes = (*case.mesh.values(), case.tensor_parallel)[: len(names)]
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=names)
    with torch.device("meta"):
        if issubclass(case.model, llama.Llama):
            model: nn.Module = case.model(replace(config, activation_checkpointing=case.checkpointing))
        else:
            model = case.model()
    if case.tensor_parallel > 1:
        assert isinstance(model, llama.Llama)
        model.parallelize(mesh["tp"])
    shapes = {
        fqn: tuple((param.to_local() if isinstance(param, DTensor) else param).shape)
        for fqn, param in model.named_parameters()
    }
    simple_fsdp(model, mesh[tuple(case.mesh)], mp_policy=case.policy, **case.settings)
    model.to_empty(device="cuda")
    return model, shapes


def _inputs(case: Case, length: int) -> tuple[Tensor, ...]:
    if case.model is UnevenNet:
        return (torch.zeros(length, 1030, device="cuda"),)
    tokens = torch.zeros(1, length, dtype=torch.int64, device="cuda")
    return tokens, tokens


class PlannedBuckets(NamedTuple):
    """The buckets of all graphs of a step, in the order in which the graphs run."""

    forward: list[Bucket]
    backward: list[Bucket]
    reductions: list[Bucket]


def planned_buckets(step: Step) -> PlannedBuckets:
    backwards = step.plans[::-1]
    return PlannedBuckets(
        [bucket for plan in step.plans for bucket in plan.forward],
        [bucket for plan in backwards for bucket in plan.backward],
        [bucket for plan in backwards for bucket in plan.reductions],
    )


def _train(
    case: Case,
    model: nn.Module,
    compiled: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer,
    inputs: tuple[Tensor, ...],
    recorder: Recorder,
) -> tuple[list[Event], list[Event], list[Event], list[Event]]:
    """Train a step; return the events of its first micro-batches, of forward and backward of the last one, and of what
    follows."""
    recorder.take()
    for number in range(case.micro_batches - 1, 0, -1):
        model.set_requires_gradient_sync(False)
        compiled(*inputs).backward()
        model.set_requires_gradient_sync(number == 1)
    before = recorder.take()
    loss = compiled(*inputs)
    forward = recorder.take()
    loss.backward()
    backward = recorder.take()
    if case.max_norm is not None:
        clip_grad_norm_(model.parameters(), case.max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return before, forward, backward, recorder.take()


def _graphs(folder: Path) -> list[Path]:
    """Return the folders of the graphs that the last step ran: of each frame, what was compiled last."""
    last: dict[int, tuple[int, Path]] = {}
    for path in folder.glob("graph_*"):
        frame, compilation = map(int, path.name.split("_")[1:])
        last[frame] = max(last.get(frame, (-1, path)), (compilation, path))
    return [path for _, (_, path) in sorted(last.items())]
