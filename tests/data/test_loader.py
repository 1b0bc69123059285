import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spurline.data.loader import TrainBatches, ValidationBatches
from spurline.data.packing import Windows

SEQ_LEN = 3


def windows_of(num_windows: int) -> Windows:
    return Windows(np.arange(num_windows * SEQ_LEN + 1, dtype=np.uint16), SEQ_LEN, boundary_id=256)


counts = st.integers(1, 50)
seeds = st.integers(-(2**63), 2**64)


@given(counts, seeds, st.integers(0, 5))
def test_each_epoch_is_a_permutation_of_all_windows(num_windows, seed, epoch):
    train = TrainBatches(windows_of(num_windows), seed)
    assert sorted(train.sample_ids(epoch * num_windows, num_windows)) == list(range(num_windows))


@given(counts, seeds, st.integers(0, 200), st.integers(0, 200))
def test_any_slice_of_the_sequence_is_the_same_however_it_is_reached(num_windows, seed, start, count):
    whole = TrainBatches(windows_of(num_windows), seed).sample_ids(0, start + count)
    train = TrainBatches(windows_of(num_windows), seed)
    train.sample_ids(3 * num_windows, 1)
    assert train.sample_ids(start, count) == whole[start:]


@given(
    num_windows=counts,
    step=st.integers(0, 30),
    num_ranks=st.integers(1, 4),
    num_micro=st.integers(1, 4),
    batch_size=st.integers(1, 4),
)
def test_ranks_and_micro_batches_together_are_the_global_batch(num_windows, step, num_ranks, num_micro, batch_size):
    global_batch_size = num_ranks * num_micro * batch_size
    expected = TrainBatches(windows_of(num_windows), seed=5).batch(step * global_batch_size, global_batch_size)
    parts = [
        TrainBatches(windows_of(num_windows), seed=5).batch(
            step * global_batch_size + (micro * num_ranks + rank) * batch_size, batch_size
        )
        for micro in range(num_micro)
        for rank in range(num_ranks)
    ]
    assert torch.equal(torch.cat([part.tokens_BL for part in parts]), expected.tokens_BL)
    assert torch.equal(torch.cat([part.labels_BL for part in parts]), expected.labels_BL)


def test_seeds_and_epochs_differ():
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(TrainBatches(windows_of(50), seed).sample_ids(epoch * 50, 50))

    assert len({order(seed, epoch) for seed in (0, 1, -1, 2**32) for epoch in range(4)}) == 16


def test_batch_is_tokens_and_the_tokens_that_follow():
    train = TrainBatches(windows_of(20), seed=0)
    batch = train.batch(17, 6)
    tokens_BL, labels_BL = batch.tokens_BL, batch.labels_BL
    assert batch.images is None
    assert batch.extras == {}
    assert tokens_BL.dtype == labels_BL.dtype == torch.int64
    assert tokens_BL.shape == labels_BL.shape == (6, SEQ_LEN)
    assert tokens_BL.is_contiguous()
    assert labels_BL.is_contiguous()
    assert tokens_BL[:, 0].tolist() == [SEQ_LEN * window for window in train.sample_ids(17, 6)]
    assert torch.equal(labels_BL, tokens_BL + 1)


def test_epoch_gives_every_label_once():
    train = TrainBatches(windows_of(20), seed=0)
    labels = torch.cat([train.batch(start, 5).labels_BL for start in range(20, 40, 5)])
    assert sorted(labels.flatten().tolist()) == list(range(1, 20 * SEQ_LEN + 1))


@pytest.mark.parametrize(
    ("batch_size", "num_batches", "sizes"),
    [(4, 2, [4, 4]), (4, 3, [4, 4, 2]), (4, 9, [4, 4, 2]), (5, 2, [5, 5]), (64, 1, [10]), (4, 0, [])],
)
def test_validation_stops_when_the_windows_end(batch_size, num_batches, sizes):
    batches = list(ValidationBatches(windows_of(10)).batches(batch_size, num_batches))
    assert [len(batch.tokens_BL) for batch in batches] == sizes
    starts = [start for batch in batches for start in batch.tokens_BL[:, 0].tolist()]
    assert len(set(starts)) == sum(sizes)
    for batch in batches:
        assert torch.equal(batch.labels_BL, batch.tokens_BL + 1)


def test_validation_is_the_same_each_time_and_spread_over_the_stream():
    def starts(batch_size: int, num_batches: int) -> list[int]:
        validation = ValidationBatches(windows_of(1000))
        return [
            start for batch in validation.batches(batch_size, num_batches) for start in batch.tokens_BL[:, 0].tolist()
        ]

    assert starts(8, 4) == starts(4, 8) == starts(8, 8)[:32]
    quarters = {4 * start // (1000 * SEQ_LEN) for start in starts(8, 4)}
    assert quarters == {0, 1, 2, 3}
