"""Cross-compile our Triton kernels, and read their resource usage: registers, shared memory."""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spurline.device import TRITON_TARGETS
from spurline.moe.kernels.triton.tiles import COMBINED_COLUMNS, tile_of

DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}
SIZES = {"num_experts": 8, "D": 7168, "F": 2048, "num_rows": 4096}
"""Code generation depends only on whether they are multiples of 16."""

# The flags with which each kernel needs the most: gathered rows, weights, and both products.
_FLAGS: dict[str, dict[str, Any]] = {
    "gate_up": {"HAS_TOKEN": True, "BEFORE": False, "AFTER": True, "KEEP": True},
    "output_rows": {"HAS_TOKEN": False, "TWO": False, "WEIGH": False},
    "rows": {"HAS_TOKEN": True, "TWO": True, "WEIGH": False},
    "weighed_rows": {"HAS_TOKEN": True, "TWO": True, "WEIGH": True},
    "hidden_gradient": {"HAS_TOKEN": True, "AFTER": True, "NEED_HIDDEN": True},
    "outer": {"GATHER_A": False, "GATHER_B": True, "WEIGH_B": True},
    "combine": {"HAS_BASE": True},
}
KERNELS = tuple(_FLAGS)
_INTEGERS = ("token", "count", "row", "end")
_WIDTHS = ("D", "F", "I", "O", "stride_i", "stride_o")
_SUMS = ("weight", "dweight")


@dataclass(frozen=True)
class Resources:
    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: tuple[str, ...]
    """The matrix instructions in the code."""


def resources(
    kernel: str, architecture: str, dtype: str = "bf16", rows_per_expert: int = 4096, multiple: int = 64
) -> Resources:
    """Resource usage of a kernel on an architecture, for widths that are multiples of this number: 64, 16 or 1."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from spurline.moe.kernels.triton import products

    function = products.rows_kernel if kernel.endswith("rows") else getattr(products, f"{kernel}_kernel")
    constants = dict(_FLAGS[kernel]) | {"UPCAST": False}
    options = {}
    if kernel == "combine":
        constants["COLUMNS"] = COMBINED_COLUMNS
    else:
        name, aligned = "rows" if kernel == "output_rows" else kernel, multiple % 16 == 0
        tile = tile_of(name, architecture, DTYPES[dtype], rows_per_expert, aligned)
        constants |= {"EXPERTS": 64, "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
        constants |= {"PRECISION": "ieee"} | ({} if kernel == "outer" else {"EVEN": multiple % tile.depth == 0})
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
    names = list(inspect.signature(function.fn).parameters)
    signature, attributes = {}, {}
    for place, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("num_rows", "num_experts", "D", "F", "I", "O", "stride_i", "stride_o"):
            signature[name] = "i32"
        else:
            signature[name] = "*i64" if name in _INTEGERS else "*fp32" if name in _SUMS else f"*{dtype}"
        if signature[name].startswith("*") or (name in _WIDTHS and multiple % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    if kernel.endswith("rows"):  # outputs read a matrix by its rows, gradients by its columns
        stride = "stride_i" if kernel == "output_rows" else "stride_o"
        constants[stride], signature[stride] = 1, "constexpr"
        attributes.pop((names.index(stride),), None)
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget(*TRITON_TARGETS[architecture]), options=options)
    shared = compiled.metadata.shared
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])  # type: ignore[index]
        scratch = int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", text)[1])  # type: ignore[index]
        return Resources(registers, scratch, shared, _used(text, "v_mfma"))
    usage = _cubin_usage(compiled.asm["cubin"], Path(triton.__file__).parent)
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    matrix = _used(compiled.asm["ptx"], "tcgen05.mma", "wgmma", "mma.sync")
    return Resources(found["REG"], found["STACK"], shared, matrix)


def _used(text: str, *instructions: str) -> tuple[str, ...]:
    return tuple(name for name in instructions if name in text)


def _cubin_usage(cubin: bytes, package: Path) -> str:
    """The resource usage line of cuobjdump, which comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = package / "backends" / "nvidia" / "bin" / "cuobjdump"
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return next(line for line in done.stdout.splitlines() if "REG:" in line)
