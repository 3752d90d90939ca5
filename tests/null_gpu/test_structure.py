"""Requests of a compiled step to a GPU, against its plan: collectives, streams, order, copies, syncs, memory."""

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import pytest
import torch

from inductor_passes.scheduling.issue_points import Bucket
from inductor_passes.torch_compat.distributed import GROUPING_NCCL
from inductor_passes.torch_compat.version import VERSION
from simplefsdp.null_gpu.log import (
    DEFAULT_STREAM,
    Collective,
    Communication,
    Copy,
    Event,
    Kernel,
    Matmul,
    Record,
    Sync,
    Wait,
    communications,
    host_waits,
)
from simplefsdp.text.units import parse_bytes
from tests.graphs import called_code
from tests.null_gpu.steps import Case, Step, planned_buckets

pytestmark = pytest.mark.slow


class Expected(NamedTuple):
    """A collective that a plan asks for."""

    operation: str
    dtype: str
    elements: int
    ranks: int


def parts(step: Step) -> dict[str, list[Event]]:
    """Return the events of forward and backward, without the question at the end of an accumulation."""
    asks = [i for i, event in enumerate(step.backward) if isinstance(event.what, Copy) and event.what.direction == 1]
    return {"forward": step.forward, "backward": step.backward[: asks[0] if step.case.micro_batches > 1 else None]}


def ours(events: Sequence[Event], case: Case) -> list[Communication]:
    """The communications of parameters: those of the model's own tensor parallelism are of other communicators."""
    found = communications(events)
    if case.tensor_parallel == 1:
        return found
    return [each for each in found if each.calls[0].ranks != case.tensor_parallel]


