"""Profiles of a cluster: its devices and its network, as data.

A collective over N ranks on k nodes, m of them on the fullest, is taken for a ring, as in NCCL's own model
(``src/graph/tuning.cc``)::

    seconds = alpha + max(received / bandwidth inside a node, received / (m * bandwidth between nodes))
    alpha   = alpha_s + step_s inside * (N - k) + step_s between * (k - 1)
    received = bytes * (N - 1) / N

``bytes`` are those of the whole tensor: the output of an all-gather, the input of a reduce-scatter. An all-reduce goes
round twice: twice the steps and bytes. Between nodes each rank brings a network card, m rings use them side by side; in
an all-to-all each card carries what its own rank receives from other nodes, ``bytes * (N - m) / N``.
"""

import functools
import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from inductor_passes.runtime.whole_files import write_whole
from simplefsdp.text.json_fields import parse_fields, parse_optional, parse_plain, parse_values, read_json
from simplefsdp.text.messages import unknown

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
"""Kinds of collectives. ``"broadcast"`` stands for every collective from or to one rank, and for barriers."""

_ROUNDS = {"all_reduce": 2}


@dataclass(frozen=True)
class Link:
    """Speed of one level of a network, for one kind of collective."""

    bandwidth_bytes_per_s: float
    """Bytes per second that one rank receives while it sends as much."""
    alpha_s: float
    """Seconds of any collective, however small."""
    step_s: float = 0.0
    """Seconds for each further step of the ring."""


@dataclass(frozen=True)
class Network:
    """A network of ranks on nodes: ranks 0 to ``ranks_per_node - 1`` are on the first node, and so on.

    Raises:
        ValueError: a number that is not positive (``step_s`` may be 0), or a kind of collective that is missing.
    """

    name: str
    source: str
    """Where the numbers are from."""
    ranks_per_node: int
    nodes: int
    inside: Mapping[str, Link]
    """Links between ranks of one node, by kind of collective (``KINDS``)."""
    between: Mapping[str, Link]
    """Links between nodes, for each rank: its own network card, or its share of the node's card."""
    member_s: float | None = None
    """Seconds that each member of a group of collectives (NCCL's ``ncclGroupStart`` to ``ncclGroupEnd``) takes beyond
    the first, besides its bytes; ``None``: not known, and no bucket is grouped."""

    def __post_init__(self) -> None:
        for name in ("ranks_per_node", "nodes"):
            _positive(f"network {self.name}: {name}", getattr(self, name))
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"network {self.name}: {name}: expected a whole number, found {getattr(self, name)}")
        for level, links in (("inside", self.inside), ("between", self.between)):
            for kind in links:
                if kind not in KINDS:
                    raise ValueError(f"network {self.name}: {level}: unknown kind of collective {kind!r}")
            for kind in KINDS:
                if kind not in links:
                    raise ValueError(f"network {self.name}: {level} has no {kind!r}")
                where = f"network {self.name}: {level}[{kind!r}]"
                _positive(f"{where}.bandwidth_bytes_per_s", links[kind].bandwidth_bytes_per_s)
                _positive(f"{where}.alpha_s", links[kind].alpha_s)
                if links[kind].step_s != 0:
                    _positive(f"{where}.step_s", links[kind].step_s)
        if self.member_s not in (None, 0):
            _positive(f"network {self.name}: member_s", self.member_s)

    @property
    def ranks(self) -> int:
        return self.ranks_per_node * self.nodes

    def whole_node(self, ranks: int) -> int:
        """Return the ranks of each node if ``ranks`` ranks fill nodes; all of them if one node would be left in part.

        It is what ``simple_fsdp(ranks_per_node=...)`` takes: nodes in part mean reductions in one step.
        """
        return ranks if ranks % self.ranks_per_node else self.ranks_per_node

    def seconds(self, kind: str, ranks: Sequence[int], nbytes: int) -> float:
        """Return how long a collective over ``ranks`` (of the whole world) takes; ``nbytes`` of the whole tensor.

        The whole tensor is the output of an all-gather, the input of a reduce-scatter.
        """
        return self.alpha_s(kind, ranks) + self.transfer_s(kind, ranks, nbytes)

    def alpha_s(self, kind: str, ranks: Sequence[int]) -> float:
        """Return the part of ``seconds`` that does not depend on the number of bytes."""
        inside, between, n, k, _ = self._levels(kind, ranks)
        steps = (n - k) * inside.step_s + (k - 1) * between.step_s
        return (between if k > 1 else inside).alpha_s + _ROUNDS.get(kind, 1) * steps

    def transfer_s(self, kind: str, ranks: Sequence[int], nbytes: int) -> float:
        """Return the part of ``seconds`` that grows with the number of bytes."""
        inside, between, n, k, m = self._levels(kind, ranks)
        within = (n - 1) / n if m > 1 else 0.0
        across = 0.0 if k == 1 else (n - m) / n if kind == "all_to_all" else (n - 1) / n / m
        seconds_per_byte = max(within / inside.bandwidth_bytes_per_s, across / between.bandwidth_bytes_per_s)
        return _ROUNDS.get(kind, 1) * nbytes * seconds_per_byte

    def _levels(self, kind: str, ranks: Sequence[int]) -> tuple[Link, Link, int, int, int]:
        nodes, most = _nodes(tuple(ranks), self.ranks_per_node)
        return self.inside[kind], self.between[kind], len(ranks), nodes, most


