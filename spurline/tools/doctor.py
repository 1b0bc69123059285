"""`spurline doctor`: report versions, devices, backends and compilers, and how to enable what is missing."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from spurline.tools.console import complain
from spurline.tools.parsing import described, parse
from spurline.version import __version__

PROG = "spurline doctor"
DESCRIPTION = """\
Show the environment: versions, optional packages, devices, CPU features, process
group backends, compilers, and which kernel computes experts of a given size.
Whatever is unavailable is listed as off, with the reason and how to enable it."""
# extra: (its packages, what they are for)
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "hf": (("safetensors", "jinja2"), "Hugging Face checkpoints and chat templates"),
    "data": (("pyarrow", "datasets"), "Parquet and Hugging Face datasets"),
    "images": (("pillow",), "image data"),
    "tensorboard": (("tensorboard",), "TensorBoard event files"),
    "wandb": (("wandb",), "Weights & Biases"),
    "triton": (("triton",), "the experts kernel for NVIDIA's and AMD's accelerators"),
    "lowprecision": (("torchao",), "float8 and MXFP8 matmuls on accelerators"),
    "remote": (("fsspec", "s3fs"), "checkpoints in object stores"),
    "docs": (("mkdocs-material", "mkdocstrings"), "the documentation site, make docs"),
    "peers": (("transformers", "torchtitan", "triton"), "libraries that spurline bench compares with"),
}


@dataclass(frozen=True)
class Command:
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Print JSON instead of a table."""
    dim: Annotated[int, described()] = 1024
    """Model width of the experts whose kernels are listed."""
    hidden_dim: Annotated[int, described()] = 512
    """Hidden width of one expert."""
    dtype: Annotated[Literal["float32", "bfloat16", "float16", "float64"], described()] = "float32"
    """Dtype of the activations."""


@dataclass(frozen=True)
class Finding:
    name: str
    works: bool
    detail: str
    hint: str = ""
    """How to fix it."""


def main(argv: list[str]) -> int:
    command, problems = parse(Command, Command(), argv, PROG, DESCRIPTION)
    if problems:
        return complain(PROG, problems)
    found = examine(command)
    if command.json:
        content = {part: [dataclasses.asdict(finding) for finding in findings] for part, findings in found.items()}
        print(json.dumps(content, indent=2))
    else:
        _print(found)
    return 0


def examine(command: Command) -> dict[str, list[Finding]]:
    return {
        "versions": _versions(),
        "extras": _extras(),
        "devices": [*_cpu(), *_accelerators()],
        "backends": _backends(),
        "compile": _compile(),
        "kernels": _kernels(command),
        "dispatchers": _dispatchers(),
    }


def _versions() -> list[Finding]:
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    packages = [Finding(name, True, _version(name) or "?") for name in ("torch", "numpy")]
    return [
        Finding("spurline", True, __version__),
        Finding("python", True, f"{platform.python_version()} on {system}"),
        *packages,
    ]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _extras() -> list[Finding]:
    findings = []
    for extra, (packages, purpose) in EXTRAS.items():
        versions = {package: _version(package) for package in packages}
        missing = [package for package, version in versions.items() if version is None]
        if missing:
            hint = f"pip install 'spurline[{extra}]'"
            findings.append(Finding(extra, False, f"{purpose}: {' and '.join(missing)} not installed", hint))
        else:
            installed = ", ".join(f"{package} {version}" for package, version in versions.items())
            findings.append(Finding(extra, True, f"{purpose}: {installed}"))
    return findings


