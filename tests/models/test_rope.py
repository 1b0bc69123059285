import torch

from spurline.models.common.rope import apply_rope, rope_frequencies, rope_tables


def rotated(x_R: torch.Tensor, position: int, theta: float = 100.0) -> torch.Tensor:
    cos, sin = rope_tables(torch.tensor([position]), x_R.numel(), theta)
    return apply_rope(x_R.view(1, 1, 1, -1), cos, sin).flatten()


def test_dot_products_depend_on_the_relative_position_only():
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    products = torch.stack([rotated(q, 5 + shift) @ rotated(k, 2 + shift) for shift in (0, 1, 7, 100)])
    torch.testing.assert_close(products, products[:1].expand(4), rtol=0, atol=1e-4)
    assert (rotated(q, 5) @ rotated(k, 3) - products[0]).abs() > 1e-2


def test_adjacent_channels_are_the_pairs_that_rotate():
    x = torch.zeros(6)
    x[2] = 1
    angle = 3 * rope_frequencies(6, 100.0, torch.device("cpu"))[1]
    expected = torch.tensor([0, 0, angle.cos(), angle.sin(), 0, 0])
    torch.testing.assert_close(rotated(x, 3), expected)


def test_frequencies_fall_from_one_by_a_constant_factor():
    frequency_P = rope_frequencies(8, 10000.0, torch.device("cpu"))
    torch.testing.assert_close(frequency_P, torch.tensor([1.0, 0.1, 0.01, 0.001]))


def test_bfloat16_is_rotated_in_float32_and_rounded_once():
    x_BLHR = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    tables = rope_tables(torch.arange(5), 8, 100.0)
    out = apply_rope(x_BLHR, *tables)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, apply_rope(x_BLHR.float(), *tables).bfloat16())
