import math

import pytest
import torch

from spurline.models.common.decoder_config import YarnConfig
from spurline.models.common.rope import apply_rope, apply_rope_halves, rope_frequencies, rope_tables

CPU = torch.device("cpu")


def rotated(x_R: torch.Tensor, position: int, theta: float = 100.0, apply=apply_rope) -> torch.Tensor:
    cos, sin = rope_tables(torch.tensor([position]), x_R.numel(), theta)
    return apply(x_R.view(1, 1, 1, -1), cos, sin).flatten()


@pytest.mark.parametrize("apply", [apply_rope, apply_rope_halves])
def test_dot_products_depend_on_the_relative_position_only(apply):
    def product(q_position: int, k_position: int) -> torch.Tensor:
        return rotated(q, q_position, apply=apply) @ rotated(k, k_position, apply=apply)

    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    products = torch.stack([product(5 + shift, 2 + shift) for shift in (0, 1, 7, 100)])
    torch.testing.assert_close(products, products[:1].expand(4), rtol=0, atol=1e-4)
    assert (product(5, 3) - products[0]).abs() > 1e-2


def test_adjacent_channels_are_the_pairs_that_rotate():
    x = torch.zeros(6)
    x[2] = 1
    angle = 3 * rope_frequencies(6, 100.0, CPU)[1]
    expected = torch.tensor([0, 0, angle.cos(), angle.sin(), 0, 0])
    torch.testing.assert_close(rotated(x, 3), expected)


def test_halves_pair_a_channel_with_the_one_half_the_width_further():
    x = torch.zeros(6)
    x[1] = 1
    angle = 3 * rope_frequencies(6, 100.0, CPU)[1]
    expected = torch.tensor([0, angle.cos(), 0, 0, angle.sin(), 0])
    torch.testing.assert_close(rotated(x, 3, apply=apply_rope_halves), expected)


def test_both_conventions_are_the_same_up_to_the_order_of_channels():
    x = torch.randn(8, generator=torch.Generator().manual_seed(0))
    in_halves = [0, 2, 4, 6, 1, 3, 5, 7]
    torch.testing.assert_close(rotated(x, 5)[in_halves], rotated(x[in_halves], 5, apply=apply_rope_halves))


def test_frequencies_fall_from_one_by_a_constant_factor():
    frequency_P = rope_frequencies(8, 10000.0, CPU)
    torch.testing.assert_close(frequency_P, torch.tensor([1.0, 0.1, 0.01, 0.001]))


@pytest.mark.parametrize("apply", [apply_rope, apply_rope_halves])
def test_bfloat16_is_rotated_in_float32_and_rounded_once(apply):
    x_BLHR = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    tables = rope_tables(torch.arange(5), 8, 100.0)
    out = apply(x_BLHR, *tables)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, apply(x_BLHR.float(), *tables).bfloat16())


@pytest.mark.parametrize("apply", [apply_rope, apply_rope_halves])
def test_rows_of_a_batch_may_have_positions_of_their_own(apply):
    x_BLHR = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    positions_BL = torch.tensor([[0, 1, 2], [5, 9, 7]])
    out_BLHR = apply(x_BLHR, *rope_tables(positions_BL, 8, 100.0))
    for row in (0, 1):
        expected_1LHR = apply(x_BLHR[row : row + 1], *rope_tables(positions_BL[row], 8, 100.0))
        assert torch.equal(out_BLHR[row], expected_1LHR[0])


def test_yarn_of_factor_one_changes_nothing():
    positions_L = torch.arange(9)
    for with_yarn, without in zip(
        rope_tables(positions_L, 16, 100.0, YarnConfig(mscale_all_dim=0.7)),
        rope_tables(positions_L, 16, 100.0),
        strict=True,
    ):
        assert torch.equal(with_yarn, without)


def test_yarn_keeps_fast_pairs_slows_slow_ones_and_blends_between():
    yarn = YarnConfig(factor=10.0, original_seq_len=1000, beta_fast=20.0, beta_slow=2.0)
    plain_P, slowed_P = rope_frequencies(32, 1e4, CPU), rope_frequencies(32, 1e4, CPU, yarn)
    turns_P = yarn.original_seq_len * plain_P / (2 * math.pi)
    ratio_P = slowed_P / plain_P
    # The border lies at a whole pair: at most one pair beyond either of them is blended too.
    fast, slow = (turns_P > yarn.beta_fast).sum().item(), (turns_P >= yarn.beta_slow).sum().item()
    torch.testing.assert_close(ratio_P[:fast], torch.ones(fast))
    torch.testing.assert_close(ratio_P[slow:], torch.full((16 - slow,), 0.1))
    between = ratio_P[fast:slow]
    assert len(between) > 1
    assert (between.diff() < 0).all()
    assert ((between > 0.1) & (between < 1)).all()


def test_yarn_scales_rotated_channels_and_softmax():
    yarn = YarnConfig(factor=40.0, mscale=1.0, mscale_all_dim=0.5)
    grown, half = 1 + 0.1 * math.log(40), 1 + 0.05 * math.log(40)
    assert yarn.rotated_scale == pytest.approx(grown / half)
    assert yarn.softmax_scale == pytest.approx(half**2)
    cos_LP, sin_LP = rope_tables(torch.arange(3), 8, 100.0, yarn)
    torch.testing.assert_close((cos_LP.square() + sin_LP.square()).sqrt(), torch.full((3, 4), grown / half))


def test_yarn_names_what_is_wrong_with_it():
    bad = YarnConfig(factor=0.5, original_seq_len=0, beta_fast=0.9, mscale=-1.0)
    assert [problem.split()[0] for problem in bad.problems()] == ["original_seq_len", "factor", "beta_fast", "mscale"]
