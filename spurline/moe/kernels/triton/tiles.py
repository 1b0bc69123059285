"""Tile sizes of the Triton kernels, by architecture and dtype. Free of torch and of Triton.

A tile has ROWS x COLUMNS results, and DEPTH elements of the reduction dim at a time. With these sizes, no kernel spills
registers or needs more shared memory than a device has (`tests/moe/test_triton_compile.py` compiles them all). They
have not been timed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tile:
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


KERNELS = ("gate_up", "rows", "weighed_rows", "hidden_gradient", "outer")
SHARED_MEMORY = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_103": 227 << 10,
    "sm_120": 99 << 10,
    "gfx90a": 64 << 10,
    "gfx942": 64 << 10,
    "gfx950": 160 << 10,
}
"""Bytes of shared memory that one program may use."""
FEW_ROWS = 48
"""Mean rows per expert up to which tiles have fewer rows."""
COMBINED_COLUMNS = 1024
"""Columns of a token that one program sums."""

_HALF = {
    "gate_up": Tile(128, 64, 64, 8, 3),
    "rows": Tile(128, 128, 64, 8, 3),
    "weighed_rows": Tile(128, 128, 64, 8, 3),
    "hidden_gradient": Tile(128, 64, 64, 8, 3),
    "outer": Tile(128, 128, 64, 8, 3),
}
_SMALL = {kernel: Tile(64, 64, 32, 4, 3) for kernel in KERNELS} | {"hidden_gradient": Tile(64, 32, 32, 4, 3)}
_CDNA = {kernel: Tile(tile.rows, tile.columns, 32, 8, 2) for kernel, tile in _HALF.items()}
_TABLE: dict[str, dict[str, Tile]] = {
    "sm_80": _HALF
    | {
        "rows": Tile(128, 64, 64, 8, 3),
        "weighed_rows": Tile(128, 64, 64, 8, 3),
        "hidden_gradient": Tile(128, 32, 64, 8, 3),
    },
    "sm_90": _HALF | {"hidden_gradient": Tile(128, 32, 64, 8, 3)},
    "sm_100": _HALF,
    "sm_103": _HALF,
    "gfx90a": _CDNA,
    "gfx942": _CDNA,
    "gfx950": _CDNA,
}
_FLOAT32 = {kernel: Tile(64, 32, 32, 4, 2) for kernel in KERNELS} | {"gate_up": Tile(32, 32, 32, 4, 2)}
_UNALIGNED = Tile(32, 32, 32, 4, 2)
"""For widths that are not multiples of 16: elements are loaded one by one, with an address in a register for each."""
_INTERPRETED = Tile(16, 16, 16, 1, 1)


def tile_of(kernel: str, architecture: str, itemsize: int, rows_per_expert: int, aligned: bool = True) -> Tile:
    """The tile of a kernel for elements of this size; other architectures get small tiles.

    aligned: whether the widths are multiples of 16.
    """
    if architecture == "interpreter":
        return _INTERPRETED
    if not aligned:
        return replace(_UNALIGNED, depth=16) if kernel == "outer" and itemsize == 4 else _UNALIGNED
    tile = _FLOAT32[kernel] if itemsize == 4 else _TABLE.get(architecture, _SMALL)[kernel]
    if rows_per_expert > FEW_ROWS or kernel == "outer":  # whose rows are those of the weight matrix
        return tile
    return Tile(32, min(tile.columns, 32 if kernel == "gate_up" else 64), tile.depth, 4, tile.stages)
