"""The position in the data that a checkpoint stores, and what is made of checkpoints that have none."""

import pytest

from spurline.train.position import Position, stored_position


def test_the_stored_position_counts_whatever_the_batch_size_is_now():
    stored = Position(10, 1000, 70).stored()
    for global_batch_size in (1, 8, 64):
        assert stored_position(10, stored, global_batch_size, 16) == Position(10, 1000, 70)


def test_without_one_it_follows_from_a_batch_size_that_has_not_changed():
    assert stored_position(10, {"tokens_seen": 10 * 8 * 16}, 8, 16) == Position(10, 1280, 80)
    assert stored_position(0, {"tokens_seen": 0}, 8, 16) == Position(0, 0, 0)
    # Where sequences have various numbers of tokens, nothing can be compared.
    assert stored_position(10, {"tokens_seen": 777}, 8, None) == Position(10, 777, 80)


@pytest.mark.parametrize("tokens_seen", [10 * 4 * 16, 10 * 16 * 16, 10 * 8 * 16 + 1])
def test_without_one_and_with_another_batch_size_it_is_refused(tokens_seen):
    with pytest.raises(ValueError, match=r"10 steps of 8 sequences of 16 tokens: set --training\.global_batch_size"):
        stored_position(10, {"tokens_seen": tokens_seen}, 8, 16)


@pytest.mark.parametrize("tokens_seen", [None, "7", 7.0, -1, True])
def test_a_checkpoint_without_tokens_is_refused(tokens_seen):
    with pytest.raises(ValueError, match="step 3 does not say how many tokens"):
        stored_position(3, {"tokens_seen": tokens_seen, "sequences_seen": 1}, 8, 16)
