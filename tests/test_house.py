"""The rules of the house: which room may import which, and how large a file may grow."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "spurline"
FILES = sorted(PACKAGE.rglob("*.py"))

# A room may import the rooms after it in this list, never the ones before.
FLOORS = ["cli", "tools", "train", "models", "parallel", "moe", "ops"]
# parallel and moe share a floor: a dispatch across ranks is made of collectives and sequence arithmetic.
SHARED = {
    "spurline.parallel.collectives",
    "spurline.parallel.sequence",
    "spurline.parallel.local",
    "spurline.parallel.sequence_parallel",
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def floor(module: str) -> str | None:
    parts = module.split(".")
    if parts[:3] == ["spurline", "moe", "ops"]:
        return "ops"
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else None


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("spurline.")}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_downwards(path: Path) -> None:
    here = floor(module_name(path))
    if here is None:
        return
    for target in imports_of(path):
        there = floor(target)
        if there is None or any(target == s or target.startswith(s + ".") for s in SHARED):
            continue
        assert FLOORS.index(there) >= FLOORS.index(here), f"{module_name(path)} imports {target}, which is above it"


def test_data_and_moe_know_no_model_and_no_trainer() -> None:
    for path in FILES:
        if module_name(path).startswith(("spurline.data", "spurline.moe")):
            upstairs = {t for t in imports_of(path) if floor(t) in ("cli", "tools", "train", "models")}
            assert not upstairs, f"{module_name(path)} imports {upstairs}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_files_stay_small(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= 400, f"{module_name(path)} has {lines} lines: split it by subject"


def test_only_the_device_file_knows_accelerators_by_name() -> None:
    word = "cu" + "da"
    found = [module_name(path) for path in FILES if word in path.read_text()]
    assert found == ["spurline.device"]
