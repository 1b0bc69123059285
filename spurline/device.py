"""Devices: which one a process works on, and what it can do. The only file that names specific accelerators."""

import os
import re
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from spurline.hardware import find_hardware

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Environment variables that limit which devices a process sees."""


def pick_device(wanted: str = "auto", option: str = "training.device") -> torch.device:
    """The device of this process: accelerator number LOCAL_RANK, or the CPU; a ValueError if it is absent.

    If this process is limited to one accelerator (Slurm's --gpus-per-task=1), it is that one.
    auto is the accelerator that this PyTorch is built for, if this machine has one and every rank can have its own.
    Errors name `option`.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if wanted == "auto":
        wanted = accelerator.type if accelerator is not None and not _lacks_ranks(accelerator) else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != wanted:
        raise ValueError(f"{option} {wanted}: {_why_absent(wanted)}. Use --{option} auto or cpu")
    if _lacks_ranks(accelerator):
        raise ValueError(f"{option} {wanted} is one device: train on one rank, or use --{option} cpu")
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
    if count == 1 and any(os.environ.get(name) for name in _VISIBLE):  # the launcher gave this process one of its own
        index = 0
    if index >= count:
        raise ValueError(
            f"{option} {wanted}: this is process {index + 1} on this machine, which has {count} of them."
            f" Start at most {count} processes a machine, or use --{option} cpu"
        )
    return torch.device(wanted, index)


def _lacks_ranks(accelerator: torch.device) -> bool:
    """Whether several ranks were started, for an accelerator that has no collectives."""
    return accelerator.type == "mps" and int(os.environ.get("WORLD_SIZE", "1")) > 1


def _why_absent(name: str) -> str:
    """Why an accelerator of this name can't be used."""
    built_for = torch.accelerator.current_accelerator()
    if built_for is None or built_for.type != name:
        for_what = "CPUs alone" if built_for is None else f"{built_for.type} devices"
        return f"this PyTorch ({torch.__version__}) is built for {for_what}"
    return "PyTorch finds no such device here; check the driver, and that a device is visible to this process"


def is_accelerator(device: torch.device) -> bool:
    return device.type != "cpu"


def use_device(device: torch.device) -> None:
    """Make it the current device of this thread."""
    if is_accelerator(device) and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def start_process_group(device: torch.device, timeout_seconds: int, store: dist.Store, rank: int, size: int) -> None:
    """Initialize torch.distributed with the backend of the device: gloo on CPUs.

    A collective fails after waiting timeout_seconds (0: the backend's default) for a rank.
    """
    use_device(device)
    # A group that is bound to a device is split into groups of its backend: XCCL can't (pytorch#186548), and gloo
    # doesn't know XPUs.
    bound = device if device.type == "cuda" else None
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        timeout=timedelta(seconds=timeout_seconds) if timeout_seconds else None,
        store=store,
        rank=rank,
        world_size=size,
        device_id=bound,
    )


def limit_waiting(group: dist.ProcessGroup, timeout_seconds: int) -> None:
    """Have collectives of a group fail after waiting so long for a rank, if its backend can do that."""
    with suppress(RuntimeError):  # the backend has no timeouts
        group.set_timeout(timedelta(seconds=timeout_seconds))


def wait_for_all_ranks(device: torch.device) -> None:
    """Return when every rank has called this, and has done all collectives before."""
    dist.barrier(device_ids=[device.index] if is_accelerator(device) else None)


def can_skip_fused_adamw(device: torch.device) -> bool:
    """Whether PyTorch's fused AdamW on this device supports `found_inf`, which skips a step without a host read."""
    return device.type in ("cpu", "cuda", "xpu")


def has_grouped_mm_kernel(device: str, dtype: torch.dtype) -> bool:
    """Whether PyTorch's grouped matmul is one kernel for devices of this type, and not a loop that waits for offsets.

    It is for bfloat16 on NVIDIA's compute capabilities 9.x and 10.x, and with ROCm if a variable of PyTorch turns it on
    (pytorch#170159). If there is no device to query, as in a plan for another machine, it is assumed to be a kernel.
    """
    if device != "cuda" or dtype != torch.bfloat16:
        return False
    if torch.version.hip:
        return os.environ.get("ROCM_ALLOW_GROUP_GEMM_CK") == "1"
    return _compute_capability() in (None, 9, 10)


def has_doubtful_grouped_mm(device: str) -> bool:
    """Whether gradients of PyTorch's grouped matmul are reported to be wrong on devices of this type.

    On compute capabilities 10.x: NaN with PyTorch 2.13 (pytorch#193633), and gradients of empty groups that aren't zero
    (pytorch#172439).
    """
    return device == "cuda" and _compute_capability() == 10


def _compute_capability() -> int | None:
    """The major compute capability of NVIDIA's device; None with ROCm, and if there is no device to query."""
    return None if torch.version.hip or not torch.cuda.is_available() else torch.cuda.get_device_capability()[0]


TRITON_TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_86": ("cuda", 86, 32),
    "sm_89": ("cuda", 89, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_103": ("cuda", 103, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx90a": ("hip", "gfx90a", 64),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
"""The architectures that our kernels have tile sizes for, as Triton's backend, architecture and warp size."""


def can_run_triton(device: str) -> bool:
    """Whether our Triton kernels support devices of this type: NVIDIA's, and AMD's with ROCm."""
    return device == "cuda"


@cache
def architecture(device: torch.device) -> str:
    """The architecture of a device that runs Triton, such as sm_90 or gfx942; empty for others."""
    if device.type != "cuda":
        return ""
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which this is the current device, on which libraries such as Triton launch kernels."""
    return torch.accelerator.device_index(device.index) if is_accelerator(device) else nullcontext()


def lacks_8_bit_products(device: torch.device, recipe: str) -> str:
    """What a device lacks for torchao's matmuls of this recipe, linear and grouped; empty if nothing."""
    if device.type != "cuda":
        return f"has no 8-bit matmuls on {device.type} devices"
    if torch.version.hip:
        has_them = recipe == "float8" and architecture(device).startswith(("gfx94", "gfx95"))
        return "" if has_them else f"has no 8-bit matmuls on {architecture(device)}"
    major = torch.cuda.get_device_capability(device)[0]
    allowed = (10,) if recipe == "mxfp8" else (9, 10)
    return "" if major in allowed else f"needs compute capability {' or '.join(f'{number}.x' for number in allowed)}"


def peak_memory_bytes(device: torch.device) -> int | None:
    """Peak allocated memory of the device where PyTorch knows it, or peak resident memory of this process on a CPU."""
    if not is_accelerator(device):
        return process_peak_memory_bytes()
    module = torch.get_device_module(device)
    return module.max_memory_allocated(device) if hasattr(module, "max_memory_allocated") else None


def process_peak_memory_bytes() -> int | None:
    """Peak resident memory of this process; None where it is not available (Windows)."""
    # On Linux, ru_maxrss is inherited from the parent process, VmHWM is not.
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    if found := re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE):
        return int(found[1]) * 1024
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak dense matmul FLOP/s of one device; None unless hardware.py lists the device and dtype is bfloat16."""
    if device.type not in ("cuda", "xpu") or dtype != torch.bfloat16:
        return None
    known = find_hardware(torch.get_device_module(device).get_device_name(device))
    return known.bf16_flops if known else None
