"""Read Hugging Face folders, and create new folders atomically."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spurline import files, untrusted
from spurline.config_io import ConfigError
from spurline.hf.safetensors_file import Stored, read_header
from spurline.hf.settings import read_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FOLDER = "tokenizer"
"""Subfolder of a run folder with the files below and the original config.json."""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
TEMPLATES = "additional_chat_templates/*.jinja"


def find_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors in the folder's safetensors files, by name; raises a ValueError if index and files disagree."""
    if (folder / INDEX).exists():
        return _by_index(folder)
    if (folder / WEIGHTS).exists():
        _refuse_others(folder, {WEIGHTS})
        return read_header(folder / WEIGHTS)
    other = sorted(path.name for path in folder.glob("*.bin"))
    instead = f"; {other[0]} has an unsupported format: save the model again as safetensors" if other else ""
    raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX}{instead}")


def _by_index(folder: Path) -> dict[str, Stored]:
    path = folder / INDEX
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{path} has no weight_map of tensors to files")
    if not all(name.isprintable() for name in weight_map):
        raise ValueError(f"{path} names a tensor with invisible characters")
    file_names = sorted(set(weight_map.values()))
    if outside := [name for name in file_names if not untrusted.is_plain_name(name)]:
        raise ValueError(f"{path} names {outside[0]!r}, which is not a file of the same folder")
    if missing := [name for name in file_names if not (folder / name).is_file()]:
        raise ConfigError([f"{folder / name} is missing, but is listed in {INDEX}" for name in missing])
    _refuse_others(folder, set(file_names))
    problems: list[str] = []
    found: dict[str, Stored] = {}
    for file_name in file_names:
        tensors = read_header(folder / file_name)
        named = {tensor for tensor, file in weight_map.items() if file == file_name}
        problems += [
            f"{folder / file_name} has no tensor {name}, but {INDEX} lists it there" for name in named - set(tensors)
        ]
        for name in tensors.keys() - named:
            place = f"lists it in {weight_map[name]}" if name in weight_map else "does not list it"
            problems.append(f"{folder / file_name} has tensor {name}, but {INDEX} {place}")
        found |= tensors
    if problems:
        raise ConfigError(at_most(sorted(problems)))
    return found


def _refuse_others(folder: Path, known: set[str]) -> None:
    """Raise an error for safetensors files that are not listed, such as an adapter or leftovers of another model."""
    others = sorted({path.name for path in folder.glob("*.safetensors")} - known)
    if others:
        where = INDEX if (folder / INDEX).exists() else WEIGHTS
        raise ValueError(
            f"{folder} has {', '.join(others)} in addition to the weights of {where}: remove the files of other models"
        )


def at_most(problems: list[str], count: int = 10) -> list[str]:
    """The first `count` problems, and the number of remaining ones."""
    more = len(problems) - count
    return problems if more <= 1 else [*problems[:count], f"and {more} more"]


def copy_tokenizer(source: Path, target: Path) -> list[str]:
    """Copy the tokenizer files that exist, and return their names."""
    names = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    names += sorted(f"{path.relative_to(source)}" for path in source.glob(TEMPLATES) if path.is_file())
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)
    return names


def import_tokenizer(source: Path, run_folder: Path) -> list[str]:
    """Copy the tokenizer files of a folder, and its config.json, into a new run folder; returns the tokenizer files."""
    target = run_folder / TOKENIZER_FOLDER
    target.mkdir()
    if (source / "config.json").is_file():
        shutil.copyfile(source / "config.json", target / "config.json")
    return copy_tokenizer(source, target)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder that becomes `out` at the end; errors leave nothing behind, OSErrors become ValueErrors."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: choose another name or remove it")
    try:
        with files.new_folder(out) as temporary:
            yield temporary
    except OSError as error:
        raise ValueError(f"{error.filename or out}: {error.strerror or error}") from error
