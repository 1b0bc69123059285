import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from spurline.tools import doctor

ROOT = Path(__file__).parent.parent.parent


def findings(spurline):
    """{name: finding} of all parts."""
    code, out, err = spurline("doctor", "--json")
    assert (code, err) == (0, "")
    return {finding["name"]: finding for part in json.loads(out).values() for finding in part}


def test_the_table_is_aligned_and_says_what_works(spurline):
    code, out, err = spurline("doctor")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    headings = [line for line in lines if not line.startswith(" ")]
    assert headings == ["versions", "extras", "devices", "backends", "compile", "kernels", "dispatchers"]
    rows = [re.fullmatch(r"  (ok |off)  (.+?)  +(\S.*)", line) for line in lines if re.match(r"  \S", line)]
    assert all(rows)
    assert len({row.start(3) for row in rows}) == 1
    assert any(row[2] == "torch" and row[3] == torch.__version__ for row in rows)


def test_json_has_what_torch_says(spurline):
    found = findings(spurline)
    assert found["torch"]["detail"] == torch.__version__
    assert found["threads"]["detail"] == f"{torch.get_num_threads()} per rank"
    assert found["gloo"]["works"] == torch.distributed.is_gloo_available()
    assert found["bfloat16"]["works"] == any(
        torch.cpu.get_capabilities().get(key, False) for key in ("avx512_bf16", "amx_bf16", "bf16")
    )


def test_kernels_for_the_experts_at_hand(spurline):
    code, out, err = spurline("doctor", "--json", "--dim", "64", "--hidden_dim", "18", "--dtype", "float32")
    assert (code, err) == (0, "")
    kernels = {finding["name"]: finding for finding in json.loads(out)["kernels"]}
    assert len(kernels) == 4 * 5
    chosen = [name for name, finding in kernels.items() if finding["detail"].startswith("chosen: ")]
    if not torch.accelerator.is_available():
        assert chosen == [
            "train: stream",
            "train, equal rows: stream",
            "evaluate: stream",
            "evaluate, equal rows: bmm",
        ]
    assert not kernels["train: grouped_mm"]["works"]
    assert "hidden_dim 18" in kernels["train: grouped_mm"]["detail"]


def test_a_missing_extra_comes_with_its_command(spurline, monkeypatch):
    def version(package):
        if package in ("jinja2", "torch"):
            raise doctor.importlib.metadata.PackageNotFoundError
        return "1.0"

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    found = findings(spurline)
    assert not found["hf"]["works"]
    assert found["hf"]["detail"].endswith(": jinja2 not installed")
    assert found["hf"]["hint"] == "pip install 'spurline[hf]'"
    assert found["data"]["works"]
    assert found["data"]["detail"].endswith(": pyarrow 1.0, datasets 1.0")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_an_accelerator_that_this_build_does_not_use_comes_with_one_that_does(spurline, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_DRIVERS", {str(tmp_path / "none"): ("A", "a"), str(tmp_path): ("B", "b1")})
    found = findings(spurline)["accelerator"]
    assert found["detail"] == "B's driver is loaded, but this PyTorch build does not use it"
    assert "torch==2.13.0 --index-url https://download.pytorch.org/whl/b1" in found["hint"]
    monkeypatch.setattr(doctor, "_DRIVERS", {})
    assert "docs/install.md" in findings(spurline)["accelerator"]["hint"]


def test_every_extra_for_users_is_looked_at():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, requirements in extras.items():
        if extra != "dev":
            packages = tuple(re.match(r"[\w-]+", requirement)[0] for requirement in requirements)
            assert doctor.EXTRAS[extra][0] == packages


def test_without_a_compiler_it_says_what_to_install_and_what_still_works(spurline, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    found = findings(spurline)
    assert not found["inductor, cpu"]["works"]
    assert "g++" in found["inductor, cpu"]["hint"]
    assert "aot_eager" in found


def test_a_compiler_that_lacks_headers_is_told_in_its_words(spurline, monkeypatch, tmp_path):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho '<stdin>:1: Python.h: no such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    found = findings(spurline)["inductor, cpu"]
    assert not found["works"]
    assert found["detail"].endswith("c++: <stdin>:1: Python.h: no such file")


def test_threads_held_down_by_the_environment_are_told(spurline, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"num_physical_cores": 4})
    found = findings(spurline)
    assert not found["threads"]["works"]
    assert "OMP_NUM_THREADS" in found["threads"]["hint"]
    assert not found["bfloat16"]["works"]
    assert "--training.dtype float32" in found["bfloat16"]["hint"]


def test_an_unknown_option_is_told(spurline):
    assert spurline("doctor", "--jsn") == (2, "", "spurline doctor: --jsn: no such option. Did you mean --json?\n")


def test_help_and_reports_leave_torch_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    code = (
        "import contextlib, sys\nfrom spurline.cli import main\n"
        "for argv in (['doctor', '--help'], ['report', '--help']):\n"
        "    with contextlib.suppress(SystemExit): main(argv)\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()\n"
        "main(['report', '.'])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "report.html").exists()


def test_pipeline_schedules_of_this_pytorch_are_listed(spurline):
    found = findings(spurline)["pipeline"]
    assert found["works"]
    assert found["detail"] == "schedules GPipe, 1F1B, Interleaved1F1B, InterleavedZeroBubble, ZBV, DualPipeV"
