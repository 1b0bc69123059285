"""`spurline tokenizer`: train a BPE tokenizer, or inspect one. Torch-free."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from spurline.config import Data
from spurline.tools.console import complain
from spurline.tools.data import progress_bars
from spurline.tools.parsing import described
from spurline.tools.subcommands import Subcommand, run_subcommand, with_own_options

PROG = "spurline tokenizer"
TRAIN = """\
Train a byte-level BPE tokenizer and write it as a tokenizer.json file, the format of
Hugging Face tokenizers. SOURCE is as for `spurline data prepare`, or "" for the
default data. Training is deterministic.

examples
  spurline tokenizer train books/ --vocab_size 8192 --out tokenizer.json
  spurline data prepare books/ --tokenizer tokenizer.json --out prepared/books"""
SHOW = """\
Show the vocabulary size and document boundary token of a tokenizer, and how it tokenizes
a text. PATH is a tokenizer.json file, a folder that has one, or the name of a tokenizer
that comes with Spurline.

examples
  spurline tokenizer show tokenizer.json --text "Hello, world" """


@dataclass(frozen=True)
class Train:
    vocab_size: Annotated[int, described("N")] = 0
    """Vocabulary size, including 256 byte tokens and the boundary token (required, at least 257)."""
    out: Annotated[str, described("FILE")] = ""
    """Output file, which must not exist (required)."""
    pattern: str = "*"
    """Glob that selects files within a folder, at any depth (e.g. *.md)."""
    text_field: str = "text"
    """Name of the text field in JSONL, Parquet and Hugging Face datasets."""
    validation_fraction: float = 0.0
    """Exclude the documents that a run with this data.validation_fraction holds out (0: none)."""


@dataclass(frozen=True)
class Show:
    text: Annotated[str, described("TEXT")] = ""
    """Text to tokenize."""


def main(argv: list[str]) -> int:
    return run_subcommand(PROG, COMMANDS, argv)


def train_tokenizer(paths: list[str], options: Train) -> int:
    from spurline.data.sources import read_documents, source_size
    from spurline.data.tokenizer_train import save_tokenizer, train_bpe, without_held_out

    sources = [Data(path=path, pattern=options.pattern, text_field=options.text_field) for path in paths]
    if problems := _problems(sources, options):
        return complain(f"{PROG} train", problems)
    with progress_bars({source: (source.path, source_size(source)) for source in sources}) as advance:
        documents = (document for source in sources for document in read_documents(source, partial(advance, source)))
        fraction = options.validation_fraction
        learned = without_held_out(documents, fraction) if fraction else documents
        tokenizer = train_bpe(learned, options.vocab_size)
    out = os.path.expanduser(options.out)
    save_tokenizer(tokenizer, out)
    print(f"wrote {options.out}: {tokenizer.vocab_size:,} tokens")
    if tokenizer.vocab_size < options.vocab_size:
        print(f"fewer than {options.vocab_size:,} tokens: no other pair occurs twice in the text", file=sys.stderr)
    return 0


def _problems(sources: list[Data], options: Train) -> list[str]:
    from spurline.data.sources import check_data
    from spurline.data.tokenizer_train import SMALLEST_VOCAB

    found = [problem for source in sources for problem in check_data(source)]
    if not options.vocab_size:
        found.append("--vocab_size is missing: give the size of the vocabulary, such as 2048")
    elif options.vocab_size < SMALLEST_VOCAB:
        found.append(f"--vocab_size must be at least {SMALLEST_VOCAB}, got {options.vocab_size}")
    if not 0 <= options.validation_fraction < 1:
        found.append(f"--validation_fraction must be in [0, 1), got {options.validation_fraction}")
    if not options.out:
        found.append("--out is missing: give the output file")
    elif os.path.exists(os.path.expanduser(options.out)):
        found.append(f"--out: {options.out!r} exists: choose another name, or remove it first")
    return [with_own_options(problem) for problem in found]


def show_tokenizer(paths: list[str], options: Show) -> int:
    from spurline.data.shipped import tokenizer_path
    from spurline.data.tokenizer_file import FileTokenizer

    tokenizer = FileTokenizer.load(tokenizer_path(paths[0]))
    print(f"{tokenizer.vocab_size:,} tokens, {tokenizer.boundary_token} ({tokenizer.boundary_id}) between documents")
    if options.text:
        ids = tokenizer.encode(options.text).tolist()
        num_bytes = len(options.text.encode("utf-8", errors="replace"))
        for token_id in ids:
            print(f"{token_id:>8}  {tokenizer.decode([token_id])!r}")
        print(f"{len(ids)} tokens for {num_bytes} bytes")
    return 0


COMMANDS = {
    "train": Subcommand("Train a byte-level BPE tokenizer on text.", "SOURCE ...", TRAIN, Train(), train_tokenizer),
    "show": Subcommand("Show a tokenizer, and tokenize a text with it.", "PATH", SHOW, Show(), show_tokenizer),
}
