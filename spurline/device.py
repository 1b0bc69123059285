"""The one file that knows which devices there are."""

import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist

# Dense matrix products in bfloat16, operations a second, by what a device calls itself; the first that fits counts.
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
    "MI250X": 191.5e12,  # one of its two dies, which is what a process sees
}


def pick_device() -> torch.device:
    """The accelerator of this process if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def start_process_group(device: torch.device) -> None:
    """Join the ranks that torchrun started: over nccl on accelerators, over gloo on CPUs."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most memory held at once: of the device, or of this process where the device is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return process_peak_memory_bytes()


def process_peak_memory_bytes() -> int | None:
    """The most memory this process has held at once, or None where the system doesn't say (Windows)."""
    # First what Linux says: its getrusage also counts what the process that started this one had held.
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
    """The most operations a second that one device can do in matrix products, where it is known: in bfloat16 alone."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in _PEAK_BF16_FLOPS.items() if known in name), None)
