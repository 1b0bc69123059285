"""`spurline convert`: import Hugging Face models as run folders, export checkpoints as Hugging Face models."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from spurline.config_io import ConfigError
from spurline.spelling import did_you_mean
from spurline.tools.console import complain
from spurline.tools.parsing import UserPackage, described, load_user_code, parse, split_options
from spurline.tools.train import raised_by_us

PROG = "spurline convert"
HELP = """\
usage: spurline convert from-hf PATH OUT [options]
       spurline convert to-hf RUN OUT [options]

  from-hf  Import a Hugging Face model as a run folder, to train or generate from.
  to-hf    Export a checkpoint of a run as a Hugging Face model.

`spurline convert from-hf --help` and `spurline convert to-hf --help` show their
options."""
FROM_HF = """\
Import the Hugging Face model in folder PATH (config.json and safetensors files)
as the new run folder OUT, with its weights as the checkpoint of step 0. The
import fails if any tensor is missing, unexpected or of the wrong shape.

examples
  spurline convert from-hf Qwen3-0.6B outputs/qwen --verify
  spurline generate outputs/qwen --prompt "Once upon a time"
  spurline train --config-file outputs/qwen/config.json"""
TO_HF = """\
Export the newest checkpoint in the run folder RUN, written by any number of ranks,
as the new Hugging Face folder OUT: config.json, safetensors files, and the files of
the run's tokenizer if it has one.

examples
  spurline convert to-hf outputs/qwen qwen-trained --dtype bfloat16 --verify
  spurline convert to-hf outputs/qwen qwen-early --step 500"""
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMG]?)B?", re.IGNORECASE)


@dataclass(frozen=True)
class Conversion:
    """Options common to both directions."""

    dtype: Literal["keep", "float32", "bfloat16"] = "keep"
    """Dtype of the written weights (keep: unchanged). The router's expert bias is never rounded."""
    verify: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Write only if the logits match those of transformers; needs that package, and memory for both models."""
    import_: UserPackage = ""


@dataclass(frozen=True)
class FromHF(Conversion):
    mtp: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Also import the multi-token prediction (MTP) modules of DeepSeek-V3, to continue training with them."""


@dataclass(frozen=True)
class ToHF(Conversion):
    step: Annotated[int | None, described("N")] = None
    """Step of the checkpoint to export (default: the newest)."""
    max_shard_size: Annotated[str, described("SIZE")] = "5GB"
    """Maximum size of one safetensors file, e.g. 5GB or 500MB (default: 5GB)."""
    fp8: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Write projections in FP8 (E4M3) with a scale for each block of 128 x 128, as DeepSeek-V3 is published."""
    sign_key_file: Annotated[str, described("FILE")] = ""
    """Refuse a checkpoint that was not signed with this key (--checkpoint.sign_key_file of the run)."""


_DIRECTIONS: dict[str, tuple[Conversion, str, str]] = {
    "from-hf": (FromHF(), FROM_HF, "PATH"),
    "to-hf": (ToHF(), TO_HF, "RUN"),
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if argv[0] not in _DIRECTIONS:
        choices = ", ".join(_DIRECTIONS)
        return complain(PROG, [f"there is no {argv[0]!r}{did_you_mean(argv[0], _DIRECTIONS)} Choose from: {choices}"])
    default, description, first = _DIRECTIONS[argv[0]]
    prog = f"{PROG} {argv[0]}"
    folders, options = _without_folders(argv[1:])
    problems = load_user_code(options)
    command, not_understood = parse(type(default), default, options, f"{prog} {first} OUT", description)
    problems += not_understood
    if len(folders) != 2:
        problems.append(f"expected two folders, {first} and OUT, got {' '.join(folders) or 'none'}")
    if isinstance(command, ToHF) and not _num_bytes(command.max_shard_size):
        problems.append(f"--max_shard_size: {command.max_shard_size!r} is not a size such as 5GB or 500MB")
    if problems:
        return complain(prog, problems)
    return _run(prog, command, Path(folders[0]).expanduser(), Path(folders[1]).expanduser())


def _without_folders(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split argv into the folders, in any position, and the options with their values."""
    folders, given = split_options(argv)
    options: list[str] = []
    for option in given:
        num_values = 0 if option.name in ("verify", "mtp", "fp8") else 1
        rest = option.values[num_values:]
        folders += rest
        options += option.tokens[: len(option.tokens) - len(rest)]
    return folders, options


def _num_bytes(size: str) -> int:
    """Parse a size such as 5GB; 0 if it is invalid."""
    match = _SIZE.fullmatch(size.strip())
    return int(float(match[1]) * 1000 ** " KMG".index(match[2].upper() or " ")) if match else 0


def _run(prog: str, command: Conversion, source: Path, out: Path) -> int:
    try:
        with Console(stderr=True).status(f"converting {source}"):
            messages = _convert(command, source, out)
        print("\n".join(messages))
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
    import torch  # slow to import, so only once the options are valid

    settings: dict[str, Any] = {
        "dtype": None if command.dtype == "keep" else getattr(torch, command.dtype),
        "verify": command.verify,
    }
    if isinstance(command, FromHF):
        from spurline.hf.importing import import_folder

        return import_folder(source, out, with_mtp=command.mtp, **settings)
    from spurline.hf.exporting import export_run
    from spurline.hf.quantizing import BLOCK
    from spurline.train.checkpoint.signature import read_key

    assert isinstance(command, ToHF)
    settings |= {"max_shard_bytes": _num_bytes(command.max_shard_size), "sign_key": read_key(command.sign_key_file)}
    return export_run(source, out, command.step, fp8_block=BLOCK if command.fp8 else None, **settings)
