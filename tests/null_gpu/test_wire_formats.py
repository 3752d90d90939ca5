"""Requests of a step whose weights and gradients travel in wire formats: transfers, groups, kernels, syncs, memory."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from inductor_passes.ops.wire_formats import FORMATS
from inductor_passes.torch_compat.version import VERSION
from simplefsdp.null_gpu.log import DEFAULT_STREAM, Communication, Event, Kernel, communications, host_waits
from simplefsdp.plan.bucket_plan import Bucket
from tests.null_gpu.steps import WIRE_CASES, Step

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=WIRE_CASES)
def step(request: pytest.FixtureRequest, logged_step: Callable[[str], Step]) -> Step:
    return logged_step(request.param)


def encoded(step: Step, bucket: Bucket, wire_format: str) -> int:
    """Return the bytes of one rank's part of a bucket."""
    ranks = step.case.mesh["shard"]
    return sum(FORMATS[wire_format].nbytes(math.prod(step.shapes[fqn]) // ranks) for fqn in bucket.fqns)


def on_node(step: Step) -> int:
    """Return the number of ranks of the first step of a reduction."""
    ranks: int = step.case.settings.get("ranks_per_node", step.case.mesh["shard"])
    return ranks


def test_weights_are_gathered_in_bytes_of_their_format(step: Step) -> None:
    (plan,) = step.plans
    wire = step.case.settings["wire"]
    for events, buckets in ((step.forward, plan.forward), (step.backward, plan.backward)):
        found = [one.calls for one in communications(events) if one.calls[0].operation == "all_gather"]
        assert all(len(calls) == 1 and calls[0].dtype == "uint8" for calls in found)
        expected = [(step.case.mesh["shard"], encoded(step, bucket, wire.gather)) for bucket in buckets]
        if "replicate" in step.case.mesh and events is step.backward:
            sums = [(step.case.mesh["replicate"], encoded(step, one, wire.between_nodes)) for one in plan.reductions]
            assert sorted((calls[0].ranks, calls[0].elements) for calls in found) == sorted([*expected, *sums])
        else:
            assert [(calls[0].ranks, calls[0].elements) for calls in found] == expected


def exchanges(step: Step) -> list[Communication]:
    return [one for one in communications(step.backward) if one.calls[0].operation != "all_gather"]


def test_gradients_are_exchanged_once_over_all_ranks_or_inside_a_node_and_then_between(step: Step) -> None:
    """NCCL's all-to-all is a group: a message to each rank, and one from each."""
    (plan,) = step.plans
    wire, inside, ranks = step.case.settings["wire"], on_node(step), step.case.mesh["shard"]
    found = Counter((one.calls[0].ranks, one.calls[0].elements, len(one.calls)) for one in exchanges(step))
    expected: Counter[tuple[int, int, int]] = Counter()
    for bucket in plan.reductions:
        expected[inside, encoded(step, bucket, wire.reduce) * ranks // inside, 2 * inside] += 1
        if inside < ranks:
            expected[ranks // inside, encoded(step, bucket, wire.between_nodes), 2 * (ranks // inside)] += 1
    assert found == expected
    for one in exchanges(step):
        assert {call.operation for call in one.calls} == {"send", "receive"}
        assert {call.dtype for call in one.calls} == {"uint8"}


def test_each_transfer_is_awaited_by_the_stream_of_compute(step: Step) -> None:
    for events in (step.forward, step.backward):
        assert all([wait.stream for wait in one.waits] == [DEFAULT_STREAM] for one in communications(events))


def test_the_host_never_waits_and_no_kernel_spills(step: Step) -> None:
    assert not host_waits(step.forward)
    assert not host_waits(step.backward)
    some = 0 if VERSION >= (2, 12) else 8  # bytes of a sum of rotated blocks, by the Triton of torch 2.11
    spilling = {event.what.name: event.what.local_bytes for event in step.loaded if event.what.local_bytes > some}
    assert not spilling


def kernels(events: Sequence[Event]) -> Counter[str]:
    """Return how often each kernel of the formats runs."""
    names = (event.what.name for event in events if isinstance(event.what, Kernel))
    return Counter(name for name in names if name.endswith("code_kernel") or name.endswith("code_sum_kernel"))


def test_a_bucket_costs_one_kernel_each_way(step: Step) -> None:
    (plan,) = step.plans
    first, again, reduced = len(plan.forward), len(plan.backward), len(plan.reductions)
    assert len(step.shapes) > reduced
    assert kernels(step.forward) == {"encode_kernel": first, "decode_kernel": first}
    two_steps = {"encode_sum_kernel": reduced} if on_node(step) < 64 else {}
    assert kernels(step.backward) == {
        "encode_kernel": again + reduced,
        "decode_kernel": again,
        "decode_sum_kernel": reduced,
        **two_steps,
    }


def test_the_predicted_peak_is_that_of_the_allocator(step: Step) -> None:
    assert max(step.predicted_bytes) == pytest.approx(step.peak_bytes, rel=0.05)
