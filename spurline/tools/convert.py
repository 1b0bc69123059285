"""`spurline convert`: Hugging Face folders into run folders, and the checkpoints of runs into Hugging Face folders."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from spurline.config_io import ConfigError, did_you_mean
from spurline.tools.console import complain
from spurline.tools.parsing import UserPackage, described, load_user_code, parse, split_options
from spurline.tools.train import raised_by_us

PROG = "spurline convert"
HELP = """\
usage: spurline convert from-hf PATH OUT [options]
       spurline convert to-hf RUN OUT [options]

  from-hf  Make a run folder of a Hugging Face folder, to train or generate from.
  to-hf    Make a Hugging Face folder of a run's checkpoint.

`spurline convert from-hf --help` and `spurline convert to-hf --help` explain
their options."""
FROM_HF = """\
Make the run folder OUT of the Hugging Face folder PATH, which has config.json
and safetensors files. Its weights become the checkpoint of step 0. Every tensor
is accounted for: what is missing, left over or of another shape is refused.

examples
  spurline convert from-hf Qwen3-0.6B outputs/qwen --verify
  spurline generate outputs/qwen --prompt "Once upon a time"
  spurline train --config-file outputs/qwen/config.json"""
TO_HF = """\
Make the Hugging Face folder OUT of the newest checkpoint in the run folder RUN,
whatever number of ranks has written it: config.json, safetensors files, and the
tokenizer's files where the run has some.

examples
  spurline convert to-hf outputs/qwen qwen-trained --dtype bfloat16 --verify
  spurline convert to-hf outputs/qwen qwen-early --step 500"""
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMG]?)B?", re.IGNORECASE)


@dataclass(frozen=True)
class Conversion:
    """The options that both directions have."""

    dtype: Literal["keep", "float32", "bfloat16"] = "keep"
    """Type of the written weights: as they are, or rounded. The selection bias of experts always stays as it is."""
    verify: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Compare the logits with those of transformers first; needs that package, and both models in memory."""
    import_: UserPackage = ""


@dataclass(frozen=True)
class FromHF(Conversion):
    mtp: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Take over what predicts further tokens too (DeepSeek-V3's MTP modules), to train on with it."""


@dataclass(frozen=True)
class ToHF(Conversion):
    step: Annotated[int | None, described("N")] = None
    """The checkpoint of this step (default: the newest one)."""
    max_shard_size: Annotated[str, described("SIZE")] = "5GB"
    """Start another file when one has this size, such as 5GB or 500MB (default: 5GB)."""


_DIRECTIONS: dict[str, tuple[Conversion, str, str]] = {
    "from-hf": (FromHF(), FROM_HF, "PATH"),
    "to-hf": (ToHF(), TO_HF, "RUN"),
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if argv[0] not in _DIRECTIONS:
        return complain(PROG, [f"there is no {argv[0]!r}{did_you_mean(argv[0], _DIRECTIONS)} It is from-hf or to-hf"])
    default, description, first = _DIRECTIONS[argv[0]]
    prog = f"{PROG} {argv[0]}"
    folders, options = _without_folders(argv[1:])
    problems = load_user_code(options)
    command, not_understood = parse(type(default), default, options, f"{prog} {first} OUT", description)
    problems += not_understood
    if len(folders) != 2:
        problems.append(f"it takes two folders, {first} and OUT, got {' '.join(folders) or 'none'}")
    if isinstance(command, ToHF) and not _num_bytes(command.max_shard_size):
        problems.append(f"--max_shard_size: {command.max_shard_size!r} is not a size such as 5GB or 500MB")
    if problems:
        return complain(prog, problems)
    return _run(prog, command, Path(folders[0]).expanduser(), Path(folders[1]).expanduser())


def _without_folders(argv: list[str]) -> tuple[list[str], list[str]]:
    """Take apart the folders, wherever they stand, and the options with their values."""
    folders, given = split_options(argv)
    options: list[str] = []
    for option in given:
        num_values = 0 if option.name in ("verify", "mtp") else 1
        rest = option.values[num_values:]
        folders += rest
        options += option.tokens[: len(option.tokens) - len(rest)]
    return folders, options


def _num_bytes(size: str) -> int:
    """5GB as a number; 0 for what is no size."""
    match = _SIZE.fullmatch(size.strip())
    return int(float(match[1]) * 1000 ** " KMG".index(match[2].upper() or " ")) if match else 0


def _run(prog: str, command: Conversion, source: Path, out: Path) -> int:
    try:
        with Console(stderr=True).status(f"converting {source}"):
            told = _convert(command, source, out)
        print("\n".join(told))
    except ConfigError as error:
        return complain(prog, error.problems)
    except ValueError as error:
        if not raised_by_us(error):
            raise
        return complain(prog, [str(error)])
    except KeyboardInterrupt:
        print(f"{prog}: interrupted, nothing was written", file=sys.stderr)
        return 130
    return 0


def _convert(command: Conversion, source: Path, out: Path) -> list[str]:
    import torch  # takes seconds to load, so it comes last

    settings: dict[str, Any] = {
        "dtype": None if command.dtype == "keep" else getattr(torch, command.dtype),
        "verify": command.verify,
    }
    if isinstance(command, FromHF):
        from spurline.hf.importing import import_folder

        return import_folder(source, out, with_mtp=command.mtp, **settings)
    from spurline.hf.exporting import export_run

    assert isinstance(command, ToHF)
    return export_run(source, out, command.step, max_shard_bytes=_num_bytes(command.max_shard_size), **settings)
