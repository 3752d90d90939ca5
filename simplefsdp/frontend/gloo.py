"""One thread for each gloo group: with two, torch crashes when two collectives of a group end at the same time.

``ProcessGroupGloo`` runs two collectives of a group at once, and both threads then assign one string, the name of the
last completed operation, without a lock (``runLoop``; torch 2.11 to 2.15). That of a functional all-gather is too long
to be stored within the string, so its buffer is freed twice: ranks that keep several gathers in flight abort after some
thousands. A group with one thread runs its collectives in their order, as NCCL does on a stream.
"""

import logging
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

log = logging.getLogger("simplefsdp")


def run_in_order(group: dist.ProcessGroup) -> None:
    """Give ``group`` a gloo backend with one thread for CPU tensors, if it has one with more.

    Local, and at once: the new backend connects when it is first used.
    """
    cpu = torch.device("cpu")
    if not dist.is_gloo_available() or cpu not in group._device_types:
        return
    old: Any = group._get_backend(cpu)
    gloo: Any = dist.ProcessGroupGloo
    if isinstance(old, distributed_c10d._ProcessGroupWrapper):
        log.warning(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL: gloo keeps its two threads for each group, and may abort with a double "
            "free when several all-gathers are in flight"
        )
    if type(old) is not gloo or old.options._threads == 1:
        return
    options = gloo._Options()
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    devices = [gloo.create_device(interface=interface, lazy_init=True) for interface in interfaces if interface]
    options._devices = devices or [gloo.create_default_device(lazy_init=True)]
    options._threads = 1
    options._timeout = old.options._timeout
    options.global_ranks_in_group = old.options.global_ranks_in_group
    options.group_name = old.options.group_name
    _, store = distributed_c10d._world.pg_map[group]
    new = gloo(dist.PrefixStore("one_thread", store), group.rank(), group.size(), options)
    group._register_backend(cpu, dist.ProcessGroup.BackendType.CUSTOM, new)
