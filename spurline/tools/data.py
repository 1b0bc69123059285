"""`spurline data`: tokenize data for training, list and verify prepared folders. Torch-free."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

from spurline.config import Data
from spurline.remote import url_problems
from spurline.tools.console import complain, human
from spurline.tools.parsing import described
from spurline.tools.subcommands import Subcommand, run_subcommand, with_own_options

if TYPE_CHECKING:
    from spurline.data.prepared_index import Index

K = TypeVar("K")
PROG = "spurline data"
PREPARE = """\
Tokenize text ahead of training, into a folder that training memory-maps. A SOURCE
is a file or folder of text, JSONL or Parquet (text and JSONL may be compressed as
.gz or .zst), a folder written by `Dataset.save_to_disk`, or
hf://NAME?config=CONFIG&split=SPLIT&streaming=1.

examples
  spurline data prepare books/ --out prepared/books
  spurline data prepare web.jsonl.gz code/ --weights 3,1 \\
      --tokenizer tokenizer.json --out prepared/mix
  spurline train --module deepseek_v3 --config deepseek_v3_debugmodel \\
      --data.path prepared/books
  sbatch --array=1-16 --wrap 'spurline data prepare /data/web \\
      --out /data/prepared --part $SLURM_ARRAY_TASK_ID/16'
  spurline data join /data/prepared"""
JOIN = """\
Join the parts that several machines prepared (`prepare --part`) into FOLDER, byte for
byte as if one machine had prepared it. The parts are in FOLDER.parts, which can be
removed afterwards."""
LS = """\
List the sources, token counts and tokenizer of a prepared folder."""
VERIFY = """\
Compare every file of a prepared folder with its recorded checksum. Exit code 1 if
a file is missing, truncated or changed."""


@dataclass(frozen=True)
class Prepare:
    out: Annotated[str, described("FOLDER")] = ""
    """Output folder, new or empty (required)."""
    tokenizer: Annotated[str, described("PATH")] = ""
    """A tokenizer.json file or a folder that has one (default: bytes)."""
    weights: Annotated[str, described("W,W,...")] = ""
    """Comma-separated sampling weights, one per source, e.g. 3,1 (default: in proportion to size)."""
    pattern: str = "*"
    """Glob that selects files within a folder, at any depth (e.g. *.md)."""
    text_field: str = "text"
    """Name of the text field in JSONL, Parquet and Hugging Face datasets."""
    workers: Annotated[int, described("N")] = 0
    """Worker processes for tokenization (default: one per CPU core; 1 with the byte tokenizer).
    Lower it to save memory; the output is the same for any number."""
    part: Annotated[str, described("I/N")] = ""
    """Prepare only the I-th of N parts, into OUT.parts, for a job array on several machines with a shared disk;
    `spurline data join OUT` joins them."""


@dataclass(frozen=True)
class NoOptions:
    pass


def main(argv: list[str]) -> int:
    return run_subcommand(PROG, COMMANDS, argv)


def prepare_data(paths: list[str], options: Prepare) -> int:
    from spurline.data.parts import Part
    from spurline.data.prepare import prepare
    from spurline.data.prepare_parts import prepare_part
    from spurline.data.sources import source_size
    from spurline.data.tokenizer import ByteTokenizer, load_tokenizer

    sources = [
        Data(path=path, pattern=options.pattern, text_field=options.text_field, tokenizer=options.tokenizer)
        for path in paths
    ]
    if problems := _problems(sources, options):
        return complain(f"{PROG} prepare", problems)
    tokenizer = load_tokenizer(options.tokenizer)
    # Byte tokenization is cheaper than sending the text to another process and back.
    num_workers = options.workers or (1 if isinstance(tokenizer, ByteTokenizer) else os.cpu_count() or 1)
    with progress_bars({source: (source.path, source_size(source)) for source in sources}) as advance:
        weights = Data(weights=options.weights).shares
        if options.part:
            part = Part.parse(options.part)
            print(f"wrote {prepare_part(sources, options.out, part, tokenizer, weights, num_workers, advance)}")
            return 0
        index = prepare(sources, options.out, tokenizer, weights, num_workers, advance)
    print(f"wrote {options.out}")
    print(_table(index))
    return 0


def _problems(sources: list[Data], options: Prepare) -> list[str]:
    from spurline.data.parts import Part
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
    if options.part:
        try:
            Part.parse(options.part)
        except ValueError as error:
            found.append(str(error))
    if not options.out:
        found.append("--out is missing: give the output folder")
    elif remote := url_problems("--out", options.out):
        found += remote
    elif problem := folder_problem(os.path.expanduser(options.out)):
        found.append(f"--out: {problem}")
    return [with_own_options(problem) for problem in dict.fromkeys(found)]


def join_data(folders: list[str], _: NoOptions) -> int:
    from spurline.data.prepare_parts import join_parts

    index = join_parts(folders[0])
    print(f"wrote {folders[0]}")
    print(_table(index))
    return 0


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
    print(f"all {len(files)} files intact: {human(num_bytes)} bytes")
    return 0


def _index(folder: str, check_sizes: bool = True) -> Index:
    from spurline.data.prepared_index import is_prepared, load_index

    if not is_prepared(folder):
        raise ValueError(f"{folder!r} is not prepared data: run `{PROG} prepare` first")
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
    """Show a progress bar per task (name, total) on a terminal; yields `advance(task, amount)`."""
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
        "Tokenize text into a folder that training memory-maps.", "SOURCE ...", PREPARE, Prepare(), prepare_data
    ),
    "join": Subcommand("Join the parts that several machines prepared.", "FOLDER", JOIN, NoOptions(), join_data),
    "ls": Subcommand("List the contents of a prepared folder.", "FOLDER", LS, NoOptions(), list_data),
    "verify": Subcommand("Verify the checksums of a prepared folder.", "FOLDER", VERIFY, NoOptions(), verify_data),
}
