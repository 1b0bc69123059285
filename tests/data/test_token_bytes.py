"""Bytes of each id, against the bytes of whole texts."""

import numpy as np
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from test_tokenizer_file import BPE, FALLBACK

from spurline.data.picture_tokenizer import PictureTokenizer
from spurline.data.tokenizer import ByteTokenizer
from spurline.data.tokenizer_file import FileTokenizer

TEXTS = st.text(st.characters(codec="utf-8"))


@given(TEXTS)
@example("a 🚂 in Zürich, a part of each letter a token: \N{REPLACEMENT CHARACTER} 漢字")
def test_the_bytes_of_a_text_are_those_of_its_ids(text):
    for tokenizer in (ByteTokenizer(), BPE, FALLBACK):
        assert tokenizer.token_bytes[tokenizer.encode(text)].sum() == len(text.encode())


def test_special_tokens_have_no_bytes_and_all_others_have_some():
    for tokenizer in (ByteTokenizer(), BPE):
        assert np.flatnonzero(tokenizer.token_bytes == 0).tolist() == [tokenizer.boundary_id]
        assert len(tokenizer.token_bytes) == tokenizer.vocab_size
    assert np.flatnonzero(FALLBACK.token_bytes == 0).tolist() == [0, 1]


def test_the_space_of_a_word_counts_where_only_the_first_word_of_a_text_loses_it():
    assert FALLBACK.decode([2]) == "a"
    assert FALLBACK.decode([2, 3]) == "a b"
    assert FALLBACK.token_bytes[[2, 3, 4]].tolist() == [2, 2, 1]


def test_an_id_that_no_token_has_is_no_text():
    vocab = {"a": 0, "<s>": 1, "b": 7}
    sparse = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
    sparse.add_special_tokens(["<s>"])
    sparse.decoder = tokenizers.decoders.Fuse()
    assert FileTokenizer(sparse.to_str(), "<s>", "test").token_bytes.tolist() == [1, 0, 0, 0, 0, 0, 0, 1]


def test_pictures_are_no_text():
    tokenizer = PictureTokenizer(ByteTokenizer())
    assert len(tokenizer.token_bytes) == tokenizer.vocab_size
    assert tokenizer.token_bytes[list(tokenizer.picture_ids)].sum() == 0
    assert tokenizer.token_bytes.sum() == 256