def _cpu() -> list[Finding]:
    import torch

    can = torch.cpu.get_capabilities()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name = can.get("cpu_name") or platform.processor() or "cpu"
    few_threads = torch.get_num_threads() < can.get("num_physical_cores", 1) and "OMP_NUM_THREADS" in os.environ
    vectors = [label for label, key in _VECTORS.items() if can.get(key)]
    native = [label for label, key in _BF16.items() if can.get(key)]
    return [
        Finding("cpu", True, f"{name}, {cores} cores{_memory()}"),
        Finding(
            "threads",
            not few_threads,
            f"{torch.get_num_threads()} per rank",
            "OMP_NUM_THREADS is lower than the number of cores; --training.threads overrides it" if few_threads else "",
        ),
        Finding("vector ISA", bool(vectors), ", ".join(vectors) or "no AVX2, AVX-512, AMX, NEON or SVE"),
        Finding(
            "bfloat16",
            bool(native),
            f"{', '.join(native)} instructions" if native else "no CPU instructions for it",
            "" if native else "bfloat16 is slow on this CPU: train with --training.dtype float32",
        ),
        _allocator(),
    ]


_VECTORS = {"AVX2": "avx2", "AVX-512": "avx512_f", "AMX": "amx_tile", "NEON": "neon", "SVE": "sve"}
_BF16 = {"AVX-512": "avx512_bf16", "AMX": "amx_bf16", "NEON": "bf16"}


def _memory() -> str:
    try:
        found = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return ""
    return f", {int(found[1]) * 1024 / 1e9:.0f} GB" if found else ""


def _allocator() -> Finding:
    """The malloc implementation of this process, which determines the cost of large temporaries on a CPU."""
    try:
        loaded = re.search(r"(jemalloc|tcmalloc|mimalloc)", Path("/proc/self/maps").read_text())
    except OSError:
        loaded = None
    if loaded:
        return Finding("allocator", True, loaded[1])
    return Finding("allocator", True, "system malloc")


def _accelerators() -> list[Finding]:
    import torch

    from spurline.device import peak_flops

    kind = torch.accelerator.current_accelerator(check_available=True) if torch.accelerator.is_available() else None
    if kind is None:
        return [_no_accelerator()]
    findings = []
    for index in range(torch.accelerator.device_count()):
        device = torch.device(kind.type, index)
        name = "Apple GPU" if kind.type == "mps" else torch.get_device_module(device).get_device_name(device)
        peak = peak_flops(device, torch.bfloat16)
        known = f"{peak / 1e12:.0f} TFLOP/s in bfloat16" if peak else "peak FLOP/s unknown, so MFU is not reported"
        findings.append(Finding(str(device), True, f"{name}, {known}"))
    return findings


# file that the driver creates: (vendor of the accelerator, index of PyTorch's builds for it)
_DRIVERS = {
    "/dev/nvidiactl": ("NVIDIA", "cu130"),
    "/dev/kfd": ("AMD", "rocm7.2"),
    "/sys/module/xe": ("Intel", "xpu"),
}


def _no_accelerator() -> Finding:
    """Report an accelerator whose driver is loaded, if any, and the PyTorch build that can use it."""
    for path, (maker, build) in _DRIVERS.items():
        if Path(path).exists():
            hint = f"pip install --force-reinstall torch==2.13.0 --index-url https://download.pytorch.org/whl/{build}"
            detail = f"{maker}'s driver is loaded, but this PyTorch build does not use it"
            return Finding("accelerator", False, detail, f"{hint}; other versions: docs/install.md")
    hint = "training runs on the CPU; builds for accelerators: docs/install.md"
    return Finding("accelerator", False, "no driver of NVIDIA, AMD or Intel is loaded", hint)


def _dispatchers() -> list[Finding]:
    from spurline.moe.dispatch.libraries import LIBRARIES, missing_library
    from spurline.moe.registry import DISPATCHERS

    findings = []
    for name in DISPATCHERS:
        library = LIBRARIES.get(name)
        if library is None:
            findings.append(Finding(name, True, "needs nothing but PyTorch"))
        elif missing_library(name):
            hint = f"from {library.source}, NVIDIA GPUs only"
            findings.append(Finding(name, False, f"{library.name} is not installed", hint))
        else:
            findings.append(Finding(name, True, f"by {library.name}"))
    return findings


