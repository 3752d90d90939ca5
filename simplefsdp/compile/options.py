"""Options of ``torch.compile(..., backend="simplefsdp", options={...})``: checked, and resolved to a request."""

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._inductor import list_mode_options

from inductor_passes.torch_compat.inductor import NO_OTHER_REORDERING, inductor_options
from simplefsdp.compile.plan_step import SEARCHED_PLANS, SearchRequest
from simplefsdp.hardware.cache import cached_profile_path, measure_on_first_use
from simplefsdp.hardware.catalog import built_in, is_built_in, name_for
from simplefsdp.hardware.profile import HardwareProfile, device_memory_bytes, load_profile
from simplefsdp.plan.bucket_plan import BucketPlan
from simplefsdp.plan.grouping import BLOCK, GroupingRequest
from simplefsdp.text.messages import unknown
from simplefsdp.text.units import parse_bytes

log = logging.getLogger("simplefsdp")

PASS_SLOTS = (
    "joint_custom_post_pass",
    "custom_partitioner_fn",
    "post_grad_custom_post_pass",
    "_post_fusion_custom_pass",
)
"""Names in Inductor's configuration that hold the passes."""
_PLANS = ("auto", "greedy", "block", "none")
_WIRES = ("given", "auto")
_LOWERINGS = ("inductor", "aot_eager")
_PASSES = ("use_joint_graph_passes", "use_post_grad_passes")
"""Inductor options without which the passes in ``PASS_SLOTS`` are not called."""
_CALIBRATE = "`torchrun ... -m simplefsdp calibrate` with as many ranks"


@dataclass(frozen=True)
class Options:
    """Options of ``torch.compile(..., backend="simplefsdp", options={...})``."""

    plan: "str | Path | GroupingRequest | BucketPlan" = "auto"
    """``"block"``: one bucket per repeated block, one for what precedes the first and one for what follows the last,
    gathered one bucket ahead and awaited one bucket later. ``"none"``: no buckets, nothing moved: TorchInductor as it
    is. ``"auto"``: the shortest predicted step, and ``"greedy"``: the paper's auto-wrapping, both with ``profile`` or
    with what ``simplefsdp calibrate`` measured here (on CPUs of one machine, under torchrun, it runs by itself once) or
    what is built in for H100s and H200s; without any ``"auto"`` is ``"block"``. Or ``manual_plan([...])``, a
    ``BucketPlan``, or the path of one's JSON, which ends in ``.json``."""
    memory_budget: int | str | None = None
    """Bytes, or as ``"60GiB"``, for a step's peak: parameters, gradients, the optimizer's state, and what the graphs
    hold. The state is that of optimizers that this library has made or changed before the first forward, and of others
    two moments in float32. The peak is predicted to stay 3 % below. ``None``: a GPU's memory less 8 %, elsewhere no
    limit."""
    profile: HardwareProfile | str | Path | None = None
    """A profile of the device and the network, the path of its JSON, or the name of a built-in one
    (``"h200/h100-8-nodes"``). With a profile, the prediction for a plan is logged."""
    report_dir: str | None = None
    """Folder for the plan, the prediction and the graphs before and after each pass, as text, written by rank 0: while
    compiling, or, where the compile cache has the graph, when it first runs. ``None``: what the environment variable
    ``SIMPLEFSDP_REPORT_DIR`` names, if it is set."""
    lower_with: str = "inductor"
    """``"aot_eager"``: no decompositions and no fusion, the same collectives; for numerics work."""
    cast_in_matmuls: bool = True
    """Let a GPU's matmuls make gradients in the dtype in which they are reduced, where their buckets are grouped and no
    peak of memory grows: without a copy, and without the rounding to the weight's dtype that FSDP2 has. Not with
    ``lower_with="aot_eager"``."""
    cast_before_gather: bool = True
    """Gather a weight in the dtype in which it is read, as under autocast or by linear layers in float8, if that has
    fewer bytes: the cast, which gives the same bits, is taken before. Not with ``plan="none"``."""
    compile_once: bool = True
    """Trace and compile compute that repeats, as that of equal blocks does, once, so that a first step grows less with
    depth. Not with ``plan="none"``, and not where TorchInductor generates C++ around its kernels (``cpp_wrapper``)."""
    wire: str = "given"
    """``"given"``: what has a wire format (``simple_fsdp(wire=...)``) travels in it. ``"auto"``, with ``plan="auto"``
    or a plan that was saved with it: only what compute cannot hide otherwise, in the mildest formats, and the fewest
    bytes in them, with which the predicted step is about as short as it can be; the rest travels as it is."""
    inductor: Mapping[str, Any] = field(default_factory=dict)
    """Inductor configuration for this compilation only."""


