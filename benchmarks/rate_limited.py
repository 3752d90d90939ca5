"""Two gloo ranks in two network namespaces, joined by a link that carries a given number of bits per second each way.

    with link(1e9) as namespaces:
        of_rank_0, of_rank_1 = run(namespaces, fn, *args)

Needs Linux, root, ``ip`` and ``tc``; ``permitted()`` says what is missing. ``fn`` is pickled: define it in a module.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MTU = 9000
BURST_S = 500e-6  # what an idle link may send at once; less, and a timer that wakes up late costs rate
LIMIT = 64 << 20  # bytes a queue may hold: nothing is dropped

Namespaces = tuple[str, str]


def permitted() -> str | None:
    """Why ``link`` cannot work here, found by trying, or None."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"no {tool!r} (iproute2)"
    try:
        with link(1e9) as (first, _):
            _tool(f"ip netns exec {first} true")
    except RuntimeError as error:
        return str(error)
    return None


@contextmanager
def link(bits_per_s: float, burst_s: float = BURST_S) -> Iterator[Namespaces]:
    """Names of two namespaces whose only connection carries ``bits_per_s`` each way; removed at the end."""
    for left in Path("/var/run/netns").glob("rate-*"):
        if not os.path.exists(f"/proc/{left.name.split('-')[1]}"):  # its process was killed
            _tool(f"ip netns delete {left.name}")
    name = f"rate-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    pair = (f"{name}-0", f"{name}-1")
    burst = max(int(bits_per_s / 8 * burst_s), 2 * (MTU + 14))  # a frame longer than this would never be sent
    tbf = f"tbf rate {bits_per_s:.0f}bit burst {burst} limit {LIMIT}"
    try:
        for namespace in pair:
            _tool(f"ip netns add {namespace}")
        _tool(f"ip link add veth0 netns {pair[0]} type veth peer name veth0 netns {pair[1]}")
        for index, namespace in enumerate(pair):
            _tool(f"ip -n {namespace} link set veth0 mtu {MTU} up")
            _tool(f"ip -n {namespace} address add 10.0.0.{index + 1}/24 dev veth0")
            # bbr, which may be the default, does not fill the link; a slow start is of no use
            route = "10.0.0.0/24 dev veth0 initcwnd 1000 quickack 1 congctl reno"
            _tool(f"ip -n {namespace} route replace {route}")
            _tool(f"tc -n {namespace} qdisc add dev veth0 root {tbf}")
        yield pair
    finally:
        for namespace in pair:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def run(names: Namespaces, fn: Callable[..., Any], *args: Any, timeout_s: float = 120, threads: int = 2) -> list[Any]:
    """Results of ``fn(*args)`` on two new ranks; raises what a rank raises, or TimeoutError, and leaves no process.

    Gloo runs as many collectives of a group at a time as it has ``threads``; its default is 2.
    """
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        work = (names, folder, timeout_s, threads, fn, args)
        ranks = mp.start_processes(_rank, work, nprocs=2, join=False, daemon=True, start_method="spawn")
        try:
            while not ranks.join(max(deadline - time.monotonic(), 0)):  # returns, too, when one rank has ended
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{fn.__name__} took more than {timeout_s} s")
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        return [pickle.loads(Path(folder, f"{rank}").read_bytes()) for rank in range(2)]


def _rank(rank: int, names: Namespaces, folder: str, timeout_s: float, threads: int, fn: Any, args: Any) -> None:
    with open(f"/var/run/netns/{names[rank]}") as file:
        if ctypes.CDLL(None).setns(file.fileno(), 0x40000000):  # CLONE_NEWNET, for this thread and those it starts
            raise OSError(f"setns: no entry to {names[rank]}")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "veth0"
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._threads = [gloo.create_device(interface="veth0")], threads
    options._timeout = timeout = timedelta(seconds=timeout_s)
    # the backend "gloo" takes no options
    dist.Backend.register_backend("gloo_threads", lambda *a: gloo(*a[:3], options), devices=["cpu"])
    backend = "gloo" if threads == 2 else "gloo_threads"
    dist.init_process_group(backend, f"file://{folder}/store", timeout, rank=rank, world_size=2)
    result = fn(*args)
    dist.barrier()  # no rank leaves while the other still needs it
    dist.destroy_process_group()
    Path(folder, f"{rank}").write_bytes(pickle.dumps(result))


def _tool(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
