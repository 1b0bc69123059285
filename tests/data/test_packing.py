import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spurline.data.formats import Document
from spurline.data.packing import Windows, pack
from spurline.data.stream import choose_documents, split_hash
from spurline.data.tokenizer import ByteTokenizer

tokenizer = ByteTokenizer()
texts = st.lists(st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1, max_size=60), min_size=1)
seq_lens = st.integers(1, 40)
fractions = st.floats(0, 0.99)


def documents_of(some_texts: list[str]) -> list[Document]:
    return [Document(f"{i}.txt", text) for i, text in enumerate(some_texts)]


def stream_of(documents: list[Document]) -> list[int]:
    return [token for document in documents for token in (256, *document.text.encode())]


def labels_of(windows: Windows | None) -> list[int]:
    return windows.take(range(len(windows)))[:, 1:].ravel().tolist() if windows else []


def inputs_of(windows: Windows) -> list[int]:
    return windows.take(range(len(windows)))[:, :-1].ravel().tolist()


@given(texts, seq_lens)
def test_every_token_is_a_label_once_and_follows_its_predecessor(some_texts, seq_len):
    stream = stream_of(documents_of(some_texts))
    windows = Windows(np.array(stream, np.uint16), seq_len, tokenizer.boundary_id)
    num_labels = len(windows) * seq_len
    assert labels_of(windows) == stream[1 : 1 + num_labels]
    assert inputs_of(windows) == stream[:num_labels]
    assert num_labels + windows.num_dropped == len(stream) - 1
    assert windows.num_dropped < seq_len


def test_windows_are_taken_in_the_order_asked_for():
    windows = Windows(np.arange(10, dtype=np.uint16), 3, tokenizer.boundary_id)
    assert windows.take([2, 0, 2]).tolist() == [[6, 7, 8, 9], [0, 1, 2, 3], [6, 7, 8, 9]]
    assert (len(windows), windows.num_dropped) == (3, 0)


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_a_stream_shorter_than_a_window_has_none(num_tokens):
    assert len(Windows(np.zeros(num_tokens, np.uint16), 3, tokenizer.boundary_id)) == 0


@given(texts, seq_lens)
def test_document_ids_change_where_a_document_begins(some_texts, seq_len):
    documents = documents_of(some_texts)
    stream = stream_of(documents)
    windows = Windows(np.array(stream, np.uint16), seq_len, tokenizer.boundary_id)
    owner = [i for i, document in enumerate(documents) for _ in range(len(document.text) + 1)]
    for window_id in range(len(windows)):
        start = window_id * seq_len
        began_before = owner[start] if stream[start] != 256 else owner[start] - 1
        expected = [document - began_before for document in owner[start : start + seq_len]]
        assert windows.document_ids(window_id).tolist() == expected


def test_each_document_follows_a_boundary():
    packed = pack([Document("a", "hi"), Document("b", "é")], tokenizer, seq_len=2, validation_fraction=0.0)
    assert packed.train.take([0, 1]).tolist() == [[256, 104, 105], [105, 256, 0xC3]]
    assert (packed.train.num_dropped, packed.num_documents, packed.num_tokens) == (1, 2, 6)
    assert packed.validation is None


@given(texts, seq_lens, fractions)
def test_training_and_validation_share_no_label_and_lose_only_what_is_counted(some_texts, seq_len, fraction):
    documents = documents_of(some_texts)
    stream = stream_of(documents)
    if len(stream) <= seq_len:
        return
    packed = pack(documents, tokenizer, seq_len, fraction)
    sides = [packed.train] if packed.validation is None else [packed.train, packed.validation]
    assert all(len(side) > 0 for side in sides)
    num_labels = sum(len(side) * seq_len + side.num_dropped for side in sides)
    # The first token of each side is no label; when the cut is within the stream, that token is a label of the other.
    assert len(stream) - len(sides) <= num_labels <= len(stream) - 1
    counts = np.bincount(stream, minlength=257)
    used = np.bincount([label for side in sides for label in labels_of(side)], minlength=257)
    assert (used <= counts).all()


def choose_held_out(names: list[str], sizes: list[int], fraction: float) -> set[str]:
    hash_D = np.array([split_hash(name) for name in names], np.uint64)
    is_chosen_D = choose_documents(hash_D, np.array(sizes), fraction)
    return {name for name, is_chosen in zip(names, is_chosen_D, strict=True) if is_chosen}


