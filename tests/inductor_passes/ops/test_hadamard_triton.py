"""The Hadamard transform's kernel for GPUs, on a machine without one: its results, and what is built for each GPU."""

from pathlib import Path

import pytest

from tests.interpreter import built, interpreted, resources

pytestmark = pytest.mark.subprocess

pytest.importorskip("triton", reason="needs Triton")


@pytest.mark.slow
def test_triton_interprets_it_as_products_with_the_matrix() -> None:
    interpreted(Path(__file__).with_name("interpreted_hadamard.py"), tests=64)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("dtype", "power", "halves"),
    [("fp32", 4, False), ("bf16", 12, False), ("fp32", 14, False), ("fp32", 14, True)],
)
def test_it_is_built_for_every_gpu_with_tensor_cores_and_without_spilling(
    dtype: str, power: int, halves: bool, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from inductor_passes.ops import hadamard_triton as kernels

    values = max(kernels.TILE, 1 << power)
    kernel = built(
        kernels.hadamard_kernel,
        capability,
        {"x": f"*{dtype}", "out": f"*{dtype}", "total": "i32", "scale": "fp32"},
        aligned=("total",),
        options={"num_warps": kernels.warps(values)},
        blocks=values >> power,
        size=1 << power,
        power=power,
        halves=halves,
        is_narrow=dtype == "bf16",
        dtype=kernels.MULTIPLIED_IN,
    )
    used = resources(kernel, tmp_path)
    assert (used["STACK"], used["LOCAL"]) == (0, 0)
    code = kernel.asm["ptx"].splitlines()
    assert any("ld.global.v4.b32" in line for line in code)
    assert any("mma" in line and ("bf16.bf16" in line or "kind::f16" in line) for line in code)
    assert kernel.metadata.shared <= 160 * 1024
