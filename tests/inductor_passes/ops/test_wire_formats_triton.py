"""Kernels of the wire formats for GPUs, on a machine without one: their bits, and what is built for each GPU."""

from pathlib import Path

import pytest

from tests.interpreter import built, interpreted, resources

pytestmark = pytest.mark.subprocess

triton = pytest.importorskip("triton", reason="needs Triton")

_STACK_BYTES = {("int8-hadamard", 90, "encode"): 16} if triton.__version__.startswith("3.6.") else {}
"""Bytes of stack that a thread of a kernel uses, by format, capability and kernel: Triton 3.6 (torch 2.11) takes some
for one, and spills nothing. All others take none."""
_REGISTERS = {("int8-hadamard", 80, "encode_sum"): 160}
"""Registers that a thread of a kernel may use, where more than 128: three of its programs then run on a multiprocessor
in place of four."""


@pytest.mark.slow
def test_triton_interprets_them_with_the_bits_of_a_cpu() -> None:
    interpreted(Path(__file__).with_name("interpreted_kernels.py"), tests=5)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    "name", ["bf16", "fp8", "int8-hadamard", "int4", "int8-stochastic", "int4-hadamard-stochastic"]
)
def test_they_are_built_for_every_gpu_without_spilling_and_with_wide_loads(
    name: str, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton.language as tl

    from inductor_passes.ops import wire_formats_triton as kernels
    from inductor_passes.ops.wire_formats import FORMATS, form_of

    kind, rotates, stochastic = form_of(FORMATS[name])
    into = {"into": form_of(FORMATS["int8"]).kind, "into_rotates": not rotates, "stochastic": stochastic}
    divides = {"divides": True}
    of_values = {"values": tl.float32, "in_sixteens": True}
    placed = dict.fromkeys(["per", "outer", "inner"], "i32")
    summed = dict.fromkeys(["ranks", "stride"], "i32")
    apart = {"sent": "*i32", "out": "*i32", **summed, "apart": "i32", "apart_out": "i32"}
    asked = {
        "encode": (
            {"out": "*i32", **placed, "divisor": "fp32"},
            {**of_values, **divides, "dtype": tl.bfloat16, "stochastic": stochastic},
        ),
        "decode_sum": ({"sent": "*i32", **summed, "divisor": "fp32"}, {**of_values, **divides}),
        "encode_sum": (apart, {**into, "in_sixteens": True, "feeds_back": False}),
        "encode_sum with errors": (apart, {**into, "in_sixteens": True, "feeds_back": True}),
    }
    tables = {"begins", "addresses", "totals", "numels", "offsets", "offsets_out"}
    found = {
        what: built(  # as for large contiguous tensors, whose addresses and sizes are multiples of 16
            kernel := getattr(kernels, f"{what.split()[0]}_kernel"),
            capability,
            types | {name: ("i64",) * 16 for name in kernel.arg_names if name in tables},
            aligned=(),
            options={"num_warps": 4, "enable_fp_fusion": False},
            **constants,
            kind=kind,
            rotates=rotates,
            blocks=kernels.BLOCKS // (2 if "errors" in what else 1),
        )
        for what, (types, constants) in asked.items()
    }
    for what, kernel in found.items():
        used = resources(kernel, tmp_path)
        stack = _STACK_BYTES.get((name, capability, what), 0)
        assert (used["STACK"], used["LOCAL"]) == (stack, 0), what
        assert used["REG"] <= _REGISTERS.get((name, capability, what), 128), what
    assert "ld.global.v4.b32" in found["encode"].asm["ptx"]
    assert "st.global.v4.b32" in found["decode_sum"].asm["ptx"]
