"""The Triton kernels compiled for devices that aren't here: no spilled registers, and shared memory within limits."""

import pytest

from spurline.moe.kernels.triton.tiles import KERNELS, SHARED_MEMORY, tile_of

pytest.importorskip("triton", reason="needs Triton: pip install 'spurline[triton]'")

from spurline.device import TRITON_TARGETS
from spurline.testing.params import slow_but
from spurline.testing.triton_resources import KERNELS as COMPILED
from spurline.testing.triton_resources import resources

MAIN = ("sm_80", "sm_90", "sm_100", "gfx942")
ARCHITECTURES = slow_but(MAIN, TRITON_TARGETS)
MATRIX_INSTRUCTIONS = {"sm_90": "wgmma", "sm_100": "tcgen05.mma", "sm_103": "tcgen05.mma"}


def matrix_instruction(architecture: str) -> str:
    return "v_mfma" if architecture.startswith("gfx") else MATRIX_INSTRUCTIONS.get(architecture, "mma.sync")


def check(kernel: str, architecture: str, dtype: str = "bf16", rows_per_expert: int = 4096, multiple: int = 64) -> None:
    found = resources(kernel, architecture, dtype, rows_per_expert, multiple)
    assert found.spilled_bytes == 0, found
    assert found.shared_bytes <= SHARED_MEMORY[architecture], found
    if kernel != "combine" and dtype != "fp32" and rows_per_expert > 100 and multiple >= 16:
        assert found.instructions == (matrix_instruction(architecture),), found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kernel", COMPILED)
def test_no_kernel_spills(kernel: str, architecture: str) -> None:
    check(kernel, architecture)


@pytest.mark.parametrize("architecture", slow_but(["sm_80"], TRITON_TARGETS))
@pytest.mark.parametrize("dtype", slow_but(["bf16"], ["bf16", "fp16", "fp32"]))
@pytest.mark.parametrize("multiple", [16, 1])
@pytest.mark.parametrize("kernel", [kernel for kernel in COMPILED if kernel != "combine"])
def test_no_kernel_spills_with_widths_that_tiles_do_not_divide(
    kernel: str, multiple: int, dtype: str, architecture: str
) -> None:
    check(kernel, architecture, dtype, multiple=multiple)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("rows_per_expert", [16, 4096])
@pytest.mark.parametrize("kernel", COMPILED)
def test_no_kernel_spills_in_any_dtype_or_with_few_rows(
    kernel: str, rows_per_expert: int, dtype: str, architecture: str
) -> None:
    check(kernel, architecture, dtype, rows_per_expert)


def test_a_tile_that_is_too_large_is_noticed(monkeypatch) -> None:
    from spurline.moe.kernels.triton.tiles import Tile
    from spurline.testing import triton_resources

    monkeypatch.setattr(triton_resources, "tile_of", lambda *args: Tile(128, 128, 64, 4, 3))
    assert resources("hidden_gradient", "sm_80").spilled_bytes > 0


def test_every_kernel_has_a_tile_everywhere() -> None:
    for kernel in KERNELS:
        for architecture in (*TRITON_TARGETS, "sm_110", "interpreter", ""):
            assert tile_of(kernel, architecture, 2, 100).rows >= 16
