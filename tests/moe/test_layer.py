"""The layer as an nn.Module: dir, repr, device and dtype, errors for wrong input, and calls per forward."""

import dataclasses
import inspect
import sys

import pytest
import torch

import spurline
from spurline import MoE, MoEConfig

CONFIG = MoEConfig(dim=16, hidden_dim=16, num_experts=8, top_k=2, num_shared_experts=1)


def test_dir_shows_the_names_to_import() -> None:
    assert {"MoE", "MoEConfig", "Routing", "parallelize_moe", "__version__"} <= set(dir(spurline))
    names = {"MoE", "Experts", "Kernel", "Rows", "register_experts", "set_token_weight", "update_expert_bias"}
    assert names <= set(dir(spurline.moe))


def test_repr_tells_the_shape() -> None:
    told = repr(MoE(CONFIG))
    assert "dim=16, hidden_dim=16, num_experts=8, top_k=2, num_shared_experts=1" in told
    assert "w1_EFD (8, 16, 16)" in told


def test_every_field_of_the_config_is_explained() -> None:
    source = inspect.getsource(spurline.moe.config)
    for field in dataclasses.fields(MoEConfig):
        line = source.index(f"    {field.name}: ")
        assert source[source.index("\n", line) + 1 :].lstrip().startswith('"""'), field.name


def test_device_and_dtype() -> None:
    moe = MoE(CONFIG, device="meta", dtype=torch.bfloat16)
    assert {p.device.type for p in moe.parameters()} == {"meta"}
    assert {p.dtype for p in moe.parameters()} == {torch.bfloat16}
    assert moe.router.expert_bias_E.dtype == torch.float32
    half = MoE(CONFIG, dtype=torch.bfloat16)
    assert half(torch.randn(3, 16, dtype=torch.bfloat16)).dtype == torch.bfloat16
    with torch.device("meta"):
        assert MoE(CONFIG).experts.w1_EFD.is_meta


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.randn(3, 8), ValueError, r"width 16 \(config.dim\), got shape \(3, 8\)"),
        (torch.tensor(1.0), ValueError, r"width 16 \(config.dim\), got shape \(\)"),
        (torch.ones(3, 16, dtype=torch.int64), ValueError, "floating-point activations, got torch.int64"),
        ([[1.0] * 16], TypeError, r"a tensor of shape \(..., 16\), got list"),
        (None, TypeError, "got NoneType"),
    ],
)
def test_wrong_input_is_named_in_one_line(x: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as raised:
        MoE(CONFIG)(x)
    assert "\n" not in str(raised.value)


def test_a_forward_is_short() -> None:
    """One forward of one layer with shared experts: 60 calls in 9 of our files (it was 111 in 17)."""
    calls = calls_of_a_forward(MoE(CONFIG), torch.randn(2, 16, 16, requires_grad=True))
    assert len(calls) <= 60, calls
    assert len({file for file, _ in calls}) <= 9, sorted({file for file, _ in calls})


def calls_of_a_forward(moe: MoE, x: torch.Tensor) -> list[tuple[str, str]]:
    moe(x)  # whatever is done once
    root = spurline.__file__.removesuffix("__init__.py")
    calls = []

    def note(frame, event, _):  # type: ignore[no-untyped-def]
        if event == "call" and frame.f_code.co_filename.startswith(root):
            calls.append((frame.f_code.co_filename.removeprefix(root), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        moe(x)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("num_dims", [3, 4])
def test_an_exported_layer_takes_any_batch_and_length(num_dims: int) -> None:
    moe = MoE(CONFIG, init_std=0.5).eval()
    dynamic = {dim: torch.export.Dim(f"size_{dim}", min=2, max=64) for dim in range(num_dims - 1)}
    exported = torch.export.export(moe, (torch.randn(*(4, 6, 8)[: num_dims - 1], 16),), dynamic_shapes={"x": dynamic})
    x = torch.randn(*(5, 7, 3)[: num_dims - 1], 16)
    torch.testing.assert_close(exported.module()(x), moe(x))
