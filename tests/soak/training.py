"""Long training, and many trainings in one process: what grows, what is compiled again, what is left behind.

torch's flight recorder is off: of its last 2,000 collectives it holds the code that issued them, which is a compiled
graph, also of a model that is gone.
"""

import gc
import os
import statistics
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from simplefsdp import clip_grad_norm_, simple_fsdp
from simplefsdp.models.llama import CONFIGS, Llama
from tests.models import PROFILE
from tests.ranks import Ranks

SETTLED = 200
"""Steps before resources are first counted."""
CYCLES = 50
MB = 1 << 20


def campaign(count: int) -> dict[str, Any]:
    """Train ``count`` steps, and then ``CYCLES`` models one after the other, on 2 ranks; return the worst rank's
    figures."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    found: dict[str, Any] = {"runs": count + CYCLES, "steps": count, "models": CYCLES}
    for what in (_train, _drop):
        ranks = Ranks(2, deadline_s=3600)
        try:
            of_each = ranks.run(what, count if what is _train else CYCLES)
        finally:
            ranks.close()
        found |= {name: max((one[name] for one in of_each), key=abs) for name in of_each[0]}
    found["failures"] = [
        f"{name}: {found[name]}, at most {limit}" for name, limit in LIMITS.items() if found[name] > limit
    ]
    return found


LIMITS = {
    "compilations after the third step": 0,
    "median relative difference of a loss to eager": 1e-4,
    "losses in 1,000 that are more than 1 % from eager": 1.0,
    "relative difference of the mean of the last 100 losses to eager": 1e-3,
    "resident MB per 1,000 steps": 1.0,
    "more descriptors": 0,
    "more threads": 0,
    "models left": 0,
    "parameters left": 0,
    "process groups left": 0,
    "descriptors left per cycle": 0.0,
    "threads left per cycle": 0.0,
    "resident MB per cycle": 1.0,
}
"""The most that a figure may be."""


def _build(options: dict[str, Any] | None, scale: float = 1.0) -> tuple[Any, Callable[[int], float]]:
    """Return a sharded Llama, its initial weights multiplied by ``scale``, and a function that trains a step on a batch
    drawn from the step's number."""
    torch.manual_seed(0)
    config = CONFIGS["debug"]
    plain = Llama(config)
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(scale)
    model: Any = simple_fsdp(plain)
    forward = model if options is None else torch.compile(model, backend="simplefsdp", options=options)
    optimizer = AdamW(model.parameters(), lr=3e-4)

    def step(number: int) -> float:
        generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
        tokens = torch.randint(0, config.vocab_size // 4, (2, 33), generator=generator)
        before = tokens[:, :-1].contiguous()  # of an input that is a view, torch 2.13 keeps all fake tensors
        loss: Tensor = F.cross_entropy(forward(before).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return model, step


def _resources() -> dict[str, float]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident": pages * os.sysconf("SC_PAGE_SIZE") / MB,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "system threads": len(os.listdir("/proc/self/task")),
    }


def _train(steps: int) -> dict[str, float]:
    _, eager = _build(None)
    expected = [eager(number) for number in range(steps)]
    _, nearly = _build(None, scale=1 + 1e-7)
    by_rounding = _differences([nearly(number) for number in range(steps)], expected)
    _, step = _build({"plan": "auto", "profile": PROFILE})
    losses, compiled = [], 0
    before: dict[str, float] = {}
    for number in range(steps):
        if number == 3:
            compiled = _compilations()
        if number == SETTLED:
            before = _resources()
        losses.append(step(number))
    after = _resources()
    differences = _differences(losses, expected)
    return {
        "compilations after the third step": _compilations() - compiled,
        "median relative difference of a loss to eager": statistics.median(differences),
        "losses in 1,000 that are more than 1 % from eager": sum(d > 1e-2 for d in differences) / steps * 1000,
        "largest relative difference of a loss to eager": max(differences),
        "the same of eager, from weights that are 1e-7 larger": max(by_rounding),
        "relative difference of the mean of the last 100 losses to eager": abs(
            sum(losses[-100:]) / sum(expected[-100:]) - 1
        ),
        "first loss": losses[0],
        "last loss": losses[-1],
        "resident MB per 1,000 steps": (after["resident"] - before["resident"]) / (steps - SETTLED) * 1000,
        "more descriptors": after["descriptors"] - before["descriptors"],
        "more threads": after["threads"] - before["threads"],
    }


def _differences(losses: list[float], expected: list[float]) -> list[float]:
    return [abs(loss / other - 1) for loss, other in zip(losses, expected, strict=True)]


def _compilations() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _drop(cycles: int) -> dict[str, float]:
    """Build, compile and train a model, drop it, and so on; count what is alive, and what grew since the fifth.

    Half of the cycles drop the guards that Dynamo keeps.
    """
    alive: list[weakref.ref[Any]] = []
    params: list[weakref.ref[nn.Parameter]] = []
    first, middle = 5, cycles // 2
    resources: dict[int, dict[str, float]] = {}
    for cycle in range(cycles):
        if cycle in (first, middle):
            resources[cycle] = _resources()
        if cycle == first:
            groups = len(dist.distributed_c10d._world.pg_map)
        model, step = _build({"plan": "block", "lower_with": "aot_eager"})
        for number in range(2):
            step(number)
        alive.append(weakref.ref(model))
        params.extend(map(weakref.ref, model.parameters()))
        del model, step
        torch.compiler.reset()
        gc.collect()
        if cycle < middle:
            _drop_guards()
    resources[cycles] = _resources()

    def per_cycle(name: str, start: int, end: int) -> float:
        return (resources[end][name] - resources[start][name]) / (end - start)

    return {
        "models left": sum(ref() is not None for ref in alive),
        "parameters left": sum(ref() is not None for ref in params),
        "process groups left": len(dist.distributed_c10d._world.pg_map) - groups,
        "descriptors left per cycle": per_cycle("descriptors", first, cycles),
        "threads left per cycle": per_cycle("threads", first, cycles),
        "resident MB per cycle": per_cycle("resident", first, middle),
        "the same with guards that Dynamo keeps": per_cycle("resident", middle, cycles),
    }


def _drop_guards() -> None:
    """Drop the guards of compilations that are gone.

    ``weakref.finalize`` keeps them for as long as each class, module and function lives that one of them is about
    (``id_ref`` in torch/_dynamo/guards.py).
    """
    for finalizer, info in list(weakref.finalize._registry.items()):
        if "CheckFunctionManager.invalidate" in repr(info.func):
            finalizer.detach()
