"""Kernels of the wire formats for GPUs, on a machine without one: their bits, and what is built for each GPU."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.interpreter import interpreted

pytestmark = pytest.mark.subprocess

triton = pytest.importorskip("triton", reason="needs Triton")

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_STACK_BYTES = {("int8-hadamard", 90, "encode"): 16} if triton.__version__.startswith("3.6.") else {}
"""Bytes of stack that a thread of a kernel uses, by format, capability and kernel: Triton 3.6 (torch 2.11) takes some
for one, and spills nothing. All others take none."""


@pytest.mark.slow
def test_triton_interprets_them_with_the_bits_of_a_cpu() -> None:
    interpreted(Path(__file__).with_name("interpreted_kernels.py"), tests=4)


def built(kernel: Any, capability: int, types: dict[str, str], **constants: Any) -> Any:
    """Build a kernel as for large contiguous tensors, whose addresses and sizes are multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    place = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
    aligned = [name for name in types if types[name].startswith("*") or name in ("numel", "total")]
    source = ASTSource(
        kernel,
        types | dict.fromkeys(constants, "constexpr"),
        constexprs={place[name]: value for name, value in constants.items()},
        attrs={place[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", ["bf16", "fp8", "int8-hadamard", "int4", "int4-hadamard"])
def test_they_are_built_for_every_gpu_without_spilling_and_with_wide_loads(
    name: str, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton.language as tl

    from inductor_passes.ops import wire_formats_triton as kernels
    from inductor_passes.ops.wire_formats import FORMATS, form_of

    kind, rotates = form_of(FORMATS[name])
    into = {"into": form_of(FORMATS["int8"])[0], "into_rotates": not rotates}
    divides = {"divides": True}
    placed = dict.fromkeys(["total", "per", "outer", "inner"], "i32")
    summed = dict.fromkeys(["ranks", "stride"], "i32")
    asked = {
        "encode": ({"values": "*fp32", "out": "*i32", **placed, "divisor": "fp32"}, {**divides, "dtype": tl.bfloat16}),
        "decode_sum": ({"sent": "*i32", "out": "*fp32", **summed, "divisor": "fp32"}, divides),
        "encode_sum": ({"sent": "*i32", "out": "*i32", **summed, "apart": "i32", "apart_out": "i32"}, into),
    }
    found = {
        what: built(
            getattr(kernels, f"{what}_kernel"),
            capability,
            {**types, "numel": "i32"},
            **constants,
            kind=kind,
            rotates=rotates,
            blocks=kernels.BLOCKS,
        )
        for what, (types, constants) in asked.items()
    }
    for what, kernel in found.items():
        (cubin := tmp_path / "cubin").write_bytes(kernel.asm["cubin"])
        usage = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
        resources = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
        stack = _STACK_BYTES.get((name, capability, what), 0)
        assert (resources["STACK"], resources["LOCAL"]) == (str(stack), "0"), what
        assert int(resources["REG"]) <= 128, what
    assert "ld.global.v4.b32" in found["encode"].asm["ptx"]
    assert "st.global.v4.b32" in found["decode_sum"].asm["ptx"]
