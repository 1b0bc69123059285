import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spurline.data.tokenizer import ByteTokenizer

tokenizer = ByteTokenizer()


@given(st.text())
def test_text_survives_the_round_trip(text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text


@given(st.lists(st.integers(0, 300)))
def test_any_ids_decode(ids):
    assert tokenizer.decode(ids) == bytes(i for i in ids if i < 256).decode(errors="replace")


def test_boundary_is_the_last_id_and_leaves_no_text():
    assert tokenizer.boundary_id == tokenizer.vocab_size - 1 == 256
    assert tokenizer.decode([256, 104, 105, 256]) == "hi"


@pytest.mark.parametrize(("ids", "text"), [([0xE2, 0x82], "\ufffd"), ([0x61, 0xFF, 0x62], "a\ufffdb"), ([], "")])
def test_broken_utf8_is_shown_as_such(ids, text):
    assert tokenizer.decode(ids) == text


def test_text_that_utf8_cannot_say_still_encodes():
    assert tokenizer.encode("a\udcffb").tolist() == list(b"a?b")