def parse_options(options: Mapping[str, Any] | None, mode: str | None = None) -> Options:
    """Check ``options`` and fill in defaults.

    Args:
        options: of ``torch.compile``.
        mode: of ``torch.compile``, which takes one of both: a name for some of Inductor's options.

    Raises:
        ValueError: an unknown option, plan, lowering or Inductor option (with the nearest valid one), or a mode or an
            option that asks for CUDA graphs or against passes.
        TypeError: an option's value is of another type.
    """
    given = dict(options or {})
    if mode is not None:
        given["inductor"] = _options_of_mode(mode)
    valid = [f.name for f in fields(Options)]
    for name in given:
        if name not in valid:
            raise ValueError(unknown("option", name, valid))
    given.setdefault("report_dir", os.environ.get("SIMPLEFSDP_REPORT_DIR") or None)
    parsed = Options(**given)
    _check_plan(parsed.plan)
    _check_search(parsed)
    if parsed.lower_with not in _LOWERINGS:
        raise ValueError("option 'lower_with': " + unknown("lowering", parsed.lower_with, _LOWERINGS))
    if parsed.report_dir is not None and not isinstance(parsed.report_dir, str | Path):
        raise TypeError(f"option 'report_dir': expected a path, found {parsed.report_dir!r}")
    if parsed.wire not in _WIRES:
        raise ValueError("option 'wire': " + unknown("choice", parsed.wire, _WIRES))
    if parsed.wire == "auto" and parsed.plan in ("greedy", "block", "none"):
        raise ValueError(f"option 'wire'='auto': needs plan='auto' or a saved plan, found plan={parsed.plan!r}")
    for name in ("cast_in_matmuls", "cast_before_gather", "compile_once"):
        if not isinstance(value := getattr(parsed, name), bool):
            raise TypeError(f"option {name!r}: expected True or False, found {value!r}")
    if not isinstance(parsed.inductor, Mapping):
        raise TypeError(f"option 'inductor': expected a dict of Inductor options, found {parsed.inductor!r}")
    for name in parsed.inductor:
        if name in PASS_SLOTS:
            raise ValueError(f"option 'inductor': {name!r} is used by simplefsdp itself")
        if name in NO_OTHER_REORDERING and parsed.plan != "none":
            raise ValueError(f"option 'inductor': {name!r} would move what the plan has ordered; plan='none' allows it")
        if name not in inductor_options():
            raise ValueError("option 'inductor': " + unknown("Inductor option", name, inductor_options()))
    if refused := _refused(parsed.inductor):
        raise ValueError(f"option 'inductor': {refused}")
    return parsed


def _options_of_mode(mode: str) -> dict[str, Any]:
    modes: dict[str, dict[str, Any]] = list_mode_options()
    valid = [name for name, of_mode in modes.items() if not _refused(of_mode)]
    if mode not in modes:
        raise ValueError(unknown("mode", mode, valid))
    if refused := _refused(modes[mode]):
        raise ValueError(f"mode={mode!r}: {refused} (valid: {', '.join(map(repr, valid))})")
    return modes[mode]


