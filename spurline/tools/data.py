"""`spurline data`: prepare data for training, see what was prepared, and check that it is whole. Free of torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

from spurline.config import Data
from spurline.tools.console import complain, human
from spurline.tools.parsing import described
from spurline.tools.subcommands import Subcommand, run_subcommand, with_own_options

if TYPE_CHECKING:
    from spurline.data.prepared_index import Index

K = TypeVar("K")
PROG = "spurline data"
PREPARE = """\
Tokenize text once, into a folder that training reads without delay and without
holding it in memory. A SOURCE is a file or folder of text, JSONL or Parquet
(.txt.gz, .jsonl.zst and so on too), a Hugging Face data set saved to a folder,
or hf://NAME?config=CONFIG&split=SPLIT&streaming=1.

examples
  spurline data prepare books/ --out prepared/books
  spurline data prepare web.jsonl.gz code/ --weights 3,1 \\
      --tokenizer tokenizer.json --out prepared/mix
  spurline train --module deepseek_v3 --config deepseek_v3_debugmodel \\
      --data.path prepared/books"""
LS = """\
Show what a folder of prepared data holds."""
VERIFY = """\
Read all of a folder of prepared data, and compare it with its checksums. Exit
code 1 if a file is missing, cut short or changed."""


@dataclass(frozen=True)
class Prepare:
    out: Annotated[str, described("FOLDER")] = ""
    """Where to write: a folder that is new or empty."""
    tokenizer: Annotated[str, described("PATH")] = ""
    """A tokenizer's JSON file, or a Hugging Face folder that has one (default: a token is a byte)."""
    weights: Annotated[str, described("W,W,...")] = ""
    """How often training reads each source, such as 3,1 (default: as their sizes are)."""
    pattern: str = "*"
    """Which files of a folder are read, at any depth (e.g. *.md)."""
    text_field: str = "text"
    """Where JSONL, Parquet and Hugging Face data sets have their text."""
    workers: Annotated[int, described("N")] = 0
    """Processes that tokenize (default: one a core, or none but this where a token is a byte)."""


@dataclass(frozen=True)
class NoOptions:
    pass


def main(argv: list[str]) -> int:
    return run_subcommand(PROG, COMMANDS, argv)


def prepare_data(paths: list[str], options: Prepare) -> int:
    from spurline.data.prepare import prepare
    from spurline.data.sources import source_size
    from spurline.data.tokenizer import ByteTokenizer, load_tokenizer

    sources = [
        Data(path=path, pattern=options.pattern, text_field=options.text_field, tokenizer=options.tokenizer)
        for path in paths
    ]
    if problems := _problems(sources, options):
        return complain(f"{PROG} prepare", problems)
    tokenizer = load_tokenizer(options.tokenizer)
    # Bytes are there as soon as they are read: to send them to another process and back takes longer.
    num_workers = options.workers or (1 if isinstance(tokenizer, ByteTokenizer) else os.cpu_count() or 1)
    with progress_bars({source: (source.path, source_size(source)) for source in sources}) as advance:
        weights = Data(weights=options.weights).shares
        index = prepare(sources, options.out, tokenizer, weights, num_workers, advance)
    print(f"wrote {options.out}")
    print(_table(index))
    return 0


def _problems(sources: list[Data], options: Prepare) -> list[str]:
    from spurline.data.prepare import folder_problem
    from spurline.data.prepared_index import is_prepared
    from spurline.data.sources import check_data

    found = [f"{source.path!r} is prepared already" for source in sources if is_prepared(source.path)]
    found += [problem for source in sources for problem in check_data(source)]
    weights = Data(weights=options.weights)
    found += [f"--{problem}" for problem in weights.problems()]
    if weights.shares and len(weights.shares) != len(sources):
        found.append(f"--weights has {len(weights.shares)} numbers for {len(sources)} sources")
    if options.workers < 0:
        found.append(f"--workers must be positive, got {options.workers}")
    if not options.out:
        found.append("--out is missing: it says which folder to write")
    elif problem := folder_problem(os.path.expanduser(options.out)):
        found.append(f"--out: {problem}")
    return [with_own_options(problem) for problem in dict.fromkeys(found)]


def list_data(folders: list[str], _: NoOptions) -> int:
    print(_table(_index(folders[0])))
    return 0


def verify_data(folders: list[str], _: NoOptions) -> int:
    from spurline.data.prepared_index import content_problem

    folder = folders[0]
    index = _index(folder, check_sizes=False)
    files = list(index.files)
    num_bytes = sum(stored.num_bytes for stored in files)
    with progress_bars({folder: (folder, num_bytes)}) as advance:
        problems = [content_problem(folder, stored, lambda amount: advance(folder, amount)) for stored in files]
    for problem in filter(None, problems):
        print(problem)
    if any(problems):
        print(f"{sum(map(bool, problems))} of {len(files)} files are damaged: prepare the data again")
        return 1
    print(f"all {len(files)} files are whole: {human(num_bytes)} bytes")
    return 0


def _index(folder: str, check_sizes: bool = True) -> Index:
    from spurline.data.prepared_index import is_prepared, load_index

    if not is_prepared(folder):
        raise ValueError(f"{folder!r} is not prepared data: `{PROG} prepare` makes a folder of it")
    return load_index(folder, check_sizes)


def _table(index: Index) -> str:
    tokenizer = f"tokenizer.json, {index.boundary_token} between documents" if index.tokenizer else "bytes"
    rows = [("source", "weight", "documents", "tokens", "shards", "bytes")]
    rows += [
        (
            source.path,
            source.weight or "-",
            f"{source.num_documents:,}",
            f"{source.num_tokens:,}",
            f"{len(source.shards)}",
            f"{sum(shard.num_bytes for shard in source.shards):,}",
        )
        for source in index.sources
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))])
        for name, *cells in rows
    ]
    return "\n".join([f"tokenizer: {tokenizer}, {index.vocab_size:,} ids as {index.dtype}", *lines])


@contextmanager
def progress_bars(tasks: Mapping[K, tuple[str, int | None]]) -> Iterator[Callable[[K, int], None]]:
    """A bar a task, with its name and how much there is to do, on a terminal; yields what moves one on."""
    if not sys.stderr.isatty():
        yield lambda task, amount: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        ids = {task: progress.add_task(name, total=total) for task, (name, total) in tasks.items()}
        yield lambda task, amount: progress.advance(ids[task], amount)


COMMANDS = {
    "prepare": Subcommand(
        "Tokenize text into a folder that training reads fast.", "SOURCE ...", PREPARE, Prepare(), prepare_data
    ),
    "ls": Subcommand("Show what a prepared folder holds.", "FOLDER", LS, NoOptions(), list_data),
    "verify": Subcommand("Compare a prepared folder with its checksums.", "FOLDER", VERIFY, NoOptions(), verify_data),
}
