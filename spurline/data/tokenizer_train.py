"""Train a byte-level BPE tokenizer with the `tokenizers` package. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from spurline.data.formats import Document
from spurline.data.packing import stream_of
from spurline.data.stream import choose_documents, split_hash
from spurline.data.tokenizer import ByteTokenizer
from spurline.data.tokenizer_file import FileTokenizer, import_tokenizers
from spurline.files import write_file

BOUNDARY_TOKEN = "<|endoftext|>"
SMALLEST_VOCAB = 257
"""256 byte tokens and the boundary token."""
# The package buffers a fixed number of texts: short texts bound its memory use.
_CHUNK_CHARACTERS = 2**16


def train_bpe(documents: Iterable[Document], vocab_size: int, show_progress: bool = False) -> FileTokenizer:
    """Train a byte-level BPE of at most `vocab_size` tokens; fewer if no more pairs occur at least twice."""
    package = import_tokenizers()
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = package.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[BOUNDARY_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(_chunks(documents), trainer)
    return FileTokenizer(tokenizer.to_str(pretty=True), BOUNDARY_TOKEN, "the trained tokenizer")


def without_held_out(documents: Iterable[Document], fraction: float) -> list[Document]:
    """The documents that a run with this validation_fraction trains on, as chosen with the byte tokenizer."""
    found = list(documents)
    stream = stream_of(found, ByteTokenizer())
    is_held_D = choose_documents(stream.hash_D, stream.sizes(), fraction)
    held_out = set(stream.hash_D[is_held_D].tolist())
    return [document for document in found if split_hash(document.name) not in held_out]


def save_tokenizer(tokenizer: FileTokenizer, path: str) -> None:
    """Write the tokenizer as a JSON file, atomically; raises a ValueError if it can't be written."""
    try:
        write_file(path, tokenizer.content)
    except OSError as error:
        raise ValueError(f"can't write {path!r}: {error.strerror}") from None


def _chunks(documents: Iterable[Document]) -> Iterator[str]:
    for document in documents:
        text, start = document.text.encode("utf-8", errors="replace").decode("utf-8"), 0
        while start < len(text):
            end = text.find("\n", start + _CHUNK_CHARACTERS) + 1 or len(text)
            yield text[start:end]
            start = end
