"""Models put together at random: they train as in a single process, and with the same bits without buckets."""

import sys
import time
import traceback
from collections import Counter
from typing import Any

import torch
from hypothesis import HealthCheck, given, seed, settings
from torch import nn, optim

from tests.compare import numbers_of_micro_batches, whole
from tests.ranks import Ranks
from tests.simplefsdp.frontend.test_random_models import Model, batch, models, train_beside_a_single_process

STEPS = 5
AT_ONCE = 100
"""Number of models that are drawn with one seed, in the same two processes."""


def campaign(count: int) -> dict[str, Any]:
    """Train ``count`` models on 2 ranks; return how many of each kind, and the smallest wrong one of each hundred."""
    kinds: Counter[str] = Counter()
    failures: list[str] = []
    day = int(time.strftime("%Y%m%d"))
    for start in range(0, count, AT_ONCE):
        end = min(start + AT_ONCE, count)
        try:
            _check(end - start, 100_000 * day + start, kinds)
        except Exception:
            failures.append(traceback.format_exc()[-5000:])
            print(failures[-1], file=sys.stderr)  # a campaign that is stopped prints no figures
        progress = f"{end} models, {kinds['aot_eager'] + kinds['auto']} of them compiled, {kinds['resumes']} resumed"
        print(f"{progress}; parts with a wrong one: {len(failures)}", file=sys.stderr, flush=True)
    return {"runs": count, "kinds": dict(sorted(kinds.items())), "failures": failures}


def _check(count: int, of_seed: int, kinds: Counter[str]) -> None:
    ranks = Ranks(2)

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @seed(of_seed)
    @given(models)
    def check(model: Model) -> None:
        kinds.update([model.lowering, model.mode.split()[0], *(f"contains {kind}" for kind in {*model.tree.kinds()})])
        kinds.update({"adds up micro-batches": model.micro_batches > 1, "resumes": model.resumes})
        ranks.run(_trains_as_in_a_single_process_and_without_buckets, model)

    try:
        check()
    finally:
        ranks.close()


def _trains_as_in_a_single_process_and_without_buckets(model: Model) -> None:
    found = _params(train_beside_a_single_process(model))
    if model.lowering != "eager":
        for fqn, value in _params(_train_without_buckets(model)).items():
            assert torch.equal(value, found[fqn]), f"{fqn} differs without buckets"


def _params(model: nn.Module) -> dict[str, torch.Tensor]:
    return {fqn: whole(param) for fqn, param in model.named_parameters()}


def _train_without_buckets(model: Model) -> nn.Module:
    """Train as ``same_steps`` does, but in one go where the model resumes there."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    sharded = model.shard(model.build())
    forward = torch.compile(sharded, backend="simplefsdp", options={"lower_with": "aot_eager", "plan": "none"})
    optimizer = optim.SGD([param for param in sharded.parameters() if param.requires_grad], lr=0.05)
    for step in range(STEPS):
        for number in numbers_of_micro_batches(sharded, step, model.micro_batches):
            forward(batch(number, torch.distributed.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return sharded
