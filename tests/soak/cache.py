"""The compile cache: what must miss it, what must hit it, and entries that are broken, each in fresh processes."""

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn, optim
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from simplefsdp import WireFormat, manual_plan, simple_fsdp
from tests.compare import whole
from tests.models import PROFILE
from tests.ranks import Ranks
from tests.soak.differences import WIDTH, net

_BUDGET = "1GiB"


@dataclass(frozen=True)
class Training:
    """A model that is sharded, compiled and trained for two steps."""

    build: Callable[[], nn.Module] = net
    options: dict[str, Any] = field(default_factory=lambda: {"plan": "block"})
    sharding: dict[str, Any] = field(default_factory=dict)
    rows: int = 4
    lr: float = 0.1
    prepare: Callable[[], Any] = lambda: None
    """A function that is called before all else."""


class Result(NamedTuple):
    hits: int
    misses: int
    trained: dict[str, torch.Tensor]


def _frozen() -> nn.Module:
    model = net()
    model.layers[1].weight.requires_grad_(False)
    return model


def _in_double() -> nn.Module:
    model = net().double()
    model.register_forward_pre_hook(lambda _, args: (args[0].double(),))
    return model


def _edited_source() -> None:
    """Let one character of the library differ, as an edit of one of its files does."""
    from simplefsdp.compile import context

    found = context.source_hash()
    mock.patch.object(context, "source_hash", return_value=bytes([found[0] ^ 1]) + found[1:]).start()


def _options(**options: Any) -> Training:
    return Training(options={"plan": "block", **options})


def _shardings(**sharding: Any) -> Training:
    return Training(sharding=sharding)


def _last_dim(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


MISSES = {
    "plan none": _options(plan="none"),
    "plan auto": _options(plan="auto", profile=PROFILE),
    "another profile": _options(plan="auto", profile=replace(PROFILE, launch_s=1e-3)),
    "a budget": _options(plan="auto", profile=PROFILE, memory_budget=_BUDGET),
    "a manual plan": _options(plan=manual_plan(["layers.*"])),
    "another prefetch": _options(plan=manual_plan(["layers.*"], prefetch=0)),
    "compute compiled each time": _options(compile_once=False),
    "no casts in matmuls": _options(cast_in_matmuls=False),
    "casts after gathers": _options(cast_before_gather=False),
    "an option of Inductor": _options(inductor={"epilogue_fusion": False}),
    "a report": _options(report_dir="report"),
    "a policy": _shardings(mp_policy=MixedPrecisionPolicy(torch.bfloat16)),
    "a dtype of reduction": _shardings(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "kept weights": _shardings(reshard_after_forward=False),
    "a divide factor": _shardings(gradient_divide_factor=4.0),
    "another dim": _shardings(shard_placement_fn=_last_dim),
    "a wire format": _shardings(wire=WireFormat(gather="int8")),
    "replicas": _shardings(mode="replicate"),
    "a width": Training(lambda: net(width=12)),
    "a layer": Training(lambda: net(layers=4)),
    "a frozen weight": Training(_frozen),
    "a dtype": Training(_in_double),
    "a batch": Training(rows=6),
    "an edited file": Training(prepare=_edited_source),
}
"""A change of ``Training()`` each; what was compiled for another one of them would compute something else."""

HITS = {
    "nothing": Training(),
    "other weights": Training(lambda: net(seed=1)),
    "another learning rate": Training(lr=0.01),
    "weights that are not compared": _shardings(check_initial_weights=False),
    "weights that are compared exactly": _shardings(check_initial_weights="exact"),
    "defaults that are written out": Training(
        options={"compile_once": True, "wire": "given", "plan": "block", "inductor": {}},
        sharding={"mode": "fully_shard", "reshard_after_forward": True, "mp_policy": MixedPrecisionPolicy()},
    ),
    "the equal mesh": Training(prepare=lambda: init_device_mesh("cpu", (2,))),
    "a policy that is None": _shardings(mp_policy=None),
    "another seed": Training(prepare=lambda: torch.manual_seed(7)),
    "another working directory": Training(prepare=lambda: os.chdir("/")),
}
"""A change of ``Training()`` each that nothing compiled depends on."""

BREAKS: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "random": lambda file: file.write_bytes(os.urandom(200)),
    "another's": lambda file: file.write_text("not an entry"),
}
"""Damages, one of them for every file in which the cache keeps a graph."""


def campaign(count: int) -> dict[str, Any]:
    """Try the first ``count`` changes, and what can be broken; return which were not as they must be."""
    found: dict[str, Any] = {"runs": 0, "must miss": 0, "must hit": 0, "broken entries": 0, "failures": []}
    with tempfile.TemporaryDirectory() as folder:
        first = _run("nothing", folder)
        cases = [*(("must miss", name) for name in MISSES), *(("must hit", name) for name in HITS)]
        for kind, name in cases[:count]:
            result = _run(name, folder)
            found[kind] += 1
            is_right = result.hits == 0 < result.misses if kind == "must miss" else result.misses == 0 < result.hits
            _note(found, f"{kind}: {name}", is_right, result)
        for name, damage in BREAKS.items():
            broken = Path(folder, name)
            shutil.copytree(Path(folder, "cache"), broken / "cache")
            for part in ("aotautograd", "fxgraph"):
                for file in (broken / "cache" / part).rglob("*"):
                    if file.is_file():
                        damage(file)
            result = _run("nothing", str(broken))
            found["broken entries"] += 1
            is_same = all(torch.equal(value, first.trained[fqn]) for fqn, value in result.trained.items())
            _note(found, f"broken: {name}", is_same and result.misses > 0, result)
    return found


def _note(found: dict[str, Any], name: str, is_right: bool, result: Result) -> None:
    found["runs"] += 1
    print(f"{name}: {result.hits} hits, {result.misses} misses", flush=True)
    if not is_right:
        found["failures"].append(f"{name}: {result.hits} hits, {result.misses} misses")


def _run(name: str, folder: str) -> Result:
    """Train what has this name on two fresh ranks, whose cache is in ``folder``; return what rank 0 counted."""
    ranks = Ranks(2)
    try:
        result: Result = ranks.run(_train, name, folder)[0]
    finally:
        ranks.close()
    return result


def _train(name: str, folder: str) -> Result:
    training = {**MISSES, **HITS}[name]
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "cache"))
    os.chdir(folder)
    training.prepare()
    torch.manual_seed(0)
    model: Any = simple_fsdp(training.build(), **training.sharding)
    forward: Any = torch.compile(model, backend="simplefsdp", options=training.options)
    optimizer = optim.SGD([param for param in model.parameters() if param.requires_grad], lr=training.lr)
    x = torch.randn(training.rows, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        forward(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    graphs, kernels = counters["aot_autograd"], counters["inductor"]
    hits = graphs["autograd_cache_hit"] + kernels["fxgraph_cache_hit"]
    misses = graphs["autograd_cache_miss"] + graphs["autograd_cache_bypass"]
    return Result(hits, misses, {fqn: whole(param) for fqn, param in model.named_parameters()})
