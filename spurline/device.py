"""The one file that knows which devices there are."""

import torch


def pick_device() -> torch.device:
    """The accelerator of this process if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most memory held at once: of the device, or of this process where the device is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    from spurline.train.metrics import peak_memory_bytes as of_process

    return of_process()
