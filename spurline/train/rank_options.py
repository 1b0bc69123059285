"""What all ranks of a run must have in common: options, code, versions. Compared at rendezvous."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from pathlib import Path
from typing import Any

import torch

from spurline.config import RunConfig
from spurline.typed_json import flattened


def options_of_rank(module: str, config_name: str, config: RunConfig[Any]) -> dict[str, str]:
    """Every option by its dotted name, the versions, and a hash of the code, as text."""
    packages = {"spurline", type(config.model).__module__.partition(".")[0]}
    return {
        "module": module,
        "config": config_name,
        **{name: str(value) for name, value in flattened(dataclasses.asdict(config)).items()},
        "the version of Python": sys.version.split()[0],
        "the version of PyTorch": torch.__version__,
        **{f"the code of {package}": code_hash(package) for package in sorted(packages)},
    }


def code_hash(package: str) -> str:
    """A hash of all Python files of a package, or of the file of a module without a folder."""
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is None:
        return "unknown"
    paths = sorted(Path(file).parent.rglob("*.py")) if Path(file).name == "__init__.py" else [Path(file)]
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(Path(file).parent)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]
