"""Device selection. The only file that names specific accelerators."""

import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist

# Peak dense bfloat16 FLOP/s by a substring of the device name; the first match applies, so longer names come first.
_PEAK_BF16_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200 NVL": 836e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "MI325X": 1307e12,
    "MI300X": 1307e12,
    "MI250X": 191.5e12,  # one of its two dies: each is a device of its own
}


def pick_device() -> torch.device:
    """The accelerator of this process (by LOCAL_RANK) if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def start_process_group(device: torch.device) -> None:
    """Initialize torch.distributed from torchrun's environment: nccl on accelerators, gloo on CPUs."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")


def peak_memory_bytes(device: torch.device) -> int | None:
    """Peak allocated memory of the device, or peak resident memory of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return process_peak_memory_bytes()


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
    """Peak dense matmul FLOP/s of one device; None unless the device is listed above and dtype is bfloat16."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in _PEAK_BF16_FLOPS.items() if known in name), None)
