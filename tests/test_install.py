"""What `make` and `pip install` put into an environment, and what training needs of it."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
needs_make = pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")


def commands_of(*words: str, **variables: str) -> list[str]:
    """What make would run in a new clone."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "TORCH")}
    command = ["make", "-n", "-B", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment | variables, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@needs_make
def test_make_train_installs_what_runs_need_and_make_test_the_tools() -> None:
    train, test = commands_of("train"), commands_of("lint")
    assert not any("[dev]" in command for command in train)
    assert any("--editable '.[dev]'" in command for command in test)
    assert [command for command in train if "--editable" in command] == [
        ".venv/bin/python -m pip install --quiet --constraint constraints.txt --editable ."
    ]


@needs_make
def test_torch_is_a_cpu_build_first_and_the_plain_pin_where_there_is_none() -> None:
    (torch,) = (command for command in commands_of("train") if "torch==2.13.0" in command)
    first, _, second = torch.partition(" || ")
    assert first == (
        ".venv/bin/python -m pip install --quiet --retries 0 --timeout 5 --index-url https://download.pytorch.org/whl/cpu"
        " torch==2.13.0 2>/dev/null"
    )
    assert second.endswith(".venv/bin/python -m pip install --quiet torch==2.13.0; }")


@needs_make
def test_another_torch_is_taken_as_it_is_said() -> None:
    commands = commands_of("train", "TORCH=torch --index-url https://example.org/whl/x")
    assert ".venv/bin/python -m pip install --quiet torch --index-url https://example.org/whl/x" in commands
    assert not any("whl/cpu" in command for command in commands)


@needs_make
def test_an_image_without_a_choice_of_torch_has_the_cpu_build() -> None:
    """Docker passes a build argument that nobody gave as an empty variable."""
    assert "\nARG TORCH=\n" in (ROOT / "Dockerfile").read_text()
    assert commands_of(".venv/.ready", TORCH="") == commands_of(".venv/.ready")
    assert commands_of(".venv/.ready", "TORCH=") == commands_of(".venv/.ready")


def test_constraints_pin_packages_of_the_project_and_are_what_the_image_is_built_from() -> None:
    pins = re.findall(r"^([\w.-]+)==[\w.]+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    wanted = (ROOT / "pyproject.toml").read_text() + "fsspec"
    assert len(pins) > 20
    assert [name for name in pins if name not in wanted] == []
    assert "torch" not in pins  # the Makefile's TORCH chooses it
    assert "COPY Makefile constraints.txt pyproject.toml" in (ROOT / "Dockerfile").read_text()
    assert '"dockerfile": "../Dockerfile"' in (ROOT / ".devcontainer/devcontainer.json").read_text()


def test_commands_for_users_install_a_build_that_the_tested_pytorch_has() -> None:
    """An index without it would give an older PyTorch, which `pip install .` then replaces by another build."""
    page, doctor = (ROOT / "docs/install.md").read_text(), (ROOT / "spurline/tools/doctor.py").read_text()
    tested = re.search(r"^CPU_TORCH := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    installed = re.findall(r"(?<=pip install )(?:--\S+ )*(torch\S*?)(?=[`\s])", page + doctor)
    assert len(installed) == 8
    assert set(installed) == {tested}
    builds = set(re.findall(r"(?:whl/|`|\")(cpu|cu\d+|rocm[\d.]+|xpu)\b", page + doctor))
    assert builds == {"cpu", "cu126", "cu130", "cu132", "rocm7.2", "xpu"}  # those of 2.13.0


def test_what_tests_need_comes_with_the_tools_and_what_is_skipped_is_printed() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    extras = re.search(r'^dev = \[\n    "spurline\[([a-z,]+)\]"', text, re.MULTILINE)[1].split(",")
    assert {"lowprecision", "triton"} <= set(extras)
    assert re.search(r'^addopts = ".* -rs ', text, re.MULTILINE)
    if os.environ.get("CI") and sys.platform == "linux":  # there, nothing may be skipped for lack of them
        assert [name for name in ("torchao", "triton") if importlib.util.find_spec(name) is None] == []


WITHOUT = """
import sys
from importlib.machinery import PathFinder
found = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name.split(".")[0] in {blocked!r} else found(name, *more)
from spurline.cli import main
sys.exit(main(sys.argv[1:]))
"""


def requirements_of(name: str, found: set[str]) -> set[str]:
    """The distributions that `pip install NAME` brings, without extras."""
    name = re.sub(r"[-_.]+", "-", name).lower()
    if name in found:
        return found
    try:
        lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return found
    found.add(name)
    for line in lines:
        if "extra ==" not in line:
            requirements_of(re.split(r"[\s\[<>=!~;(]", line, maxsplit=1)[0], found)
    return found


def test_training_needs_nothing_but_what_a_plain_install_brings(tmp_path: Path) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    own = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)[1]
    needed: set[str] = set()
    for line in re.findall(r'"([\w.-]+)', own):
        requirements_of(line, needed)
    assert {"torch", "numpy", "tyro"} <= needed
    owners = importlib.metadata.packages_distributions()
    blocked = {
        module
        for module, names in owners.items()
        if not {re.sub(r"[-_.]+", "-", name).lower() for name in names} & {*needed, "spurline", "pip", "setuptools"}
    }
    assert {"transformers", "tensorboard", "safetensors", "pyarrow"} & set(owners) <= blocked
    small = "--training.steps 1 --training.seq_len 16 --training.local_batch_size 1 --metrics.sample_tokens 2"
    command = ["train", "--config", "deepseek_v3_first", *small.split(), "--metrics.validation_batches", "1"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(blocked=blocked), *command, "--job.dump_folder", "run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "metrics.jsonl").exists()
