import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spurline.data.stream import DocumentStream, Stretches, choose_documents, split_by_document

sizes = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def cut(array: np.ndarray, part_sizes: list[int]) -> list[np.ndarray]:
    """The array in parts, of which the last takes what is left."""
    return np.split(array, np.minimum(np.cumsum(part_sizes), len(array)))


@given(sizes, st.lists(st.integers(0, 60), unique=True, max_size=10), st.data())
def test_stretches_read_as_if_they_were_copied_together(part_sizes, edges, data):
    tokens_N = np.arange(60, dtype=np.uint16)
    pairs = np.array(sorted(edges[: len(edges) // 2 * 2]), dtype=np.int64).reshape(-1, 2)
    stream = Stretches(cut(tokens_N, part_sizes), pairs[:, 0], pairs[:, 1])
    expected = [token for begin, end in pairs for token in range(begin, end)]
    assert len(stream) == len(expected)
    assert stream[:].tolist() == expected
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(0, len(expected)))
    assert stream[start:stop].tolist() == expected[start:stop]
    assert stream[start:stop].dtype == np.uint16


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=12), sizes)
def test_documents_are_split_by_choice(documents, part_sizes):
    size_D, is_chosen_D = (np.array(column) for column in zip(*documents, strict=True))
    owner_N = np.repeat(np.arange(len(documents)), size_D)
    stream = DocumentStream(cut(owner_N, part_sizes), np.cumsum(size_D) - size_D, np.zeros(len(documents), np.uint64))
    assert stream.sizes().tolist() == size_D.tolist()
    rest, chosen = split_by_document(stream, is_chosen_D)
    assert rest[:].tolist() == [i for i in owner_N if not is_chosen_D[i]]
    assert chosen[:].tolist() == [i for i in owner_N if is_chosen_D[i]]


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(1, 1000)), min_size=1, max_size=40), st.floats(0, 0.99)
)
def test_documents_are_chosen_one_by_one_while_they_fit(documents, fraction):
    total = sum(size for _, size in documents)
    target = round(total * fraction)
    room, chosen = target, set()
    for number, (_, size) in sorted(enumerate(documents), key=lambda entry: entry[1][0]):
        if size <= room:
            chosen.add(number)
            room -= size
    if room > min(target, total - target) / 2:
        chosen = set()
    hash_D = np.array([number for number, _ in documents], np.uint64)
    size_D = np.array([size for _, size in documents])
    assert set(np.flatnonzero(choose_documents(hash_D, size_D, fraction))) == chosen


def test_document_that_fits_exactly_is_chosen_after_one_that_does_not():
    hash_D, size_D = np.array([1, 2, 3, 4], np.uint64), np.array([5, 20, 5, 10])
    assert choose_documents(hash_D, size_D, 0.25).tolist() == [True, False, True, False]