@functools.cache
def _nodes(ranks: tuple[int, ...], ranks_per_node: int) -> tuple[int, int]:
    """Return the number of nodes that these ranks are on, and how many of the ranks are on one of them at most."""
    on_node = Counter(rank // ranks_per_node for rank in ranks)
    return len(on_node), max(on_node.values())


def flat(
    name: str,
    ranks: int,
    *,
    alpha_s: float,
    bandwidth_bytes_per_s: float,
    member_s: float | None = None,
    source: str = "as given",
) -> Network:
    """Return a network on which all ranks are equal and alpha does not grow."""
    links = _each(Link(bandwidth_bytes_per_s, alpha_s))
    return Network(name, source, ranks_per_node=1, nodes=ranks, inside=links, between=links, member_s=member_s)


def _each(link: Link, **others: Link) -> Mapping[str, Link]:
    return {kind: others.get(kind, link) for kind in KINDS}


def _positive(what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{what}: expected a positive number, found {value!r}")


def network(name: str) -> Network:
    """Return a built-in network (see ``NETWORKS``), or the network in a JSON file that ``save`` wrote.

    Raises:
        ValueError: there is no such network, with the nearest names; or a field of the file is not valid.
    """
    if name in NETWORKS:
        return NETWORKS[name]
    if name.endswith(".json"):
        return load(name)
    raise ValueError(unknown("network", name, NETWORKS) + ", or a .json file")


def save(thing: "Network | HardwareProfile", path: str | Path) -> None:
    """Write a network or profile as JSON. A reader of ``path`` meanwhile finds the old file, or all of the new one."""
    write_whole(Path(path), json.dumps(asdict(thing), indent=2) + "\n")


def load(path: str | Path) -> Network:
    """Return the network in a JSON file that ``save`` wrote.

    Raises:
        ValueError: a field is missing, unknown or wrong; names the path and the field.
    """
    return read_json(path, "network", _network)


def _network(found: Any, where: str = "network") -> Network:
    links = parse_values(lambda link, at: parse_fields(Link, link, at, {}))
    parsers = {"inside": links, "between": links, "member_s": parse_optional}
    return parse_fields(Network, found, where, parsers)


def _nccl(name: str, nodes: int, source: str, inside: float, reducing: float, between: float, step: float) -> Network:
    """Return a network of nodes with 8 GPUs under NCCL: bandwidths in GB/s, ``step`` between nodes in microseconds."""
    ring = Link(inside * 1e9, 8.4e-6, 3.4e-6)
    return Network(
        name,
        source,
        ranks_per_node=8,
        nodes=nodes,
        inside=_each(ring, all_reduce=Link(reducing * 1e9, 8.4e-6, 3.4e-6)),
        between=_each(Link(between * 1e9, 8.4e-6, step * 1e-6)),
        member_s=5e-6,
    )


_H100 = """\
Inside a node: NCCL 2.2x all-gather and reduce-scatter 350 to 362 GB/s on 8 H100 (NVIDIA/nccl#1281, #1047), all-reduce
480 GB/s with NVLS (NVIDIA/nccl-tests#212; H200 the same, Azure/AI-benchmarking-guide). Between: 46 to 48 GB/s of a 400
Gbit/s card (NVIDIA/nccl-tests#290); reduce-scatter of many nodes reached 345 to 260 GB/s a rank (NVIDIA/nccl#1229),
where 8 cards here give 360. Latency: NCCL's constants for a ring with the simple protocol, 8.4 us, 3.4 us a step over
NVLink and 14 us a step over the network (src/graph/tuning.cc, 2.28); single runs on 32 nodes showed more
(NVIDIA/nccl#1218). A further collective of a group: 5 us, assumed, not measured."""

_CLOUD = """\
8 A100 a node, 100 Gbit/s a node: 10 GB/s of it on 2 nodes (NVIDIA/nccl#235; less on more nodes), shared by 8 ranks.
Inside 230 GB/s (Azure/AI-benchmarking-guide, ND A100 v4 all-reduce). A step over the network 35 us, from 8-byte
all-reduces of 2 to 8 nodes of that kind (630 us on 8). A further collective of a group: 5 us, assumed, not measured."""

_SCALED = "made up for runs on CPU, where a step takes about as much longer as this network is slower"

NETWORKS: Mapping[str, Network] = {
    network.name: network
    for network in (
        _nccl("h100-1-node", 1, _H100, 360, 480, 45, 14),
        _nccl("h100-8-nodes", 8, _H100, 360, 480, 45, 14),
        _nccl("h100-16-nodes", 16, _H100, 360, 480, 45, 14),
        _nccl("h100-64-nodes", 64, _H100, 360, 480, 45, 14),
        _nccl("cloud-100g", 16, _CLOUD, 230, 230, 1.25, 35),
        flat("cpu-latency", 64, alpha_s=200e-6, bandwidth_bytes_per_s=2e9, member_s=20e-6, source=_SCALED),
        flat("cpu-bandwidth", 8, alpha_s=50e-6, bandwidth_bytes_per_s=0.5e9, member_s=20e-6, source=_SCALED),
        flat("cpu-compute", 8, alpha_s=50e-6, bandwidth_bytes_per_s=4e9, member_s=20e-6, source=_SCALED),
        Network(
            "cpu-hybrid",
            _SCALED,
            ranks_per_node=4,
            nodes=4,
            inside=_each(Link(2e9, 50e-6)),
            between=_each(Link(0.25e9, 100e-6, 20e-6)),
            member_s=20e-6,
        ),
    )
}
"""Built-in networks by name. ``h100-*`` also describe H200 nodes, whose NVLink is the same."""


Curve = tuple[tuple[float, float], ...]
"""Points ``(size, rate)`` by size. Between points the rate changes with the logarithm of the size; beyond them it is
constant."""


@dataclass(frozen=True)
class HardwareProfile:
    """A device's measured rates, and the network between such devices.

    Raises:
        ValueError: a number that is not positive, a curve that is empty or not by size, or a dtype that torch has not.
    """

    name: str
    source: str
    """Where the numbers are from."""
    matmul: Mapping[str, Curve]
    """Operations per second of a matmul by the number of its operations: a curve for each dtype (``"bfloat16"``)."""
    attention: Mapping[str, Curve]
    """Operations per second of scaled dot product attention: a curve for each dtype."""
    memory: Curve
    """Bytes per second of a kernel by the number of bytes that it reads and writes."""
    launch_s: float
    """Seconds of launching a kernel, whatever it does."""
    collective_launch_s: float
    """Seconds of compute that issuing and awaiting a collective takes."""
    contention: float
    """The part of its speed that a kernel loses while a collective is under way: 0 where compute has the device for
    itself."""
    network: Network
    collective_s_per_byte: float = 0.0
    """Compute time that is lost, besides, for each byte of a collective: where it takes memory's time, as on CPU."""
    parameter_s: float = 0.0
    """Seconds of a step for each parameter, outside of its graphs: guards, gradients, the optimizer's calls. 0 where
    these run while the device computes."""
    matmul_contention: Curve = ()
    """The part that a matmul loses, by the number of elements of its product; empty: as other kernels. A matmul whose
    blocks fill a GPU once or twice needs one or two rounds more while a collective holds some multiprocessors."""
    device_bytes: int | None = None
    """Bytes of a GPU's memory; ``None``: the device is a CPU."""

    def __post_init__(self) -> None:
        for name in ("matmul", "attention"):
            curves = getattr(self, name)
            if not isinstance(curves, Mapping) or not curves:
                raise ValueError(
                    f"profile {self.name}: {name}: expected a curve for each of some dtypes, found {curves!r}"
                )
            for dtype, curve in curves.items():
                if not isinstance(getattr(torch, dtype, None), torch.dtype):
                    raise ValueError(f"profile {self.name}: {name}: no dtype of torch's: {dtype!r}")
                _check_curve(f"profile {self.name}: {name}[{dtype!r}]", curve)
        _check_curve(f"profile {self.name}: memory", self.memory)
        _positive(f"profile {self.name}: launch_s", self.launch_s)
        for name in ("collective_launch_s", "contention", "collective_s_per_byte", "parameter_s"):
            if getattr(self, name) != 0:
                _positive(f"profile {self.name}: {name}", getattr(self, name))
        if self.device_bytes is not None:
            _positive(f"profile {self.name}: device_bytes", self.device_bytes)
        if self.matmul_contention:
            _check_curve(f"profile {self.name}: matmul_contention", self.matmul_contention)
        parts = {"contention": [self.contention], "matmul_contention": [part for _, part in self.matmul_contention]}
        for name, found in parts.items():
            if (largest := max(found, default=0.0)) >= 1:
                raise ValueError(f"profile {self.name}: {name}: expected a part, less than 1, found {largest}")

    def compute_s(self, kind: str, dtype: torch.dtype, flops: float) -> float:
        """Return the seconds of one ``"matmul"`` or ``"attention"`` with so many operations, without its launch.

        A dtype without a curve counts as float32, or as the first dtype with a curve if float32 has none. float8 has
        twice the rate of bfloat16, as by the data sheets of GPUs that have it.
        """
        curves = getattr(self, kind)
        name = str(dtype).removeprefix("torch.")
        if name.startswith("float8") and name not in curves and "bfloat16" in curves:
            return self.compute_s(kind, torch.bfloat16, flops) / 2
        curve = curves.get(name) or curves.get("float32") or next(iter(curves.values()))
        return flops / _rate(curve, flops)

    def memory_s(self, nbytes: float) -> float:
        """Return the seconds of a kernel that reads and writes so many bytes, without its launch."""
        return nbytes / _rate(self.memory, nbytes)

    def contention_of(self, kind: str = "", elements: float = 0) -> float:
        """Return the part of its speed that a kernel loses while a collective is under way.

        Args:
            kind: ``"matmul"``, ``"attention"``, or an empty string for another kernel.
            elements: of the product, if it is a matmul.
        """
        if kind == "matmul" and self.matmul_contention:
            return _rate(self.matmul_contention, elements)
        return self.contention

    @property
    def member_s(self) -> float | None:
        """See ``Network.member_s``."""
        return self.network.member_s

    def collective_s(self, kind: str, ranks: Sequence[int], nbytes: int) -> float:
        """See ``Network.seconds``."""
        return self.network.seconds(kind, ranks, nbytes)


def device_memory_bytes(device: torch.device) -> int | None:
    """Return the bytes of a GPU's memory; ``None`` for other devices, whose memory a process shares."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def load_profile(path: str | Path) -> HardwareProfile:
    """Return the profile in a file that ``save`` wrote, edited or not.

    Raises:
        ValueError: names the path and the field that is missing, unknown or wrong.
    """
    return read_json(path, "profile", _profile)


def _profile(found: Any) -> HardwareProfile:
    def curve(points: Any, where: str) -> Curve:
        if not isinstance(points, Sequence) or not all(isinstance(p, Sequence) and len(p) == 2 for p in points):
            raise ValueError(f"{where}: expected a list of [size, rate], found {points!r}")
        return tuple((parse_plain(size, f"{where}.size"), parse_plain(rate, f"{where}.rate")) for size, rate in points)

    curves = parse_values(curve)
    parsers = {
        "matmul": curves,
        "attention": curves,
        "memory": curve,
        "matmul_contention": curve,
        "device_bytes": parse_optional,
        "network": _network,
    }
    return parse_fields(HardwareProfile, found, "profile", parsers)


def _rate(curve: Curve, size: float) -> float:
    sizes = [point[0] for point in curve]
    above = bisect_left(sizes, size)
    if above == 0 or above == len(curve):
        return curve[min(above, len(curve) - 1)][1]
    (low, slow), (high, fast) = curve[above - 1], curve[above]
    return slow + (fast - slow) * math.log(size / low) / math.log(high / low)


def _check_curve(what: str, curve: Curve) -> None:
    sizes = [size for size, _ in curve]
    if not curve or sizes != sorted(set(sizes)):
        raise ValueError(f"{what}: expected (size, rate) pairs by size, found {curve!r}")
    for size, rate in curve:
        _positive(f"{what}: size", size)
        _positive(f"{what}: rate", rate)
