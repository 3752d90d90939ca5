"""Two gloo ranks in two network namespaces, joined by a link that carries a given number of bits per second each way.

    with link(1e9) as namespaces:
        of_rank_0, of_rank_1 = run(namespaces, fn, *args)

Needs Linux, root, ``ip`` and ``tc``; ``permitted()`` says what is missing. ``fn`` is pickled: a module must define it.
"""

import ctypes
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

CLONE_NEWNET = 0x40000000
INTERFACE = "veth0"
MTU = 9000
FRAME = MTU + 14  # what tbf counts for a full packet
BURST_S = 200e-6  # must cover how late a timer wakes up; what the link may send at once after a pause
LIMIT = 64 << 20  # bytes a queue may hold: nothing is ever dropped

Namespaces = tuple[str, str]


def permitted() -> str | None:
    """Why ``link`` cannot work here, found by trying, or None."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"no {tool!r} command (iproute2)"
    try:
        with link(1e9) as (first, _):
            _tool("ip", "netns", "exec", first, "true")
    except RuntimeError as error:
        return str(error)
    return None


@contextmanager
def link(bits_per_s: float, burst_s: float = BURST_S) -> Iterator[Namespaces]:
    """Names of two namespaces whose only connection carries ``bits_per_s`` each way; removed at the end."""
    name = f"rate-{uuid.uuid4().hex[:8]}"
    pair = (f"{name}-0", f"{name}-1")
    rate, burst = f"{bits_per_s:.0f}bit", max(int(bits_per_s / 8 * burst_s), 2 * FRAME)
    try:
        for namespace in pair:
            _tool("ip", "netns", "add", namespace)
        ends = ("netns", pair[0], "type", "veth", "peer", "name", INTERFACE, "netns", pair[1])
        _tool("ip", "link", "add", INTERFACE, *ends)
        for index, namespace in enumerate(pair):
            ip = ("ip", "-n", namespace)
            _tool(*ip, "link", "set", "lo", "up")
            _tool(*ip, "link", "set", INTERFACE, "mtu", f"{MTU}", "up")
            _tool(*ip, "address", "add", f"10.0.0.{index + 1}/24", "dev", INTERFACE)
            # bbr, where it is the default, would pace and probe below the rate; small round trips need no slow start
            route = ("10.0.0.0/24", "dev", INTERFACE, "initcwnd", "1000", "quickack", "1", "congctl", "reno")
            _tool(*ip, "route", "replace", *route)
            shape = ("root", "tbf", "rate", rate, "burst", f"{burst}", "limit", f"{LIMIT}")
            _tool("tc", "-n", namespace, "qdisc", "add", "dev", INTERFACE, *shape)
        yield pair
    finally:
        for namespace in pair:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def run(namespaces: Namespaces, fn: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
    """Results of ``fn(*args)`` on two new ranks. Raises a rank's exception, or TimeoutError; no process outlives it."""
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        work = (namespaces, folder, timeout_s, fn, args)
        ranks = mp.start_processes(_rank, work, nprocs=2, join=False, daemon=True, start_method="spawn")
        try:
            while not ranks.join(deadline - time.monotonic()):  # returns, too, when only one rank has ended
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{fn.__name__} took more than {timeout_s} s")
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        results = []
        for rank in range(2):
            with open(os.path.join(folder, f"result{rank}"), "rb") as file:
                results.append(pickle.load(file))
        return results


def _rank(
    rank: int, namespaces: Namespaces, folder: str, timeout_s: float, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    with open(f"/var/run/netns/{namespaces[rank]}") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), CLONE_NEWNET):  # of this thread and those it starts; os.setns is Python 3.12
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=timeout_s))
    try:
        result = fn(*args)
        dist.barrier()  # no rank closes its connections while the other still uses them
    finally:
        dist.destroy_process_group()
    with open(os.path.join(folder, f"result{rank}"), "wb") as file:
        pickle.dump(result, file)


def _tool(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