def _backends() -> list[Finding]:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return [Finding("distributed", False, "not in this PyTorch build", "only single-rank training is possible")]
    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    wanted = torch.accelerator.is_available()
    not_needed = "not needed without an accelerator"
    missing = "not in this PyTorch build" if wanted else f"not in this PyTorch build, {not_needed}"
    return [
        Finding(
            "gloo",
            gloo,
            "for CPU ranks" if gloo else "not in this PyTorch build: no training on CPU ranks",
            "" if gloo else "install a build from pytorch.org: docs/install.md",
        ),
        Finding(
            "nccl",
            nccl and wanted,
            "for accelerator ranks" if nccl and wanted else missing if not nccl else not_needed,
            "install a PyTorch build for this accelerator: docs/install.md" if wanted and not nccl else "",
        ),
        _pipeline_schedules(),
    ]


def _pipeline_schedules() -> Finding:
    from torch.distributed.pipelining.schedules import get_schedule_class

    from spurline.parallel.stages import SCHEDULES

    missing = []
    for name, schedule in SCHEDULES.items():
        try:
            get_schedule_class(schedule.torch_name)
        except ValueError:
            missing.append(name)
    if missing:
        return Finding("pipeline", False, f"this PyTorch lacks the schedules {', '.join(missing)}", "use another one")
    return Finding("pipeline", True, f"schedules {', '.join(SCHEDULES)}")


def _compile() -> list[Finding]:
    import torch

    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if not compiler:
        cpu = Finding("inductor, cpu", False, "no C++ compiler found", "install g++ or clang++, or set CXX")
    elif trouble := _first_error(compiler):
        hint = "install the C++ standard library and this Python's headers (python3-dev)"
        cpu = Finding("inductor, cpu", False, f"{compiler}: {trouble}", hint)
    else:
        cpu = Finding("inductor, cpu", True, f"with {compiler}")
    findings = [cpu]
    if torch.accelerator.is_available():
        has_triton = importlib.util.find_spec("triton") is not None
        detail = "with triton" if has_triton else "triton is not installed"
        findings.append(
            Finding("inductor, accelerator", has_triton, detail, "" if has_triton else "pip install triton")
        )
    if not all(finding.works for finding in findings):
        findings.append(Finding("aot_eager", True, "--compile.backend aot_eager needs no compiler"))
    return findings


def _kernels(command: Command) -> list[Finding]:
    """For each workload, each kernel's verdict, starting with the one that `experts_backend auto` chooses."""
    import torch

    from spurline.device import pick_device
    from spurline.moe.kernels.choose import verdicts
    from spurline.moe.kernels.kernel import Work

    device, dtype = pick_device().type, getattr(torch, command.dtype)
    findings = []
    for rows, equal_rows, grad in (
        ("train", None, True),
        ("train, equal rows", 64, True),
        ("evaluate", None, False),
        ("evaluate, equal rows", 64, False),
    ):
        work = Work("swiglu", device, dtype, command.dim, command.hidden_dim, equal_rows, grad)
        for place, (kernel, verdict) in enumerate(verdicts(work).items()):
            chosen = "chosen: " if place == 0 else ""
            findings.append(Finding(f"{rows}: {kernel}", verdict.score > 0, chosen + verdict.why))
    return findings


def _first_error(compiler: str) -> str:
    """The compiler's first error on a file with the headers that inductor's code includes; empty if it compiles."""
    command = [compiler, "-fsyntax-only", "-x", "c++", f"-I{sysconfig.get_path('include')}", "-"]
    source = "#include <Python.h>\n#include <vector>\n"
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    return (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]


def _print(found: dict[str, list[Finding]]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    width = max(len(finding.name) for findings in found.values() for finding in findings)
    for part, findings in found.items():
        console.print(Text(part, style="bold"))
        for finding in findings:
            mark = Text("  ok   ", style="green") if finding.works else Text("  off  ", style="yellow")
            console.print(mark + Text(f"{finding.name:<{width}}  {finding.detail}"))
            if finding.hint:
                console.print(Text(" " * (width + 9) + finding.hint, style="cyan"))
