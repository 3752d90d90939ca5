"""GPUs that are built in: what others have measured of them, as data, with the sources.

A profile of a cluster that one has not is as good as its numbers: ``simplefsdp calibrate`` on the device itself is
better. Rates of matmuls are of square ones, by their number of operations, ``2 n^3``. Those of attention are of causal
attention, forward and backward together, with the operations of the whole square of scores counted, as
``inductor_passes.cost_model`` does: twice the usual number.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from simplefsdp.hardware.profile import NETWORKS, Curve, HardwareProfile, Network, load_profile, network
from simplefsdp.text.messages import unknown

_LAUNCH = """\
A kernel: 2 us, of a small addition back to back on B200 (NVIDIA/cccl#7391); the host is taken to be ahead."""


class Contention(NamedTuple):
    """The speed that kernels lose while a collective is under way; see ``HardwareProfile``."""

    source: str
    contention: float
    matmul_contention: Curve = ()


_MEAN = Contention(
    "Contention: compute takes 18.9 % longer beside collectives, the mean over A100, H100 and two AMD GPUs\n"
    "(arXiv 2507.03114).",
    1 - 1 / 1.189,
)

_HOPPER_CONTENTION = Contention(
    "Contention: python -m benchmarks.matmul_contention on one H100 (docs/benchmarks.md), beside 16 multiprocessors\n"
    "that are held in clusters of four; attention and a copy in memory take 1.06 to 1.10 times as long there.",
    0.08,
    tuple(
        (rows * columns, 1 - 1 / slower)
        for rows, columns, slower in (
            (2048, 1024, 1.79),
            (2048, 4096, 1.87),
            (4096, 4096, 1.40),
            (2048, 14336, 1.22),
            (8192, 4096, 1.19),
            (14336, 4096, 1.16),
            (8192, 14336, 1.134),
        )
    ),
)
"""The contention on 132 multiprocessors. Matmuls: rows and columns of the product, and how much longer they take."""

_A100 = """\
A100 SXM 80 GB. Matmul: fp16, cuBLASLt, sustained (Azure/AI-benchmarking-guide, ND A100 v4), bf16 the same to 3 %; fp32
without TF32: zzc0721/torch-performance-test-data, the largest of n = 1024 to 10240. Attention: FlashAttention-2, head
dim 128, on the PCIe card (NVIDIA/cudnn-frontend, benchmark/attention_training, llama3.1/a100). Memory: BabelStream copy
(the same guide)."""

_H100 = """\
H100 SXM 80 GB. Matmul: torch 2.7, fp32 without TF32 (zzc0721/torch-performance-test-data#79). Attention: PyTorch's
FlashAttention-2 on H200, the same chip, head dim 128 (NVIDIA/cudnn-frontend, benchmark_results.csv). Memory:
BabelStream copy (Azure/AI-benchmarking-guide, ND H100 v5)."""

_H200 = """\
H200 SXM 141 GB. Matmul: as H100, but at most what it sustains at its power limit, 755 TFLOP/s
(stas00/ml-engineering). Attention: PyTorch's FlashAttention-2, head dim 128 (NVIDIA/cudnn-frontend,
benchmark_results.csv). Memory: BabelStream copy (Azure/AI-benchmarking-guide, ND H200 v5)."""

_B200 = """\
B200 SXM. Matmul: torch, bf16 (pytorch/ao#2427); fp32 without TF32: zzc0721/torch-performance-test-data, the largest of
n = 1024 to 10240. Attention: PyTorch 2.9 with cuDNN, head dim 128, 128 heads (NVIDIA/cudnn-frontend,
benchmark/sdpa_benchmark_training). Memory: addition of 2^28 elements (NVIDIA/cccl#7391)."""


class Device(NamedTuple):
    source: str
    """Source of the numbers."""
    matmul: Mapping[str, Curve]
    attention: Mapping[str, Curve]
    memory_bytes_per_s: float
    device_bytes: int
    """Bytes of its memory, which torch says to be a fraction of a GiB more."""
    contention: Contention = _MEAN


def _matmul(rates: Mapping[int, float]) -> Curve:
    """Return the curve of square matmuls, from TFLOP/s by size."""
    return tuple((2.0 * n**3, 1e12 * rate) for n, rate in rates.items())


def _attention(heads: int, rates: Mapping[int, tuple[float, float]]) -> Curve:
    """Return the curve of attention, from forward and backward TFLOP/s by sequence length.

    Half of the operations are counted, over all ``heads`` of 128. Backward has five matmuls where forward has two.
    """
    return tuple(
        (4.0 * heads * 128 * seq**2, 2e12 * 3.5 / (1 / forward + 2.5 / backward))
        for seq, (forward, backward) in rates.items()
    )


_HOPPER = {4096: (314.0, 249.0), 8192: (325.0, 277.0), 16384: (325.0, 305.0)}

DEVICES: Mapping[str, Device] = {
    "a100": Device(
        _A100,
        {
            "bfloat16": _matmul({1024: 119.4, 2048: 221.8, 4096: 228.0, 8192: 253.7, 16384: 256.5}),
            "float32": _matmul({8192: 19.2}),
        },
        {"bfloat16": _attention(128, {2048: (180, 141), 4096: (204, 168), 8192: (217, 173), 16384: (203, 175)})},
        1.61e12,
        79 * 2**30,
    ),
    "h100": Device(
        _H100,
        {
            "bfloat16": _matmul({1024: 176.6, 2048: 676.6, 4096: 788.7, 8192: 797.5}),
            "float32": _matmul({1024: 37.4, 2048: 49.6, 4096: 51.9, 8192: 51.8}),
        },
        {"bfloat16": _attention(128, _HOPPER)},
        2.90e12,
        79 * 2**30,
        _HOPPER_CONTENTION,
    ),
    "h200": Device(
        _H200,
        {
            "bfloat16": _matmul({1024: 176.6, 2048: 676.6, 4096: 755.0}),
            "float32": _matmul({1024: 37.4, 2048: 49.6, 4096: 51.3}),
        },
        {"bfloat16": _attention(128, _HOPPER)},
        4.01e12,
        139 * 2**30,
        _HOPPER_CONTENTION,
    ),
    "b200": Device(
        _B200,
        {
            "bfloat16": _matmul({1024: 423, 2048: 1130, 4096: 1410, 8192: 1420}),
            "float32": _matmul({8192: 66.2}),
        },
        {
            "bfloat16": _attention(
                128, {1024: (255, 309), 2048: (479, 371), 4096: (856, 701), 8192: (1171, 943), 16384: (1332, 1075)}
            )
        },
        6.71e12,
        178 * 2**30,
    ),
}


def is_built_in(name: str) -> bool:
    """Return whether ``name`` means ``"device/network"`` and not a path."""
    return name.count("/") == 1 and not name.endswith(".json") and not name.startswith((".", "/", "~"))


def contention_for(gpu: str) -> Contention:
    """Return the contention of a GPU.

    Args:
        gpu: as ``torch.cuda.get_device_name`` calls it; one that is not built in has the mean of four GPUs.
    """
    found = re.search(r"\bH[12]00\b", gpu)
    return DEVICES[found[0].lower()].contention if found else _MEAN


def name_for(gpu: str, ranks: int) -> str | None:
    """Return the name of the built-in profile for nodes of eight of this GPU with InfiniBand, or ``None``.

    Args:
        gpu: as ``torch.cuda.get_device_name`` calls it.
        ranks: the network is the smallest one with as many ranks.
    """
    found, fits = re.search(r"\bH[12]00\b", gpu), smallest_network(ranks)
    return f"{found[0].lower()}/{fits}" if found and fits else None


def smallest_network(ranks: int) -> str | None:
    """Return the name of the smallest built-in InfiniBand network of eight GPUs a node; ``None``: none is as large."""
    return next((net.name for net in NETWORKS.values() if net.name.startswith("h100-") and net.ranks >= ranks), None)


def device_profile(text: str, of_network: Network) -> HardwareProfile:
    """Return the profile of a JSON file, or the built-in one of a device of ``DEVICES``, with another network.

    Raises:
        ValueError: there is no such device, or no such profile in the file.
    """
    if text.endswith(".json"):
        return replace(load_profile(text), network=of_network)
    profile = built_in(f"{text}/{smallest_network(1)}")
    return replace(profile, name=f"{text}/{of_network.name}", network=of_network)


def built_in(name: str) -> HardwareProfile:
    """Return a built-in profile by name, such as ``"h200/h100-8-nodes"``: a GPU of ``DEVICES`` on one of ``NETWORKS``.

    Raises:
        ValueError: there is no such device or network, with the nearest name; or there is none in ``name``.
    """
    device, _, of_network = name.partition("/")
    if device not in DEVICES:
        raise ValueError(f"profile {name!r}: " + unknown("device", device, DEVICES))
    if not of_network:
        raise ValueError(f"profile {name!r}: no network; the name of one follows, as in '{device}/h100-8-nodes'")
    if of_network not in NETWORKS:
        raise ValueError(f"profile {name!r}: " + unknown("network", of_network, NETWORKS))
    found = DEVICES[device]
    return HardwareProfile(
        name,
        f"{found.source}\n{_LAUNCH} {found.contention.source}",
        matmul=found.matmul,
        attention=found.attention,
        memory=((1e9, found.memory_bytes_per_s),),
        launch_s=2e-6,
        collective_launch_s=0.0,
        contention=found.contention.contention,
        network=network(of_network),
        matmul_contention=found.contention.matmul_contention,
        device_bytes=found.device_bytes,
    )
