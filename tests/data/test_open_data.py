import subprocess
import sys
import time

import pytest
import torch

from spurline.config import Data
from spurline.data import open_data


def test_standard_library_loads_quickly_and_learns_from_python_source():
    begin = time.process_time()
    data = open_data(Data(), seq_len=256, seed=0)
    assert time.process_time() - begin < 2
    assert data.num_documents > 100
    assert data.num_tokens > 1_000_000
    assert data.validation is not None
    share = len(data.validation.windows) / (len(data.validation.windows) + len(data.train.windows))
    assert share == pytest.approx(0.02, rel=0.05)
    assert "self" in data.tokenizer.decode(data.train.batch(0, 64).tokens_BL.flatten())


def test_same_seed_gives_the_same_batches_and_another_seed_the_same_validation():
    first, again, other = (open_data(Data(), seq_len=64, seed=seed) for seed in (1, 1, 2))
    ours, theirs = first.train.batch(100, 8), again.train.batch(100, 8)
    assert torch.equal(ours.tokens_BL, theirs.tokens_BL)
    assert torch.equal(ours.labels_BL, theirs.labels_BL)
    assert first.train.sample_ids(100, 8) != other.train.sample_ids(100, 8)
    assert first.validation is not None
    assert other.validation is not None
    for ours, theirs in zip(first.validation.batches(4, 2), other.validation.batches(4, 2), strict=True):
        assert torch.equal(ours.labels_BL, theirs.labels_BL)


def test_single_file_has_training_and_validation(make_files):
    path = make_files({"book.txt": "All work and no play makes a dull model. " * 100}) / "book.txt"
    data = open_data(Data(str(path), validation_fraction=0.1), seq_len=16, seed=0)
    assert data.validation is not None
    assert data.num_documents == 1
    assert data.num_tokens == 4101
    assert (len(data.train.windows), len(data.validation.windows)) == (230, 26)


def test_no_validation_when_none_is_asked_for(make_files):
    folder = make_files({"a.txt": "some text", "b.txt": "more text"})
    assert open_data(Data(str(folder), validation_fraction=0.0), seq_len=4, seed=0).validation is None


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", r"data\.path .* has no text"), (b"\xff", r"data\.path: .* not UTF-8"), (b"short", r"training\.seq_len")],
)
def test_what_only_reading_shows_is_refused(make_files, content, message):
    with pytest.raises(ValueError, match=message):
        open_data(Data(str(make_files({"a.txt": content}))), seq_len=64, seed=0)


def test_checking_the_options_needs_no_torch():
    code = (
        "import sys; from spurline.config import Data; from spurline.data import check_data;"
        "assert check_data(Data()) == []; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
