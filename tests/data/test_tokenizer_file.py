import json
import pickle
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spurline.config import Data
from spurline.data.formats import Document
from spurline.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, token_dtype, tokenizer_for
from spurline.data.tokenizer_file import FileTokenizer
from spurline.data.tokenizer_train import BOUNDARY_TOKEN, train_bpe

TEXT = "The train to Zürich leaves at 8:15. The next train, a 🚂, leaves at 9:15; trains leave every hour.\n" * 20
BPE = train_bpe([Document("a", TEXT)], vocab_size=400)


def byte_fallback() -> FileTokenizer:
    """The way of SentencePiece: words with a leading mark, and a token a byte for what is no word."""
    vocab = {"<unk>": 0, "<s>": 1, "▁a": 2, "▁b": 3, "c": 4} | {f"<0x{i:02X}>": i + 5 for i in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return FileTokenizer(tokenizer.to_str(), "<s>", "test")


FALLBACK = byte_fallback()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(BPE.content)
    return path


@given(st.text(st.characters(codec="utf-8")))
@example(f"a{BOUNDARY_TOKEN}b")
def test_ids_are_those_of_transformers_and_text_survives_the_round_trip(text):
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(BPE.content))
    ids = BPE.encode(text)
    assert ids.dtype == np.uint16
    assert ids.tolist() == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert BPE.decode(ids) == BPE.decode(ids.tolist()) == text


def test_special_tokens_in_a_text_are_letters():
    ids = BPE.encode(f"a{BOUNDARY_TOKEN}b")
    assert BPE.boundary_id not in ids
    assert BPE.decode(ids) == f"a{BOUNDARY_TOKEN}b"
    assert BPE.decode([BPE.boundary_id, *ids, BPE.boundary_id, 10**6]) == f"a{BOUNDARY_TOKEN}b"


def test_text_that_utf8_cannot_say_still_encodes():
    assert BPE.decode(BPE.encode("a\udcffb")) == "a?b"


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
@given(data=st.data())
def test_text_that_comes_id_by_id_is_the_whole_text(tokenizer: Tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    decoder = tokenizer.decoder()
    parts = [decoder.add(i) for i in ids]
    assert "".join([*parts, decoder.finish()]) == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE, FALLBACK], ids=["bytes", "bpe", "fallback"])
@given(text=st.text(st.sampled_from("aé€🚂c\n"), max_size=20))
def test_no_half_character_is_ever_shown(tokenizer: Tokenizer, text):
    decoder = tokenizer.decoder()
    shown = ""
    for token_id in tokenizer.encode(text).tolist():
        shown += decoder.add(token_id)
        assert text.startswith(shown)
    assert shown == text
    assert decoder.finish() == ""


def test_characters_are_shown_as_soon_as_they_are_whole():
    decoder = ByteTokenizer().decoder()
    assert [decoder.add(i) for i in [256, *b"a\xe2\x82\xac", 256]] == ["", "a", "", "", "€", ""]
    decoder = FALLBACK.decoder()
    assert [decoder.add(i) for i in (1, 2, 3, 0xC3 + 5, 0xA9 + 5, 4)] == ["", "a", " b", "", "é", "c"]


def test_large_vocabularies_need_wider_ids():
    assert [token_dtype(size).name for size in (257, 65_536, 65_537)] == ["uint16", "uint16", "uint32"]
    vocab = {f"w{i}": i for i in range(70_000)} | {"<s>": 70_000}
    large = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    large.pre_tokenizer = pre_tokenizers.Whitespace()
    large.add_special_tokens(["<s>"])
    tokenizer = FileTokenizer(large.to_str(), "<s>", "test")
    assert (tokenizer.vocab_size, tokenizer.boundary_id) == (70_001, 70_000)
    ids = tokenizer.encode("w1 w69999")
    assert ids.dtype == np.uint32
    assert ids.tolist() == [1, 69_999]


def test_a_copy_for_another_process_encodes_the_same():
    copy = pickle.loads(pickle.dumps(BPE))
    text = TEXT + BOUNDARY_TOKEN
    assert copy.encode(text).tolist() == BPE.encode(text).tolist()
    assert copy.fingerprint == BPE.fingerprint


def test_options_choose_the_tokenizer(file, tmp_path):
    assert isinstance(tokenizer_for(Data()), ByteTokenizer)
    for path in (file, tmp_path):
        chosen = tokenizer_for(Data(tokenizer=str(path)))
        assert chosen.fingerprint == BPE.fingerprint != tokenizer_for(Data()).fingerprint
    assert load_tokenizer("").vocab_size == 257


@pytest.mark.parametrize(
    ("config", "boundary"),
    [
        ({"bos_token": "<s>", "eos_token": "</s>"}, "<s>"),
        ({"bos_token": None, "eos_token": "</s>"}, "</s>"),
        ({"bos_token": {"content": "<s>", "special": True}}, "<s>"),
        ({}, "<|endoftext|>"),
    ],
)
def test_boundary_is_the_one_of_the_folder_or_else_the_usual_one(tmp_path, config, boundary):
    tokenizer = tokenizers.Tokenizer.from_str(BPE.content)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = FileTokenizer.load(str(tmp_path))
    assert loaded.boundary_token == boundary
    assert loaded.boundary_id == tokenizer.token_to_id(boundary)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert loaded.vocab_size == len(theirs)
    assert loaded.encode(TEXT).tolist() == theirs.encode(TEXT, add_special_tokens=False)


def test_only_special_token_is_the_boundary_and_without_one_there_is_none(tmp_path):
    path = tmp_path / "t.json"
    for names, works in ((["[DOC]"], True), ([], False), (["[A]", "[B]"], False)):
        tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
        tokenizer.add_special_tokens(names)
        tokenizer.save(str(path))
        if works:
            assert FileTokenizer.load(str(path)).boundary_token == names[0]
        else:
            with pytest.raises(ValueError, match=r"t\.json': can't determine the document boundary token"):
                FileTokenizer.load(str(path))


def test_wrong_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^data\.tokenizer: can't read '.*nowhere': No such file"):
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"^data\.tokenizer: can't read '.*tokenizer\.json': No such file"):
        load_tokenizer(str(tmp_path))
    path = tmp_path / "t.json"
    for content in (b"{}", b"no json", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"t\.json': not a valid tokenizer.json|is not a tokenizer.json file"):
            load_tokenizer(str(path))
    path.write_text(BPE.content)
    with pytest.raises(ValueError, match="there is no token '<none>'"):
        FileTokenizer.load(str(path), "<none>")


def test_missing_package_is_named(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"needs the package tokenizers: pip install tokenizers"):
        load_tokenizer(str(file))


def test_trained_tokenizer_has_all_bytes_a_boundary_and_whole_words():
    assert BPE.vocab_size <= 400
    assert BPE.boundary_token == BOUNDARY_TOKEN
    assert BPE.decode(BPE.encode(bytes(range(1, 128)).decode())) == bytes(range(1, 128)).decode()
    assert len(BPE.encode(" train")) == 1
    assert train_bpe([Document("a", TEXT)], 400).content == BPE.content


def test_training_reads_every_piece_of_a_long_text(monkeypatch):
    monkeypatch.setattr("spurline.data.tokenizer_train._CHUNK_CHARACTERS", 50)
    assert train_bpe([Document("a", TEXT)], 400).content == BPE.content