names_and_sizes = st.dictionaries(st.text(min_size=1), st.integers(1, 1000), min_size=1)


@given(names_and_sizes, fractions, st.randoms())
def test_held_out_documents_depend_on_names_not_on_order(sizes, fraction, random):
    shuffled = random.sample(sorted(sizes), len(sizes))
    chosen = choose_held_out(list(sizes), list(sizes.values()), fraction)
    assert chosen == choose_held_out(shuffled, [sizes[name] for name in shuffled], fraction)
    assert chosen <= sizes.keys()


@given(st.lists(st.integers(1, 100), min_size=200, max_size=300), st.floats(0.02, 0.98))
def test_held_out_share_is_close_to_the_fraction(sizes, fraction):
    chosen = choose_held_out([str(i) for i in range(len(sizes))], sizes, fraction)
    target = sum(sizes) * fraction
    # Whatever was left out did not fit in the rest.
    smallest_left = min(size for i, size in enumerate(sizes) if str(i) not in chosen)
    assert target - smallest_left - 1 < sum(sizes[int(name)] for name in chosen) <= target + 0.5


@pytest.mark.parametrize(
    ("sizes", "fraction", "num_chosen"),
    [([100, 100], 0.5, 1), ([10, 1000], 0.5, 0), ([1000], 0.5, 0), ([500, 500], 0.9, 0), ([40, 60, 900], 0.08, 1)],
)
def test_documents_are_held_out_only_when_that_comes_within_half_of_either_share(sizes, fraction, num_chosen):
    assert len(choose_held_out([str(i) for i in range(len(sizes))], sizes, fraction)) == num_chosen


def test_another_document_moves_few_between_the_sides():
    names = [f"{i}.txt" for i in range(1000)]
    before = choose_held_out(names, [100] * 1000, 0.1)
    after = choose_held_out([*names, "one-more.txt"], [100] * 1001, 0.1)
    assert len(before ^ after) <= 2


def test_whole_documents_are_held_out_where_that_comes_close():
    documents = [Document(f"{i}.txt", chr(i + 65) * 99) for i in range(50)]
    packed = pack(documents, tokenizer, seq_len=10, validation_fraction=0.1)
    held_out, kept = set(labels_of(packed.validation)) - {256}, set(labels_of(packed.train)) - {256}
    assert len(held_out) == 5
    assert held_out.isdisjoint(kept)
    assert len(held_out | kept) == 50


@pytest.mark.parametrize("num_documents", [1, 3])
def test_last_windows_are_held_out_where_whole_documents_are_too_large(num_documents):
    text = "".join(chr(i) for i in range(32, 127)) * 10
    packed = pack(documents_of([text] * num_documents), tokenizer, seq_len=7, validation_fraction=0.1)
    stream = stream_of(documents_of([text] * num_documents))
    assert packed.validation is not None
    num_windows = (len(stream) - 1) // 7
    assert len(packed.validation) == round(0.1 * num_windows)
    assert len(packed.train) + len(packed.validation) == num_windows
    assert packed.train.num_dropped == 0
    assert labels_of(packed.train) + labels_of(packed.validation) == stream[1 : 1 + 7 * num_windows]


def test_high_fraction_leaves_a_training_window():
    packed = pack([Document("a", "abcdefgh")], tokenizer, seq_len=4, validation_fraction=0.99)
    assert packed.validation is not None
    assert (len(packed.train), len(packed.validation)) == (1, 1)


@pytest.mark.parametrize(("fraction", "num_windows"), [(0.0, 100), (0.02, 10), (0.9, 1)])
def test_nothing_is_held_out_when_not_asked_for_or_too_little_text(fraction, num_windows):
    packed = pack(documents_of(["abcd" * num_windows]), tokenizer, seq_len=4, validation_fraction=fraction)
    assert packed.validation is None
    assert len(packed.train) == num_windows


def test_text_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match=r"^data\.path has 6 tokens, .* needs 7 \(training\.seq_len \+ 1\)"):
        pack(documents_of(["hello"]), tokenizer, seq_len=6, validation_fraction=0.5)
    assert len(pack(documents_of(["hello"]), tokenizer, seq_len=5, validation_fraction=0.5).train) == 1
