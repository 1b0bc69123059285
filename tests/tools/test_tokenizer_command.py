from pathlib import Path

import pytest
from tokenizers import Tokenizer

TEXT = "The train to Zürich leaves at 8:15. The next train leaves at 9:15.\n" * 20


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def test_train_writes_what_the_package_reads(spurline, text):
    code, out, err = spurline("tokenizer", "train", "text.txt", "--vocab-size", "280", "--out", "t.json")
    assert (code, out, err) == (0, "wrote t.json: 280 tokens\n", "")
    tokenizer = Tokenizer.from_file(str(text / "t.json"))
    assert tokenizer.get_vocab_size() == 280
    assert tokenizer.decode(tokenizer.encode(TEXT).ids) == TEXT


def test_same_text_gives_the_same_file(spurline, text):
    for name in ("a.json", "b.json"):
        assert spurline("tokenizer", "train", "text.txt", "--vocab_size", "280", "--out", name).code == 0
    assert (text / "a.json").read_bytes() == (text / "b.json").read_bytes()


def test_text_with_too_few_pairs_says_so(spurline, text):
    code, out, err = spurline("tokenizer", "train", "text.txt", "--vocab_size", "5000", "--out", "t.json")
    assert code == 0
    num_tokens = Tokenizer.from_file(str(text / "t.json")).get_vocab_size()
    assert out == f"wrote t.json: {num_tokens} tokens\n"
    assert err == "fewer than 5,000 tokens: no other pair occurs twice in the text\n"


def test_prepare_with_the_trained_tokenizer(spurline, text):
    spurline("tokenizer", "train", "text.txt", "--vocab_size", "280", "--out", "t.json")
    code, out, _ = spurline("data", "prepare", "text.txt", "--tokenizer", "t.json", "--out", "out", "--workers", "1")
    assert code == 0
    assert "tokenizer: tokenizer.json, <|endoftext|> between documents, 280 ids as uint16" in out
    assert (text / "out" / "tokenizer.json").read_bytes() == (text / "t.json").read_bytes()


def test_show_cuts_a_text(spurline, text):
    spurline("tokenizer", "train", "text.txt", "--vocab_size", "280", "--out", "t.json")
    code, out, _ = spurline("tokenizer", "show", "t.json", "--text", "The train leaves")
    first, *rows, last = out.splitlines()
    assert code == 0
    assert first == "280 tokens, <|endoftext|> (0) between documents"
    ids = Tokenizer.from_file(str(text / "t.json")).encode("The train leaves").ids
    assert [int(row.split()[0]) for row in rows] == ids
    assert last == f"{len(ids)} tokens for 16 bytes"


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (
            ["train", "text.txt", "--vocab_size", "256", "--out", "t.json"],
            "train: --vocab_size must be at least 257, got 256",
        ),
        (["train", "text.txt", "--out", "t.json"], "train: --vocab_size is missing: give the size of the vocabulary"),
        (["train", "text.txt", "--vocab_size", "280"], "train: --out is missing"),
        (["train", "text.txt", "--vocab_size", "280", "--out", "text.txt"], "train: --out: 'text.txt' exists"),
        (
            ["train", "text.txt", "--vocab_size", "280", "--out", "no/t.json"],
            "train: can't write 'no/t.json': No such file",
        ),
        (["train", "nowhere", "--vocab_size", "280", "--out", "t.json"], "train: 'nowhere' does not exist"),
        (
            ["train", "--vocab_size", "280", "--out", "t.json"],
            "train: SOURCE is missing, as in spurline tokenizer train books/ --vocab_size 8192 --out tokenizer.json\n",
        ),
        (["show", "nowhere"], "show: --tokenizer: can't read 'nowhere': No such file"),
        (["show", "text.txt"], "show: --tokenizer 'text.txt': not a valid tokenizer.json"),
    ],
)
def test_wrong_command_is_explained_in_one_line(spurline, text, argv, complaint):
    code, out, err = spurline("tokenizer", *argv)
    assert (code, out) == (2, "")
    assert err.startswith(f"spurline tokenizer {complaint}")
    assert len(err.splitlines()) == 1
    assert sorted(path.name for path in text.iterdir()) == ["text.txt"]
