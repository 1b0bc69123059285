"""Rules for the source tree: which package may import which, and how long a file may be."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "spurline").rglob("*.py"))

# From the top floor down. A module belongs to the room with the longest name that its own begins with, and may import
# from its own room and from lower floors; rooms of one floor do not know each other.
FLOORS = [
    ["spurline"],  # the names that users import
    ["spurline.__main__"],
    ["spurline.cli"],
    ["spurline.tools"],
    ["spurline.bench"],
    ["spurline.launch"],
    ["spurline.testing"],
    ["spurline.simulate"],
    ["spurline.hf.peft", "spurline.hf.upcycling"],
    # which read and write checkpoints
    ["spurline.hf.importing", "spurline.hf.exporting", "spurline.hf.merging", "spurline.report"],
    ["spurline.hf.verify"],
    ["spurline.train"],
    ["spurline.hf"],  # reading a folder: a run may start from one
    ["spurline.config_io", "spurline.plugins"],
    ["spurline.models"],
    ["spurline.parallel"],
    ["spurline.data", "spurline.moe"],
    ["spurline.lora"],
    ["spurline.comm", "spurline.config", "spurline.device"],
    ["spurline.accelerator", "spurline.hardware", "spurline.ops", "spurline.parameter_rules"],
    ["spurline.registry", "spurline.typed_json", "spurline.version"],
    ["spurline.files", "spurline.run_folders", "spurline.shared_folder", "spurline.spelling", "spurline.untrusted"],
    ["spurline.remote"],
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in FILES}


def room_of(module: str) -> str:
    while module not in FLOOR_OF:
        module = module.rpartition(".")[0]
    return module


def imports_of(path: Path) -> set[str]:
    """The modules of ours that a file imports: at its top, inside functions, and for type checking alike."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{path}, line {node.lineno}: import it by its full name"
            assert node.level == 0, f"{path}, line {node.lineno}: import it by its full name"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & MODULES.keys()) or {node.module}
    return {name for name in found if name.split(".")[0] == "spurline"}


def test_imports_point_downwards() -> None:
    found = []
    for module, path in MODULES.items():
        here = room_of(module)
        if here == "spurline" and module != "spurline":
            found.append(f"{module} is in no room: give it a floor")
            continue
        for target in sorted(imports_of(path)):
            there = room_of(target)
            if there != here and FLOOR_OF[there] <= FLOOR_OF[here]:
                found.append(f"{module} imports {target}, which is not below it")
    assert not found, "\n".join(found)


def test_files_stay_small() -> None:
    lines = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    too_long = {module: number for module, number in lines.items() if number > 400}
    assert not too_long, f"split by subject: {too_long}"


def test_only_the_device_file_knows_accelerators_by_name() -> None:
    word = "cu" + "da"
    knowing = [module for module, path in MODULES.items() if word in path.read_text()]
    assert knowing == ["spurline.config.training", "spurline.device"]  # the first by the values of an option