def name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def numel(step: Step, fqns: Iterable[str], ranks: int) -> int:
    """Elements of a rank's part of a bucket; rows are padded to the same number on every rank."""
    total = 0
    for fqn in fqns:
        shape = step.shapes[fqn]
        placed = step.case.settings.get("shard_placement_fn")
        dim = len(shape) - 1 if placed else 0
        total += -(-shape[dim] // ranks) * math.prod(shape) // shape[dim]
    return total


def in_place(step: Step, fqn: str) -> bool:
    """Whether a group of reductions can read a gradient where it lies: it is not padded, turned or divided, and cast
    only in the kernel or matmul that makes it."""
    policy, shape = step.case.policy, step.shapes[fqn]
    made = torch.float32 if fqn == "tok_embeddings.weight" else policy.param_dtype or torch.float32
    if step.case.micro_batches > 1:  # the sum of the micro-batches is in the dtype of the reduction
        made = policy.reduce_dtype or torch.float32
    if len(shape) == 1 and step.case.tensor_parallel > 1:  # summed over the tensor-parallel ranks, and cast afterwards
        return False
    made_by_matmul = len(shape) > 1 and fqn not in step.cast_in_matmuls
    cast = made_by_matmul and (policy.reduce_dtype or policy.param_dtype or torch.float32) is not made
    whole = not shape[0] % step.case.mesh["shard"] and "shard_placement_fn" not in step.case.settings
    return whole and not cast and "mode" not in step.case.settings and policy.reduce_dtype is not torch.float16


def expected_gathers(step: Step, bucket: Bucket) -> list[Expected]:
    """The collectives of a gather, which are one group."""
    ranks = step.case.mesh["shard"]
    dtype = name(step.case.policy.param_dtype or "float32")
    parts = [[fqn] for fqn in bucket.fqns] if bucket.form == "grouped" else [bucket.fqns]
    return [Expected("all_gather", dtype, numel(step, fqns, ranks), ranks) for fqns in parts]


def expected_reductions(step: Step, bucket: Bucket) -> list[list[Expected]]:
    """The collectives of a reduction, and of the all-reduce that follows it."""
    mode = step.case.settings.get("mode")
    ranks = step.case.mesh["shard"]
    dtype = name(step.case.policy.reduce_dtype or "float32")
    if mode == "replicate":
        return [[Expected("all_reduce", dtype, numel(step, bucket.fqns, 1), ranks)]]
    own = [fqn for fqn in bucket.fqns if bucket.form == "grouped" and in_place(step, fqn)]
    rest = [fqn for fqn in bucket.fqns if fqn not in own]
    parts = [*([fqn] for fqn in own), *([rest] if rest else [])]
    found = [[Expected("reduce_scatter", dtype, numel(step, fqns, ranks), ranks) for fqns in parts]]
    if mode == "hybrid_shard":
        count = numel(step, bucket.fqns, ranks)
        found.append([Expected("all_reduce", dtype, count, step.case.mesh["replicate"])])
    return found


def as_expected(found: Iterable[Communication]) -> list[list[Expected]]:
    return [[Expected(call.operation, call.dtype, call.elements, call.ranks) for call in one.calls] for one in found]


def test_tests_of_a_case_are_a_group_that_one_process_runs(step: Step, request: pytest.FixtureRequest) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("there is only one process")
    assert request.node.nodeid.endswith(f"@{step.name}")


def test_collectives_are_those_of_the_plan(step: Step) -> None:
    """Kind, dtype, elements and ranks of each collective and group, in the order in which the plan issues them."""
    forward, backward = (as_expected(ours(events, step.case)) for events in parts(step).values())
    if step.case.plan == "none":
        alone = [Bucket((fqn,), None, None) for fqn in step.shapes]
        gathered = Counter(chain(*forward))
        assert gathered == Counter(chain(*(expected_gathers(step, bucket) for bucket in alone)))
        reduced = [one for (one,) in backward if one.operation != "all_gather"]
        expected = (chain(*expected_reductions(step, bucket)) for bucket in alone)
        assert Counter(reduced) == Counter(chain(*expected))
        assert Counter(chain(*backward)) - Counter(reduced) <= gathered
        return
    plan = planned_buckets(step)
    assert forward == [expected_gathers(step, bucket) for bucket in plan.forward]
    gathers = [calls for calls in backward if calls[0].operation == "all_gather"]
    assert gathers == [expected_gathers(step, bucket) for bucket in plan.backward]
    planned = [expected_reductions(step, bucket) for bucket in plan.reductions]
    for stage in range(len(planned[0])):
        operation = planned[0][stage][0].operation
        assert [calls for calls in backward if calls[0].operation == operation] == [stages[stage] for stages in planned]
    assert len(backward) == len(gathers) + len([*chain(*planned)])


def test_each_collective_is_awaited_once_by_the_stream_of_compute(step: Step) -> None:
    """Each runs on a stream of NCCL's that has waited for the stream of compute first; a group has a wait a member."""
    for events in parts(step).values():
        found = communications(events)
        assert all([wait.stream for wait in each.waits] == [DEFAULT_STREAM] * len(each.calls) for each in found)
        for each in found:
            stream = each.calls[0].stream
            assert stream != DEFAULT_STREAM
            before = [event.what for event in events[: each.issued_at]]
            recorded, awaited = before[-3:-1] if isinstance(before[-1], Record) else before[-2:]
            assert recorded == Record(DEFAULT_STREAM, recorded.event)
            assert awaited == Wait(stream, recorded.event)


def launched(events: Sequence[Event]) -> Iterator[str]:
    """Names of Triton's kernels, matmuls, collectives and waits for collectives, in the order of the log."""
    found = communications(events)
    waits = {wait.at for each in found for wait in each.waits}
    issues = {each.issued_at for each in found}
    for at, (*_, what) in enumerate(events):
        if isinstance(what, Kernel) and what.name.startswith("triton_"):
            yield what.name
        elif isinstance(what, Matmul):
            yield "matmul"
        elif isinstance(what, Collective) and at in issues:
            yield what.operation
        elif at in waits:
            yield "wait"


CALLS = re.compile(
    r"^\s+(?!del )(?:.* = )?(?:"
    r"(?P<kernel>triton_\w+)\.run\(|extern_kernels\.(?P<matmul>mm|addmm|bmm|baddbmm)(?:_dtype)?\(|"
    r"torch\.ops\.(?:_c10d_functional|simplefsdp)\.(?P<collective>all_gather_into_tensor|reduce_scatter_tensor|all_reduce|wait_tensor)"
    r"(?:_coalesced|_out|_)?\.)",
    re.MULTILINE,
)
AS_LOGGED = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter", "wait_tensor": "wait"}


def generated(code: str) -> Iterator[str]:
    """Yield names of kernels and collectives in the order in which TorchInductor's code calls them."""
    for found in CALLS.finditer(called_code(code)):
        if found["kernel"]:
            yield found["kernel"]
        elif found["matmul"]:
            yield "matmul"
        else:
            yield AS_LOGGED.get(found["collective"], found["collective"])


def test_the_gpu_is_told_in_the_order_of_the_generated_code(step: Step) -> None:
    """The order of the code is that of the plan: compilation fails otherwise."""
    *forward, backward = zip(*step.codes, strict=True)  # without collectives, as when replicated, none of forward
    logged = parts(step)
    for codes in forward:
        assert [*launched(logged["forward"])] == [*chain(*map(generated, codes))]
    assert [*launched(logged["backward"])] == [*chain(*map(generated, reversed(backward)))]


def test_the_first_micro_batches_only_gather(step: Step) -> None:
    found = as_expected(communications(step.before))
    if step.case.micro_batches == 1:
        assert not found
        return
    assert {one.operation for calls in found for one in calls} == {"all_gather"}
    plan = planned_buckets(step)
    gathered = [each for bucket in (*plan.forward, *plan.backward) for each in expected_gathers(step, bucket)]
    assert Counter(chain(*found)) == Counter(gathered * (step.case.micro_batches - 1))


def test_full_gradients_are_in_memory_once_while_they_are_added_up(step: Step) -> None:
    if step.case.micro_batches > 1:
        sums = sum(4 * math.prod(shape) for shape in step.shapes.values())
        assert sums < step.peak_bytes < 2 * sums


def test_memory_of_a_collective_is_not_given_away_before_its_wait(step: Step) -> None:
    taken = [entry for entry in step.allocations if entry["action"] == "alloc"]
    for events in parts(step).values():
        for each in communications(events):
            issued, awaited = (events[at].time_us for at in (each.issued_at, each.waits[0].at))
            meanwhile = [
                (entry["addr"], entry["addr"] + entry["size"])
                for entry in taken
                if issued + 1 < entry["time_us"] < awaited - 1
            ]
            for call in each.calls:
                for begin, end in call.buffers:
                    assert not [other for other in meanwhile if other[0] < end and begin < other[1]]


def test_cast_shards_are_sent_from_their_place_in_what_is_gathered(step: Step) -> None:
    """The rank is the first one of its groups, so its part of what is gathered begins where that begins."""
    gathers = [
        call
        for events in parts(step).values()
        for one in ours(events, step.case)
        for call in one.calls
        if call.operation == "all_gather"
    ]
    if step.case.policy.param_dtype is None or step.case.plan == "none":
        pytest.skip("shards may be sent as they are")
    assert gathers or step.case.settings.get("mode") == "replicate"
    assert all(call.send == call.receive for call in gathers)


def test_the_host_never_waits_in_forward_or_backward(step: Step) -> None:
    """But for gradients that are copied to CPU, one blocking copy each, and for the end of an accumulation: the ranks
    ask each other whether any has a gradient left that this backward did not reach."""
    waits = [*map(type, (what for events in parts(step).values() for what in host_waits(events)))]
    copies = 0 if "offload_policy" not in step.case.settings else len(step.shapes)
    assert waits.count(Copy) <= copies
    assert waits.count(Sync) <= copies
    assert not host_waits(step.before)
    asked = [*map(type, host_waits(step.backward[len(parts(step)["backward"]) :]))]
    assert asked == ([Sync, Copy, Sync] if step.case.micro_batches > 1 else [])


def test_kernels_of_triton_spill_nothing(step: Step) -> None:
    assert not [event.what for event in step.loaded if event.what.local_bytes]


SEVERAL_COPIES = {
    "uneven": "gradients that do not divide are packed and padded one by one, and shards padded by fills",
    "shard-1": "shards are cast by kernels of Triton's, and gradients that are turned are packed one by one",
    "none": "there are no buckets",
}
"""Cases in which a bucket is not packed by one kernel, with what happens."""


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_bucket_costs_one_kernel_before_its_collective_and_one_behind_the_wait(step: Step, direction: str) -> None:
    """A group, and a bucket of one, cost one kernel if their shards are cast, and none behind the wait."""
    if step.name in SEVERAL_COPIES:
        pytest.skip(SEVERAL_COPIES[step.name])
    plan = planned_buckets(step)
    gathers = getattr(plan, direction)
    reductions = [bucket for bucket in plan.reductions if len(bucket.fqns) > 1] if direction == "backward" else []
    packed = [each for each in reductions if each.form == "packed" or not all(in_place(step, f) for f in each.fqns)]
    casts = step.case.policy.param_dtype is not None
    kinds = ["split_with_sizes_copy", "chunk_cat", "multi_tensor_apply", "CatArray"]
    if casts:  # attention in fp32 has copies of its own
        kinds.append("direct_copy")
    names = [event.what.name for event in parts(step)[direction] if isinstance(event.what, Kernel)]
    copies = [each for each in names if any(kind in each for kind in kinds)]
    unpacked = [bucket for bucket in gathers if bucket.form == "grouped" or len(bucket.fqns) == 1]
    of_gathers = 2 * (len(gathers) - len(unpacked)) + casts * sum(casting_kernels(step, bucket) for bucket in unpacked)
    assert len(copies) == of_gathers + len(packed), Counter(copies)


def casting_kernels(step: Step, bucket: Bucket) -> int:
    """Return the number of kernels that cast a bucket's shards: one, but that of torch 2.11 takes 320 chunks of 65,536
    values at most."""
    shards = [math.prod(step.shapes[fqn]) // step.case.mesh["shard"] for fqn in bucket.fqns]
    return 1 if VERSION >= (2, 12) else -(-sum(-(-shard // 2**16) for shard in shards) // 320)


def test_matmuls_cast_gradients_where_their_buckets_are_grouped(step: Step) -> None:
    policy, settings = step.case.policy, step.case.settings
    possible = step.case.backend == GROUPING_NCCL and step.case.plan != "none"
    possible = possible and not {"mode", "shard_placement_fn"} & set(settings)
    possible = possible and step.case.micro_batches == 1  # a sum of gradients is made by no matmul
    if possible and policy.param_dtype is torch.bfloat16 and policy.reduce_dtype is torch.float32:
        matmuls = {fqn for fqn, shape in step.shapes.items() if len(shape) == 2 and "embeddings" not in fqn}
        small = {fqn for fqn, shape in step.shapes.items() if math.prod(shape) <= 2**20}
        assert step.cast_in_matmuls <= matmuls
        if "memory_budget" in step.case.options or step.name == "checkpointing":  # there is room for some of them
            assert 0 < len(step.cast_in_matmuls) < len(matmuls - small)
            return
        # The output's gradient is made beside the logits, at the peak.
        assert step.name == "uneven" or step.cast_in_matmuls >= matmuls - small - {"output.weight"}
    else:
        assert not step.cast_in_matmuls


def test_buckets_are_grouped_where_the_backend_issues_groups(step: Step) -> None:
    """Gathers of Llama's blocks are large: their copies cost more than the members of a group; those of "uneven" are
    small."""
    grouped_here = step.case.backend == GROUPING_NCCL and step.name != "uneven"
    grouped = {bucket.form for plan in step.plans for bucket in plan.forward if len(bucket.fqns) > 1}
    assert step.case.plan == "none" or grouped <= {"grouped" if grouped_here else "packed"}
    policy = step.case.policy
    divided = policy.reduce_dtype is torch.float16  # before it is reduced
    if policy.param_dtype == policy.reduce_dtype and step.case.backend == GROUPING_NCCL and not divided:
        assert "grouped" in {bucket.form for plan in step.plans for bucket in plan.reductions}


WORKSPACE = (40 if VERSION >= (2, 12) else 80) * 2**20
"""Bytes at most that cuBLAS asks torch's allocator for; they are not predicted. Torch 2.11 keeps two workspaces."""


def test_the_predicted_peak_is_that_of_the_allocator(step: Step) -> None:
    if (budget := step.case.options.get("memory_budget")) is not None:
        assert step.peak_bytes <= parse_bytes(budget)
    if step.predicted_bytes:
        foreseen = step.peak_bytes - step.batch_bytes
        assert max(step.predicted_bytes) == pytest.approx(foreseen, rel=0.05, abs=WORKSPACE)
