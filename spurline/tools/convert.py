"""`spurline convert`: import Hugging Face models as run folders, export checkpoints as Hugging Face models."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from spurline.remote import url_problems
from spurline.run_folders import find_run
from spurline.spelling import did_you_mean
from spurline.tools.console import complain, run_command
from spurline.tools.parsing import UserPackage, described, load_user_code, parse, take_arguments

PROG = "spurline convert"
HELP = """\
usage: spurline convert from-hf PATH OUT [options]
       spurline convert to-hf RUN OUT [options]
       spurline convert merge RUN OUT [options]
       spurline convert to-peft RUN OUT [options]
       spurline convert upcycle DENSE OUT [options]

  from-hf  Import a Hugging Face model as a run folder, to train or generate from.
  to-hf    Export a checkpoint of a run as a Hugging Face model.
  merge    Fold the adapters (LoRA) of a run into the weights of its base model.
  to-peft  Export the adapters of a run in peft's format.
  upcycle  Turn a dense model into a mixture of experts.

`spurline convert from-hf --help` and so on show their options."""
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
MERGE = """\
Fold the adapters of the run folder RUN (trained with --lora.rank) into the weights of
its base model (lora.base), as the new run folder OUT with a checkpoint of step 0: to
train, to generate from, to adapt again, or to export with `spurline convert to-hf`.

examples
  spurline convert merge outputs/qwen_lora outputs/qwen_merged
  spurline convert to-hf outputs/qwen_merged qwen-tuned --verify"""
TO_PEFT = """\
Export the adapters of the run folder RUN as the new folder OUT in peft's format:
adapter_config.json and adapter_model.safetensors.

examples
  spurline convert to-peft outputs/qwen_lora qwen-adapter --base_model Qwen/Qwen3-30B-A3B"""
UPCYCLE = """\
Turn a dense model (a run folder or a Hugging Face folder) into a mixture of experts, as the
new run folder OUT. The experts are copies of its feed-forward layers: without --noise the
new model computes the same function as the dense one, and the experts diverge in training.

examples
  spurline convert upcycle outputs/dense outputs/moe --experts 8 --top_k 2 --verify
  spurline convert upcycle Qwen3-0.6B outputs/qwen_moe --experts 16 --top_k 4 --split 2
  spurline train --config-file outputs/moe/config.json"""
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMG]?)B?", re.IGNORECASE)


@dataclass(frozen=True)
class Conversion:
    """Options common to both directions, from-hf and to-hf."""

    dtype: Literal["keep", "float32", "bfloat16"] = "keep"
    """Dtype of the written weights (keep: unchanged). The router's expert bias is never rounded."""
    verify: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Write only if the logits match transformers'; needs that package, and memory for both models."""
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
    """Write projections in FP8 (E4M3) with one scale per 128 x 128 block, as DeepSeek-V3 is published."""
    sign_key_file: Annotated[str, described("FILE")] = ""
    """Refuse a checkpoint that was not signed with this key (--checkpoint.sign_key_file of the run)."""


@dataclass(frozen=True)
class OfAdapters:
    """Options common to merge and to-peft."""

    step: Annotated[int | None, described("N")] = None
    """Step of the adapters' checkpoint (default: the newest)."""
    sign_key_file: Annotated[str, described("FILE")] = ""
    """Refuse a checkpoint that was not signed with this key (--checkpoint.sign_key_file of the run)."""
    import_: UserPackage = ""


@dataclass(frozen=True)
class Merge(OfAdapters):
    dtype: Literal["keep", "float32", "bfloat16"] = "keep"
    """Dtype of the written weights (keep: the base model's). The router's expert bias is never rounded."""


@dataclass(frozen=True)
class ToPeft(OfAdapters):
    base_model: Annotated[str, described("NAME")] = ""
    """The base model to name in adapter_config.json: a folder, or a name on the Hugging Face Hub
    (default: lora.base, if that is a Hugging Face folder)."""


