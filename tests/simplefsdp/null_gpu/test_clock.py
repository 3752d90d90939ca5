"""Simulated times of logs that are short enough to be worked out by hand."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from simplefsdp.hardware.profile import NETWORKS, HardwareProfile, flat
from simplefsdp.null_gpu.clock import SHORTEST_KERNEL_S, UNKNOWN_KERNEL_S, SimulatedStep, Sizes, simulate
from simplefsdp.null_gpu.log import Collective, Copy, Event, Fill, Kernel, Matmul, Note, Record, Sync, Wait

PROFILE = HardwareProfile(
    "by hand",
    "made up",
    matmul={"bfloat16": ((1.0, 1e12),)},
    attention={"bfloat16": ((1.0, 1e12),)},
    memory=((1.0, 1e12),),
    launch_s=1e-6,
    collective_launch_s=1e-6,
    contention=0.0,
    network=flat("by hand", 8, alpha_s=1e-3, bandwidth_bytes_per_s=1e9, member_s=1e-4),
)
SIZES = Sizes(batch=1, seq=100, dim=100, heads=10, head_dim=10, vocab_size=1000, local_parameters=10**9)
STEP = Note("step")
TWO_MS = Matmul(0, 1000, 1000, 1000, 1, "bfloat16")
NCCL = 16
"""The stream of collectives."""


def gather(group: int = 0, stream: int = NCCL, communicator: int = 1) -> Collective:
    """An all-gather of 8 MB over 8 ranks: 1 ms and 7 MB that each receives."""
    return Collective(stream, "all_gather", 8, communicator, "bfloat16", 500_000, -1, 0, 0, group)


def simulated(
    *asked: Any, cpu_ms: Iterable[float] | None = None, profile: HardwareProfile = PROFILE, **options: Any
) -> SimulatedStep:
    """The step that asks for all this, with the CPU time of the host at each of it."""
    times = [0.0] * len(asked) if cpu_ms is None else list(cpu_ms)
    log = [(0.0, STEP), *zip(times, asked, strict=True), (times[-1], STEP)]
    return simulate([Event(1, 1e-3 * at, 0.0, what) for at, what in log], profile, SIZES, **options)


def test_a_wait_for_another_stream_exposes_what_is_left_of_a_collective() -> None:
    step = simulated(TWO_MS, Record(0, 1), Wait(NCCL, 1), gather(), Record(NCCL, 2), TWO_MS, Wait(0, 2), TWO_MS)
    assert step.step_s == pytest.approx(2e-3 + 8e-3 + 2e-3)
    assert (step.compute_s, step.communication_s, step.exposed_s) == pytest.approx((6e-3, 8e-3, 6e-3))
    assert (step.host_s, step.host_bound_s) == (0.0, 0.0)


def test_a_stream_waits_for_a_host_that_comes_late_and_the_host_for_a_stream_that_it_awaits() -> None:
    step = simulated(TWO_MS, TWO_MS, cpu_ms=[0, 5])
    assert (step.step_s, step.host_bound_s, step.host_s) == pytest.approx((7e-3, 3e-3, 5e-3))
    assert simulated(TWO_MS, TWO_MS, cpu_ms=[0, 5], host_factor=2.0).step_s == pytest.approx(12e-3)
    awaited = simulated(TWO_MS, Sync("stream", 0), TWO_MS, cpu_ms=[0, 0, 1])
    assert (awaited.step_s, awaited.host_bound_s) == pytest.approx((5e-3, 1e-3))


def test_collectives_of_one_communicator_follow_each_other_and_a_group_is_one() -> None:
    ends = [Record(NCCL, 1), Wait(0, 1)]
    assert simulated(gather(), gather(), *ends).step_s == pytest.approx(16e-3)
    assert simulated(gather(), gather(stream=17), *ends, Record(17, 2), Wait(0, 2)).step_s == pytest.approx(16e-3)
    other = gather(stream=17, communicator=2)
    assert simulated(gather(), other, *ends, Record(17, 2), Wait(0, 2)).step_s == pytest.approx(8e-3)
    # One latency, 21 MB, and 0.1 ms for each member but the first.
    assert simulated(gather(5), gather(5), gather(5), *ends).step_s == pytest.approx(1e-3 + 21e-3 + 2e-4)


def test_compute_is_slower_beside_a_collective() -> None:
    profile = replace(PROFILE, contention=0.5)
    # The gather takes 8 ms, in which 4 ms of compute are done.
    assert simulated(gather(), TWO_MS, profile=profile).step_s == pytest.approx(4e-3)
    assert simulated(gather(), TWO_MS, TWO_MS, TWO_MS, profile=profile).step_s == pytest.approx(10e-3)
    other = replace(profile, matmul_contention=((0.5e6, 0.9), (1e6, 0.2)))
    assert simulated(gather(), TWO_MS, profile=other).step_s == pytest.approx(2.5e-3)


def test_kernels_take_what_their_bytes_take() -> None:
    def kernel(name: str, elements: int = -1) -> Kernel:
        return Kernel(0, 1, 128, elements, name)

    copies = [gather(), Record(NCCL, 1), Wait(0, 1), kernel("split_with_sizes_copy")]
    assert simulated(*copies).kernels_s == {"copy out": pytest.approx(16e-6)}
    reduce_scatter = gather()._replace(operation="reduce_scatter", dtype="float32")
    assert simulated(kernel("chunk_cat"), reduce_scatter).kernels_s == {"copy in": pytest.approx(24e-6)}
    assert simulated(kernel("multi_tensor_apply"), gather()).kernels_s == {"copy in": pytest.approx(3e-6)}
    in_pieces = kernel("multi_tensor_apply"), kernel("multi_tensor_apply"), gather()
    assert simulated(*in_pieces).kernels_s == {"copy in": pytest.approx(2 * 2e-6)}  # the shortest kernel
    assert simulated(Note("triton bytes 5000000"), kernel("triton_poi")).kernels_s == {"triton": pytest.approx(5e-6)}
    of_bucket = Note("format bytes 3000000"), kernel("decode_kernel"), kernel("decode_kernel")
    assert simulated(*of_bucket).kernels_s == {"format": pytest.approx(2 * 3e-6)}
    assert simulated(kernel("bfloat16_copy_BFloat16", 10**6)).kernels_s == {"elementwise": pytest.approx(4e-6)}
    assert simulated(kernel("fused_adam")).kernels_s == {"optimizer": pytest.approx(28e-3)}
    assert simulated(kernel("flash_fwd_kernel")).kernels_s == {"attention": pytest.approx(4e-6)}
    assert simulated(kernel("flash_bwd_dq_dk_dv_kernel")).kernels_s == {"attention": pytest.approx(10e-6)}
    assert simulated(Fill(0, 1)).kernels_s == {"fill": SHORTEST_KERNEL_S}
    assert simulated(Fill(0, 10**7), Copy(0, 1, 10**6, True)).kernels_s == pytest.approx({"fill": 1e-5, "copy": 2e-5})
    unknown = simulated(kernel("nobody knows"))
    assert unknown.kernels_s == {"unknown": UNKNOWN_KERNEL_S}
    assert unknown.unknown == {"nobody knows": 1}


def test_a_collective_takes_what_it_takes_among_the_ranks_of_its_communicator() -> None:
    profile = replace(PROFILE, network=NETWORKS["h100-8-nodes"])
    inside, across = tuple(range(8)), tuple(range(0, 16, 2))
    seconds = {ranks: profile.network.seconds("all_gather", ranks, 8_000_000) for ranks in (inside, across)}
    assert seconds[inside] < seconds[across]
    for ranks in seconds:
        step = simulated(gather(), Record(NCCL, 1), Wait(0, 1), profile=profile, groups={1: ranks, 2: (0,)})
        assert step.communication_s == pytest.approx(seconds[ranks])
    assert simulated(gather(), profile=profile).communication_s == pytest.approx(seconds[inside])


def test_spans_show_what_ran_when_and_what_was_awaited() -> None:
    asked = TWO_MS, Record(0, 1), Wait(NCCL, 1), gather(5), gather(5), Record(NCCL, 2), TWO_MS, Wait(0, 2), Fill(0, 1)
    log: list[Any] = [STEP, TWO_MS, STEP, *asked, STEP]  # spans begin with the last step
    step = simulate([Event(1, 0.0, 0.0, what) for what in log], PROFILE, SIZES)
    end = 2e-3 + 15.1e-3
    assert [(track, name, kind, nbytes) for track, name, kind, _, _, nbytes in step.spans] == [
        ("stream 0", "1000 x 1000 x 1000", "matmul", 0),
        ("communicator 1", "all_gather of 2", "all_gather", 16_000_000),
        ("stream 0", "1000 x 1000 x 1000", "matmul", 0),
        ("waits", "wait", "exposed", 0),
        ("stream 0", "cudaMemset", "fill", 0),
    ]
    times = [(0, 2e-3), (2e-3, end), (2e-3, 4e-3), (4e-3, end), (end, end + SHORTEST_KERNEL_S)]
    assert [time for span in step.spans for time in (span.start_s, span.end_s)] == pytest.approx(
        [time for pair in times for time in pair]
    )
    # The note, the matmul, and what follows: where the stream of compute is when the host asks for each.
    assert step.reached_s == pytest.approx([0, 0, *[2e-3] * 6, 4e-3, end])


def test_bytes_that_are_copied_are_those_of_the_members_of_buckets() -> None:
    def kernel(name: str, elements: int = -1) -> Kernel:
        return Kernel(0, 1, 128, elements, name)

    out = [gather(), Record(NCCL, 1), Wait(0, 1), kernel("split_with_sizes_copy")]
    assert simulated(*out, kernel("CatArrayBatchedCopy")).copied_bytes == 2 * 8_000_000
    assert simulated(kernel("multi_tensor_apply"), gather()).copied_bytes == 1_000_000
    assert simulated(kernel("chunk_cat"), gather()._replace(operation="reduce_scatter")).copied_bytes == 8_000_000
    in_group = gather()._replace(operation="reduce_scatter", group=1)
    packed = in_group._replace(elements=10)
    assert simulated(kernel("chunk_cat"), in_group, packed, in_group._replace(group=2)).copied_bytes == packed.nbytes
    assert simulated(kernel("direct_copy_BFloat16", 1000), kernel("add_BFloat16", 1000)).copied_bytes == 2000
    assert simulated(TWO_MS, gather()).copied_bytes == 0


def test_only_the_last_step_of_a_log_counts() -> None:
    log: list[Any] = [STEP, TWO_MS, TWO_MS, STEP, TWO_MS, STEP]
    step = simulate([Event(1, 0.0, 0.0, what) for what in log], PROFILE, SIZES)
    assert (step.step_s, step.compute_s) == pytest.approx((2e-3, 2e-3))
    with pytest.raises(ValueError, match="before and behind a step, found 1"):
        simulate([Event(1, 0.0, 0.0, STEP)], PROFILE, SIZES)
