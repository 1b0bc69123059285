"""`spurline tokenizer`: train a tokenizer on text, and see how one cuts a text. Free of torch."""

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
Train a byte-level BPE tokenizer on text, and write it as the JSON file that
`tokenizers` and transformers read. A SOURCE is what `spurline data prepare`
takes. The same text gives the same tokenizer.

examples
  spurline tokenizer train books/ --vocab_size 8192 --out tokenizer.json
  spurline data prepare books/ --tokenizer tokenizer.json --out prepared/books"""
SHOW = """\
Show the size and the boundary token of a tokenizer, which is a JSON file or a
folder that has one, and how it cuts a text.

examples
  spurline tokenizer show tokenizer.json --text "Hello, world" """


@dataclass(frozen=True)
class Train:
    vocab_size: Annotated[int, described("N")] = 0
    """Tokens to make, with the 256 bytes and the boundary between documents among them."""
    out: Annotated[str, described("FILE")] = ""
    """The JSON file to write; it must not exist."""
    pattern: str = "*"
    """Which files of a folder are read, at any depth (e.g. *.md)."""
    text_field: str = "text"
    """Where JSONL, Parquet and Hugging Face data sets have their text."""


@dataclass(frozen=True)
class Show:
    text: Annotated[str, described("TEXT")] = ""
    """Text to cut into tokens."""


def main(argv: list[str]) -> int:
    return run_subcommand(PROG, COMMANDS, argv)


def train_tokenizer(paths: list[str], options: Train) -> int:
    from spurline.data.sources import read_documents, source_size
    from spurline.data.tokenizer_train import save_tokenizer, train_bpe

    sources = [Data(path=path, pattern=options.pattern, text_field=options.text_field) for path in paths]
    if problems := _problems(sources, options):
        return complain(f"{PROG} train", problems)
    with progress_bars({source: (source.path, source_size(source)) for source in sources}) as advance:
        documents = (document for source in sources for document in read_documents(source, partial(advance, source)))
        tokenizer = train_bpe(documents, options.vocab_size)
    out = os.path.expanduser(options.out)
    save_tokenizer(tokenizer, out)
    print(f"wrote {options.out}: {tokenizer.vocab_size:,} tokens")
    if tokenizer.vocab_size < options.vocab_size:
        print(f"that is fewer than {options.vocab_size:,}: the text has no more pairs that come twice", file=sys.stderr)
    return 0


def _problems(sources: list[Data], options: Train) -> list[str]:
    from spurline.data.sources import check_data
    from spurline.data.tokenizer_train import SMALLEST_VOCAB

    found = [problem for source in sources for problem in check_data(source)]
    if options.vocab_size < SMALLEST_VOCAB:
        found.append(f"--vocab_size must be at least {SMALLEST_VOCAB}, got {options.vocab_size}")
    if not options.out:
        found.append("--out is missing: it says which file to write")
    elif os.path.exists(os.path.expanduser(options.out)):
        found.append(f"--out: {options.out!r} exists: choose another name, or remove it first")
    return [with_own_options(problem) for problem in found]


def show_tokenizer(paths: list[str], options: Show) -> int:
    from spurline.data.tokenizer_file import FileTokenizer

    tokenizer = FileTokenizer.load(paths[0])
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
    "show": Subcommand("Show a tokenizer, and how it cuts a text.", "PATH", SHOW, Show(), show_tokenizer),
}