def _refused(inductor: Mapping[str, Any]) -> str | None:
    """Return why a configuration of Inductor's cannot be; ``None``: it can be."""
    if inductor.get("triton.cudagraphs"):
        return "'triton.cudagraphs': that a step in CUDA graphs keeps its plan has not been shown"
    off = next((name for name in _PASSES if not inductor.get(name, True)), None)
    return off and f"{off!r}: False would leave out the passes of simplefsdp"


def _check_plan(plan: Any) -> None:
    if isinstance(plan, Path | GroupingRequest | BucketPlan) or (isinstance(plan, str) and plan.endswith(".json")):
        return
    if not isinstance(plan, str):
        raise TypeError(f"option 'plan': expected a name, manual_plan([...]), a BucketPlan or a path, found {plan!r}")
    if plan not in _PLANS:
        raise ValueError(unknown("plan", plan, _PLANS))


def _check_search(options: Options) -> None:
    profile = options.profile
    if profile is not None and not isinstance(profile, HardwareProfile | str | Path):
        raise TypeError(f"option 'profile': expected a HardwareProfile, the path of one or a name, found {profile!r}")
    if options.memory_budget is not None:
        parse_bytes(options.memory_budget)
        if options.plan not in SEARCHED_PLANS:
            raise ValueError("option 'memory_budget': needs plan='auto' or 'greedy'")


def profile_of(options: Options, device: torch.device | None) -> HardwareProfile | None:
    """Return the profile that is given or, where a plan needs one, the cached or the built-in profile of this device.

    On the CPUs of one node, under torchrun, the device is measured on first use (``measure_on_first_use``).

    Args:
        device: the device of the sharded parameters; ``None``: there are none.
    """
    profile = options.profile
    if isinstance(profile, HardwareProfile):
        return profile
    if profile is None and options.plan in SEARCHED_PLANS and device is not None:
        ranks, reason = dist.get_world_size(), ""
        try:
            profile = cached_profile_path(device, ranks) or measure_on_first_use(device, ranks)
        except OSError as error:
            reason = f" (no profile can be cached: {error})"
        if profile is None and device.type == "cuda":
            profile = name_for(torch.cuda.get_device_name(device), ranks)
            if profile is not None:
                _say_what_is_built_in(profile)
        if profile is None and options.plan == "auto" and options.memory_budget is None and dist.get_rank() == 0:
            _say_what_auto_is(reason)
    if profile is None:
        return None
    if isinstance(profile, str) and (is_built_in(profile) or not profile.endswith(".json")):
        return built_in(profile)
    return load_profile(profile)


def requested(
    options: Options, profile: HardwareProfile | None, device: torch.device | None
) -> GroupingRequest | SearchRequest | BucketPlan | None:
    plan, budget = options.plan, options.memory_budget
    if isinstance(plan, GroupingRequest | BucketPlan):
        return plan
    if plan == "none":
        return None
    if plan in SEARCHED_PLANS:
        if device is None:
            return BLOCK  # of nothing
        if profile is not None:
            return SearchRequest(
                str(plan),
                profile,
                None if budget is None else parse_bytes(budget),
                device_memory_bytes(device),
                options.wire == "auto",
            )
    if plan == "greedy" or budget is not None:
        asked = "'plan'='greedy'" if plan == "greedy" else "'memory_budget'"
        raise ValueError(f"option {asked}: needs option 'profile', or {_CALIBRATE} before")
    if plan in _PLANS:
        return BLOCK
    return BucketPlan.load(plan)


@functools.cache
def _say_what_is_built_in(name: str) -> None:
    log.warning("profile %r is taken for this GPU and its network; %s measures them", name, _CALIBRATE)


@functools.cache
def _say_what_auto_is(reason: str) -> None:
    log.warning(
        "plan='auto' means 'block' without option 'profile', or %s before%s; options={'plan': 'block'} silences this",
        _CALIBRATE,
        reason,
    )
