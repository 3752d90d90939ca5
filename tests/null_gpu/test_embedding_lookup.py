"""Requests of a step that exchanges tokens and embeddings in place of the weight: transfers, syncs, kernels, memory."""

from collections.abc import Callable

import pytest

from simplefsdp.null_gpu.log import DEFAULT_STREAM, Collective, Communication, Event, communications, host_waits
from tests.null_gpu.steps import LOOKUP_CASES, SEQ, Step

pytestmark = pytest.mark.slow

WEIGHT = "tok_embeddings.weight"


@pytest.fixture(scope="module", params=LOOKUP_CASES)
def step(request: pytest.FixtureRequest, logged_step: Callable[[str], Step]) -> Step:
    return logged_step(request.param)


def exchanges(events: list[Event]) -> list[Communication]:
    return [one for one in communications(events) if one.calls[0].operation in ("send", "receive")]


def test_tokens_are_gathered_once_and_embeddings_exchanged_once_each_way(step: Step) -> None:
    _, columns = step.shapes[WEIGHT]
    tokens = [
        event.what for event in step.forward if isinstance(event.what, Collective) and event.what.dtype == "int64"
    ]
    assert [(call.operation, call.elements, call.ranks) for call in tokens] == [("all_gather", SEQ, 64)]
    for events in (step.forward, step.backward):
        (exchange,) = exchanges(events)
        assert len(exchange.calls) == 2 * 64
        assert {(call.dtype, call.elements) for call in exchange.calls} == {("bfloat16", SEQ * columns // 64)}
    (plan,) = step.plans
    assert all(WEIGHT not in bucket.fqns for bucket in (*plan.forward, *plan.backward))


def test_each_transfer_is_awaited_by_the_stream_of_compute(step: Step) -> None:
    for events in (step.forward, step.backward):
        assert all(wait.stream == DEFAULT_STREAM for one in communications(events) for wait in one.waits)
        assert all(one.waits for one in communications(events))


def test_the_host_never_waits_and_no_kernel_spills(step: Step) -> None:
    assert not host_waits(step.forward)
    assert not host_waits(step.backward)
    assert not [event.what for event in step.loaded if event.what.local_bytes]


def test_the_predicted_peak_is_that_of_the_allocator(step: Step) -> None:
    assert max(step.predicted_bytes) == pytest.approx(step.peak_bytes, rel=0.05)
