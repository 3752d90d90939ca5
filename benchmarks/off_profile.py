"""Plans made for a profile that is wrong: ``auto@compute=0.85`` plans for compute that takes 0.85 of the time it takes.

Factors are those of ``Deviation``, of the true profile: ``compute``, ``bandwidth`` and ``latency``.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from inductor_passes.scheduling.deviations import Deviation
from simplefsdp.hardware.profile import Curve, HardwareProfile, Link, Network
from simplefsdp.rehearsal.systems import Parallelism, System


def planned_off_profile(name: str, systems: Mapping[str, System]) -> System:
    """Return ``systems[name]``; of a name with an ``@``, the system of the name before it, for a profile that is wrong.

    Raises:
        ValueError: behind the ``@`` is no factor of ``Deviation``.
    """
    plan, _, factor = name.partition("@")
    system = systems[plan]
    if not factor:
        return system
    field, _, value = factor.partition("=")
    if field not in Deviation._fields:
        raise ValueError(
            f"{name}: expected {plan}@ and one of {', '.join(Deviation._fields)}, as in {plan}@compute=0.9"
        )
    deviation = Deviation(**{field: float(value)})

    def wrap(model: nn.Module, parallelism: Parallelism) -> Callable[[Tensor], Any]:
        assert parallelism.profile is not None
        return system.wrap(model, parallelism._replace(profile=off_profile(parallelism.profile, deviation)))

    return system._replace(wrap=wrap)


def off_profile(profile: HardwareProfile, deviation: Deviation) -> HardwareProfile:
    """Return a profile that says what a device and a network take that deviate so from ``profile``."""

    def curve(of: Curve) -> Curve:
        return tuple((size, rate / deviation.compute) for size, rate in of)

    return replace(
        profile,
        name=f"{profile.name}, {deviation}",
        matmul={dtype: curve(of) for dtype, of in profile.matmul.items()},
        attention={dtype: curve(of) for dtype, of in profile.attention.items()},
        memory=curve(profile.memory),
        launch_s=profile.launch_s * deviation.compute,
        network=_network(profile.network, deviation),
    )


def _network(network: Network, deviation: Deviation) -> Network:
    def link(of: Link) -> Link:
        bandwidth = of.bandwidth_bytes_per_s * deviation.bandwidth
        return Link(bandwidth, of.alpha_s * deviation.latency, of.step_s * deviation.latency)

    return replace(
        network,
        inside={kind: link(of) for kind, of in network.inside.items()},
        between={kind: link(of) for kind, of in network.between.items()},
        member_s=network.member_s and network.member_s * deviation.latency,
    )
