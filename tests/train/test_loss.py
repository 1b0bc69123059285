import math

import pytest
import torch
import torch.nn.functional as F

from spurline.train.loss import IGNORE_INDEX, count_real_tokens, cross_entropy_sum

torch.manual_seed(0)
LOGITS_BLV = torch.randn(3, 4, 7)
LABELS_BL = torch.randint(7, (3, 4))
SOME_IGNORED_BL = LABELS_BL.masked_fill(torch.tensor([1, 0, 0, 1]).bool(), IGNORE_INDEX)


def test_the_loss_is_the_sum_of_the_surprise_at_each_label():
    by_hand = sum(
        math.log(sum(math.exp(x) for x in row)) - row[label]
        for row, label in zip(LOGITS_BLV.flatten(0, 1).tolist(), LABELS_BL.flatten().tolist(), strict=True)
    )
    assert cross_entropy_sum(LOGITS_BLV, LABELS_BL).item() == pytest.approx(by_hand, rel=1e-6)


def test_ignored_labels_neither_add_to_the_loss_nor_count_nor_get_a_gradient():
    is_real_BL = SOME_IGNORED_BL != IGNORE_INDEX
    logits_BLV = LOGITS_BLV.clone().requires_grad_()
    loss = cross_entropy_sum(logits_BLV, SOME_IGNORED_BL)
    loss.backward()
    torch.testing.assert_close(loss, F.cross_entropy(LOGITS_BLV[is_real_BL], LABELS_BL[is_real_BL], reduction="sum"))
    assert count_real_tokens(SOME_IGNORED_BL) == 6
    assert count_real_tokens(LABELS_BL) == 12
    assert not logits_BLV.grad[~is_real_BL].any()
    assert logits_BLV.grad[is_real_BL].any(dim=-1).all()


def test_parts_of_a_batch_add_up_to_the_whole():
    parts = [cross_entropy_sum(LOGITS_BLV[b : b + 1], SOME_IGNORED_BL[b : b + 1]) for b in range(3)]
    torch.testing.assert_close(sum(parts), cross_entropy_sum(LOGITS_BLV, SOME_IGNORED_BL))


def test_a_batch_without_real_tokens_is_zero_and_not_nan():
    logits_BLV = LOGITS_BLV.clone().requires_grad_()
    loss = cross_entropy_sum(logits_BLV, torch.full_like(LABELS_BL, IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0
    assert not logits_BLV.grad.any()


def test_logits_in_bfloat16_are_summed_in_float32():
    logits_BLV = LOGITS_BLV.bfloat16()
    loss = cross_entropy_sum(logits_BLV, LABELS_BL)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, cross_entropy_sum(logits_BLV.float(), LABELS_BL))
