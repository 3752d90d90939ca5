"""Profiles that were measured on this machine, cached in a folder of this user."""

import logging
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from filelock import FileLock
from platformdirs import user_cache_path

from simplefsdp.hardware.profile import load_profile

log = logging.getLogger("simplefsdp")

_OWNER = "SIMPLEFSDP_CALIBRATES_FOR"
"""Environment variable with the number of the process for which another one measures."""
_VERSION = 4
"""The version of what ``simplefsdp calibrate`` measures."""


def cached_profile_path(device: torch.device, ranks: int) -> Path | None:
    """Return the file of the profile that ``torchrun -m simplefsdp calibrate`` measured here with so many ranks.

    ``None``: there is none, or the file is not a profile; it is then set aside, with a warning.
    """
    path = cache_path(device, ranks)
    if ranks == 1 or not path.exists():
        return None
    try:
        load_profile(path)
    except ValueError as error:
        aside = path.with_suffix(".invalid")
        with suppress(OSError):  # another rank may have done it
            path.replace(aside)
        log.warning("calibrate: the cached profile is not valid and was moved to %s: %s", aside, error)
        return None
    return path


def measure_on_first_use(device: torch.device, ranks: int) -> Path | None:
    """Return the file that ``cached_profile_path`` finds from now on, measuring now if there is none.

    ``None`` unless ``device`` is a CPU, and torchrun has started all ``ranks`` on one node. The first rank that comes
    runs the command, for about a minute. Ranks that come meanwhile wait for a file lock, and a rank that never comes is
    not waited for: no collective runs here.

    Raises:
        RuntimeError: the command failed.
        OSError: the cache cannot be written; nothing was measured.
    """
    here = os.environ.get("LOCAL_WORLD_SIZE") == str(ranks) and dist.get_backend() not in ("fake", "rehearsal")
    if device.type != "cpu" or ranks == 1 or not here:
        return None
    path = cache_path(device, ranks)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            _measure_in_own_processes(path, ranks)
    return path


def _measure_in_own_processes(path: Path, ranks: int) -> None:
    launch = f"-m torch.distributed.run --standalone --nproc-per-node {ranks}"
    command = f"{launch} -m simplefsdp calibrate --device cpu --threads {torch.get_num_threads()}"
    log.warning(
        "plan: measuring this CPU and the network between %d ranks, once, for a minute; the profile is cached in %s. "
        "options={'plan': 'block'} needs none of it",
        ranks,
        path,
    )
    environment = {
        # An error of theirs is not one of this process.
        **{name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")},
        _OWNER: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(folder or os.curdir for folder in sys.path),
    }
    arguments = [sys.executable, *command.split()]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            "option 'plan': measuring this CPU failed (options={'plan': 'block'} needs none of it). "
            f"python {command}:\n{done.stderr[-2000:]}"
        )


def end_with_owner() -> None:
    """Let this process end with the rank for which it measures; do nothing if no rank has started it.

    A rank that is killed cannot end what it has started.
    """
    if owner := os.environ.get(_OWNER):
        threading.Thread(target=_end_with, args=(int(owner),), daemon=True).start()


def _end_with(pid: int) -> None:
    try:
        while True:
            os.kill(pid, 0)  # no signal: it only asks
            time.sleep(0.5)
    except ProcessLookupError:
        os._exit(1)


def cache_path(device: torch.device, ranks: int = 1) -> Path:
    """Return where this user's profile of ``device`` is cached; another file for each thing that may change numbers.

    Args:
        ranks: the number of ranks between which the network was measured; 1: it was not measured.
    """
    if device.type == "cuda":
        what = torch.cuda.get_device_name(device)
    else:
        what = f"cpu {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} threads"
    with_network = f" {ranks} ranks" if ranks > 1 else ""
    name = f"profile {_VERSION} {what} torch {torch.__version__}{with_network}.json"
    return user_cache_path("simplefsdp", appauthor=False) / re.sub(r"[^\w.]+", "-", name)
