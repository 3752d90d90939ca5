"""Logs of a null GPU as data; the null GPU itself is tested by ``make test-gpu-structure``."""

import sys

import pytest
import torch

from simplefsdp.null_gpu import __main__, launch, rank
from simplefsdp.null_gpu.log import Awaited, Collective, Copy, Kernel, Sync, communications, host_waits, parse_log
from tests.test_structure import imports, modules

GATHER = (
    "collective\tstream={stream}\toperation=all_gather\tranks=8\tcommunicator=5\tdtype=bfloat16\telements=10\top=-1"
    "\tsend=1000\treceive=2000\tgroup={group}"
)


def log(*lines: str) -> str:
    return "".join(f"7 {1000 * at} {2000 * at} {line}\n" for at, line in enumerate(lines))


def gather(stream: int = 16, group: int = 0) -> str:
    return GATHER.format(stream=stream, group=group)


def test_a_line_is_parsed_into_its_kind() -> None:
    events = parse_log(log("kernel\tstream=0\tblocks=3\tthreads=64\telements=-1\tname=add = one", gather()))
    assert [event.thread for event in events] == [7, 7]
    assert (events[1].cpu_s, events[1].time_us) == pytest.approx((1e-6, 2.0))
    assert events[0].what == Kernel(0, 3, 64, -1, "add = one")
    found = events[1].what
    assert isinstance(found, Collective)
    assert found.nbytes == 10 * 2 * 8
    assert found.buffers == ((1000, 1020), (2000, 2160))


def test_a_collective_is_awaited_where_a_stream_waits_for_the_event_recorded_behind_it() -> None:
    events = parse_log(
        log(
            "record\tstream=0\tevent=1",
            "wait\tstream=16\tevent=1",
            gather(),
            "record\tstream=16\tevent=2",
            "wait\tstream=0\tevent=2",
            "record\tstream=0\tevent=2",  # the event is used again
            "wait\tstream=0\tevent=2",
        )
    )
    (found,) = communications(events)
    assert (found.issued_at, found.waits) == (2, (Awaited(0, 4),))


def test_calls_of_one_group_are_one_communication() -> None:
    events = parse_log(
        log(gather(group=3), gather(group=3), "record\tstream=16\tevent=2", gather(group=4), "wait\tstream=0\tevent=2")
    )
    first, second = communications(events)
    assert (len(first.calls), first.waits) == (2, (Awaited(0, 4),))
    assert (len(second.calls), second.waits) == (1, ())


def test_the_host_waits_for_blocking_copies_and_synchronisations() -> None:
    events = parse_log(
        log(
            "copy\tstream=0\tdirection=1\tbytes=8\tblocking=0",
            "copy\tstream=0\tdirection=2\tbytes=8\tblocking=1",
            "sync\twhat=stream\thandle=0",
        )
    )
    assert host_waits(events) == [Copy(0, 2, 8, True), Sync("stream", 0)]


def test_a_torch_without_cuda_and_a_process_without_the_stub_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match="is no CUDA build"):
        launch.build_stub("h100")
    monkeypatch.delenv("SIMPLEFSDP_NULL_GPU", raising=False)
    with (
        pytest.raises(RuntimeError, match=r"start this process with python -m simplefsdp\.null_gpu"),
        rank.null_rank(2),
    ):
        pass


def test_the_command_hands_on_what_follows_its_own_option(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    monkeypatch.setattr(__main__, "environment", lambda device: {"device": device})
    monkeypatch.setattr(__main__.os, "execve", lambda *args: called.append(args))
    for arguments, device, command in (
        (["--device", "b200", "-m", "pytest", "--device", "x"], "b200", ["-m", "pytest", "--device", "x"]),
        (["script.py"], "h100", ["script.py"]),
    ):
        monkeypatch.setattr(sys, "argv", ["null_gpu", *arguments])
        __main__.main()
        assert called.pop() == (sys.executable, [sys.executable, *command], {"device": device})


def test_only_the_command_that_simulates_imports_the_null_gpu() -> None:
    known = modules()
    outside = {name: path for name, path in known.items() if not name.startswith("simplefsdp.null_gpu")}
    imported = {(name, each) for name, path in outside.items() for each in imports(name, path, known)}
    users = {name for name, each in imported if each.startswith("simplefsdp.null_gpu")}
    assert users == {"simplefsdp.analysis.simulated", "simplefsdp.cli.simulation", "simplefsdp.cli.rehearse"}
    assert {name for name, each in imported if each == "simplefsdp.analysis.simulated"} == {"simplefsdp.cli.simulation"}
