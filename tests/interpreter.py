"""Triton's kernels on a machine without a GPU: run by Triton's interpreter, and built for each GPU."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def interpreted(module: Path, tests: int) -> None:
    """Run the tests of a module, of which there are so many, in a process whose Triton is the interpreter, which a
    process uses for all of its kernels or for none."""
    pytest.importorskip("triton", reason="needs Triton")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", str(module)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert re.search(rf"\b{tests} passed", done.stdout), done.stdout


def convert_bfloat16_as_a_gpu_does() -> None:
    """Let the interpreter of this process round to bfloat16, which it cuts off and whose denormal numbers it loses."""
    import triton.language as tl
    from triton.runtime import interpreter

    others = interpreter._convert_float

    def convert(x: Any, dtype: Any, into: Any, rounding: Any) -> Any:
        if (dtype, into) == (tl.float32, tl.bfloat16):
            bits = np.frombuffer(x.tobytes(), dtype=np.uint32).reshape(x.shape)
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        if (dtype, into) == (tl.bfloat16, tl.float32):
            bits = np.frombuffer(x.tobytes(), dtype=np.uint16).reshape(x.shape)
            return bits.astype(np.uint32) << 16
        return others(x, dtype, into, rounding)

    interpreter._convert_float = convert


def built(
    kernel: Any, capability: int, types: dict[str, Any], *, aligned: tuple[str, ...], options: Any, **constants: Any
) -> Any:
    """Build a kernel for GPUs of a compute capability, such as 90.

    Args:
        types: those of the arguments that are no constants: text, or a tuple for a tuple.
        aligned: the arguments whose values are multiples of 16, beside the addresses.
        options: of the compiler, such as the number of warps.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    place = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
    source = ASTSource(
        kernel,
        types | dict.fromkeys(constants, "constexpr"),
        constexprs={place[name]: value for name, value in constants.items()},
        attrs={
            place[name]: [["tt.divisibility", 16]]
            for name in types
            if str(types[name]).startswith("*") or name in aligned
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(kernel: Any, folder: Path) -> dict[str, int]:
    """Return what a thread of a built kernel uses: registers (``REG``), and bytes of stack and local memory."""
    import triton

    (cubin := folder / "cubin").write_bytes(kernel.asm["cubin"])
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([cuobjdump, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    return {name: int(found) for name, found in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
