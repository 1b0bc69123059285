"""The one file that knows which devices there are."""

import os

import torch
import torch.distributed as dist


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
    from spurline.train.metrics import peak_memory_bytes as of_process

    return of_process()
