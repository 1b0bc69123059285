"""The Triton kernels in Triton's interpreter, in a process of its own, and where the kernel table chooses them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from spurline.accelerator import cpu_stands_in_for
from spurline.moe.kernels import choose
from spurline.moe.kernels.kernel import Work
from spurline.moe.kernels.triton import experts

pytest.importorskip("triton", reason="needs Triton: pip install 'spurline[triton]'")
SCRIPT = Path(__file__).parent / "triton_interpreted.py"


def interpret(*arguments: str) -> dict[str, Any]:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=850
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_layer_equals_the_reference_and_keeps_no_more_than_the_cpu_kernel() -> None:
    layer = interpret("layer")["layer"]
    assert max(layer["errors"].values()) < 1e-5, layer["errors"]
    assert layer["paths"]["experts.triton"] == layer["paths"]["experts.on_tokens"] == 1
    assert layer["kept"]["triton"] <= 1.05 * layer["kept"]["stream"], layer["kept"]
    assert layer["same"]


@pytest.mark.parametrize("which", ["few", pytest.param("more", marks=pytest.mark.slow)])
def test_any_counts_and_sizes_in_every_dtype(which: str) -> None:
    for case, found in interpret(which).items():
        for name, (ours, theirs) in found.items():
            if "float16" in case:  # in 16 bits: as close to float64 as PyTorch's grouped matmul
                assert ours <= 1.1 * theirs, (case, name, ours, theirs)
            else:
                assert ours < 1e-5, (case, name, ours)


def work(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Work:
    return Work(**({"experts": "swiglu", "device": "cuda", "dtype": dtype, "width": 64, "hidden": 32} | changes))


def test_chosen_where_the_grouped_matmul_of_pytorch_is_a_loop(monkeypatch) -> None:
    chosen = {dtype: next(iter(choose.verdicts(work(dtype)))) for dtype in experts.DTYPES}
    # Without a device that could be asked, PyTorch is taken to have its kernel for bfloat16.
    assert chosen == {torch.bfloat16: "grouped_mm", torch.float16: "triton", torch.float32: "triton"}
    monkeypatch.setattr(experts, "has_grouped_mm_kernel", lambda device, dtype: False)  # as below SM90
    assert next(iter(choose.verdicts(work()))) == "triton"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": "cpu"}, "not on cpu"),
        ({"dtype": torch.float64}, "not torch.float64"),
        ({"experts": "clamped_swiglu"}, "not 'clamped_swiglu'"),
    ],
)
def test_refused_in_one_line(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"experts_backend 'triton'.*{why}"):
        choose.choose_kernel(work(**changes), "triton")


def test_without_triton_the_line_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(experts, "HAS_TRITON", False)
    with pytest.raises(ValueError, match="needs Triton"):
        choose._choose.__wrapped__(work(), "triton")


def test_the_op_is_traced_with_shapes_alone() -> None:
    with torch.device("meta"):
        x, w1, w3 = torch.randn(6, 8, requires_grad=True), torch.randn(3, 5, 8), torch.randn(3, 5, 8)
        w2, token, count, weight = torch.randn(3, 8, 5), torch.zeros(12).long(), torch.zeros(3).long(), torch.rand(12)
    y, kept = experts.triton_experts(x, w1, w3, w2, weight, None, token, count, False, True)
    assert (y.shape, kept.shape) == ((6, 8), (2, 12, 5))
    (dx,) = torch.autograd.grad(y, x, torch.empty_like(y))
    assert dx.shape == x.shape


def test_a_stand_in_without_triton_devices_does_not_choose_it() -> None:
    with cpu_stands_in_for("xpu"):
        assert not experts.TritonKernel().suits(work(device="xpu")).score


@pytest.mark.parametrize(("allowed", "tf32"), [("highest", []), ("high", ["sm_90", "gfx942"])])
def test_tf32_is_used_where_it_is_allowed_and_triton_has_it(allowed: str, tf32: list[str], monkeypatch) -> None:
    from triton.backends.amd.compiler import HIPBackend
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    from spurline.moe.kernels.triton import launch

    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: allowed)
    monkeypatch.setattr(launch.triton.knobs.runtime, "interpret", False)
    backends = {name: HIPBackend(GPUTarget("hip", name, 64)) for name in ("gfx90a", "gfx942", "gfx950", "gfx1100")}
    backends["sm_90"] = CUDABackend(GPUTarget("cuda", 90, 32))
    for name, backend in backends.items():
        monkeypatch.setattr(launch, "architecture", lambda device, name=name: name)
        launcher = launch._Launcher(torch.ones(4, 16), torch.ones(2, 16, 16), None, None, torch.tensor([2, 2]))
        precision = launcher.options(launcher.tile("rows"))["PRECISION"]
        assert precision == ("tf32" if name in tf32 else "ieee"), name
        assert precision in backend.parse_options({}).allowed_dot_input_precisions, name
