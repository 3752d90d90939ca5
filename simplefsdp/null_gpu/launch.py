"""Start processes under the null GPU: build ``stub.c`` for a device, and load it before CUDA's own libraries."""

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from platformdirs import user_cache_path

_SOURCE = Path(__file__).with_name("stub.c")


class Device(NamedTuple):
    """Properties of a CUDA device."""

    name: str
    major: int
    minor: int
    """Compute capability."""
    multiprocessors: int
    memory: int
    """Bytes."""
    shared: int
    """Bytes of shared memory that a block may ask for."""
    l2: int
    """Bytes of the level 2 cache."""


DEVICES: Mapping[str, Device] = {
    "a100": Device("NVIDIA A100-SXM4-80GB", 8, 0, 108, 85094825984, 166912, 41943040),
    "h100": Device("NVIDIA H100 80GB HBM3", 9, 0, 132, 85052227584, 232448, 52428800),
    "h200": Device("NVIDIA H200", 9, 0, 132, 150754820096, 232448, 62914560),
    "b200": Device("NVIDIA B200", 10, 0, 148, 191126044672, 232448, 132644864),
}
"""Devices by name; ``cudaGetDeviceProperties`` of such a GPU."""


def build_stub(device: str) -> Path:
    """Return the stub for a device of ``DEVICES``, as ``libcuda.so.1`` in a folder of its own; built once by gcc.

    Raises:
        RuntimeError: this torch is no CUDA build, or gcc failed.
    """
    if torch.version.cuda is None:
        raise RuntimeError(f"null GPU: torch {torch.__version__} is no CUDA build")
    # Structs of CUDA change between major versions: first come the headers of the CUDA that torch was built for, and
    # then those that Triton ships, which has the ones that torch's packages lack.
    site = Path(torch.__file__).parents[1]
    folders = (f"nvidia/cu{torch.version.cuda.split('.')[0]}/include", "triton/backends/nvidia/include")
    macros = [
        f"-DNULL_GPU_{name.upper()}={value}" for name, value in DEVICES[device]._asdict().items() if name != "name"
    ]
    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", *(f"-I{site / folder}" for folder in folders), *macros]
    command += [
        f'-DNULL_GPU_NAME="{DEVICES[device].name}"',
        "-Wl,-soname,libcuda.so.1",
        str(_SOURCE),
        "-ldl",
        "-lpthread",
    ]
    key = hashlib.sha256(repr((command, _SOURCE.read_bytes())).encode()).hexdigest()[:16]
    library = user_cache_path("simplefsdp") / "null_gpu" / key / "libcuda.so.1"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder, library.name)
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"null GPU: {done.stderr or done.stdout}")
            made.rename(library)
    return library


def environment(device: str) -> dict[str, str]:
    """Return the environment of a process under the null GPU: this process's own, with the stub in front of CUDA.

    Raises:
        RuntimeError: see ``build_stub``.
    """
    library = build_stub(device)
    folders = [str(library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return os.environ | {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": ":".join(folders),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "SIMPLEFSDP_NULL_GPU": device,
        "TORCH_NCCL_RANKS_PER_ROOT": "100000",  # or NCCL would ask other ranks, which are not there, for numbers
        # Workers that compile kernels would be started before the stub knows what is logged.
        "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", "1"),
    }


def null_device() -> str | None:
    """Return the device whose null GPU this process runs under, or ``None``."""
    return os.environ.get("SIMPLEFSDP_NULL_GPU")