@dataclass(frozen=True)
class Upcycle:
    """Options of upcycling."""

    experts: int = 8
    """Number of experts per layer."""
    top_k: int = 2
    """Number of experts per token."""
    split: int = 1
    """Split each copy into this many experts along its hidden width; --experts and --top_k must be multiples of it."""
    noise: float = 0.0
    """Standard deviation of the noise on the copies, relative to each matrix (0: same function as the dense model)."""
    router_std: float = 0.02
    """Standard deviation of the gates' initial weights."""
    dense_layers: int = 0
    """Number of leading layers that stay dense."""
    seed: int = 0
    """Random seed for the gates and the noise."""
    verify: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Compare the logits with the dense model's; without --noise, write only if they are the same."""
    step: Annotated[int | None, described("N")] = None
    """Step of the dense run's checkpoint (default: the newest)."""
    sign_key_file: Annotated[str, described("FILE")] = ""
    """Refuse a checkpoint that was not signed with this key (--checkpoint.sign_key_file of the run)."""
    import_: UserPackage = ""


COMMANDS: dict[str, tuple[Any, str, str]] = {
    "from-hf": (FromHF(), FROM_HF, "PATH"),
    "to-hf": (ToHF(), TO_HF, "RUN"),
    "merge": (Merge(), MERGE, "RUN"),
    "to-peft": (ToPeft(), TO_PEFT, "RUN"),
    "upcycle": (Upcycle(), UPCYCLE, "DENSE"),
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if argv[0] not in COMMANDS:
        choices = ", ".join(COMMANDS)
        return complain(PROG, [f"there is no {argv[0]!r}{did_you_mean(argv[0], COMMANDS)} Choose from: {choices}"])
    default, description, first = COMMANDS[argv[0]]
    prog = f"{PROG} {argv[0]}"
    folders, options = take_arguments(argv[1:], default)
    problems = load_user_code(options)
    command, not_understood = parse(type(default), default, options, f"{prog} {first} OUT", description)
    problems += not_understood
    if len(folders) != 2:
        problems.append(f"expected two folders, {first} and OUT, got {' '.join(folders) or 'none'}")
    else:
        problems += url_problems(first, folders[0]) + url_problems("OUT", folders[1])
    if isinstance(command, ToHF) and not _num_bytes(command.max_shard_size):
        problems.append(f"--max_shard_size: {command.max_shard_size!r} is not a size such as 5GB or 500MB")
    if problems:
        return complain(prog, problems)
    source, out = find_run(folders[0]), Path(folders[1]).expanduser()

    def run() -> int:
        with Console(stderr=True).status(f"converting {source}"):
            messages = _convert(command, source, out)
        print("\n".join(messages))
        return 0

    return run_command(prog, run, folders[1], interrupted="interrupted, nothing was written")


def _num_bytes(size: str) -> int:
    """Parse a size such as 5GB; 0 if it is invalid."""
    match = _SIZE.fullmatch(size.strip())
    return int(float(match[1]) * 1000 ** " KMG".index(match[2].upper() or " ")) if match else 0


def _convert(command: Any, source: Path, out: Path) -> list[str]:
    import torch  # slow to import, so only once the options are valid

    if isinstance(command, ToPeft):
        from spurline.hf.peft import export_adapters
        from spurline.train.checkpoint.signature import read_key

        return export_adapters(source, out, command.step, command.base_model, read_key(command.sign_key_file))
    if isinstance(command, Upcycle):
        from spurline.hf.upcycling import Recipe, upcycle
        from spurline.train.checkpoint.signature import read_key

        recipe = Recipe(**{field.name: getattr(command, field.name) for field in fields(Recipe)})
        return upcycle(source, out, recipe, command.verify, command.step, read_key(command.sign_key_file))
    dtype = None if command.dtype == "keep" else getattr(torch, command.dtype)
    if isinstance(command, Merge):
        from spurline.hf.merging import merge_run
        from spurline.train.checkpoint.signature import read_key

        return merge_run(source, out, command.step, dtype, read_key(command.sign_key_file))
    settings: dict[str, Any] = {"dtype": dtype, "verify": command.verify}
    if isinstance(command, FromHF):
        from spurline.hf.importing import import_folder

        return import_folder(source, out, with_mtp=command.mtp, **settings)
    from spurline.hf.exporting import export_run
    from spurline.hf.quantizing import BLOCK
    from spurline.train.checkpoint.signature import read_key

    assert isinstance(command, ToHF)
    settings |= {"max_shard_bytes": _num_bytes(command.max_shard_size), "sign_key": read_key(command.sign_key_file)}
    return export_run(source, out, command.step, fp8_block=BLOCK if command.fp8 else None, **settings)
