"""Seeded initial weights that depend on nothing but the seed and each parameter's name."""

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

INIT_STD = 0.02


def residual_std(num_layers: int) -> float:
    """Standard deviation for matrices that write into the residual stream, of which each layer has two."""
    return INIT_STD / (2 * num_layers) ** 0.5


def fill_truncated_normal(tensor: Tensor, std: float, generator: torch.Generator | None) -> None:
    """Fill `tensor` in place from a normal distribution truncated at three standard deviations."""
    nn.init.trunc_normal_(tensor, std=std, a=-3 * std, b=3 * std, generator=generator)


@torch.no_grad()
def initialize(model: nn.Module, seed: int) -> None:
    """Give every parameter and buffer of `model` its initial value, on any device and in any sharding.

    A module fills its own parameters in `init_parameter(name, tensor, generator)` and its buffers in `init_buffers()`.
    Each parameter has a generator of its own, so neither the order nor another parameter changes its value.
    """
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            _require(module, path, name, "init_parameter(name, tensor, generator)")
            value = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            module.init_parameter(name, value, _generator(seed, f"{path}.{name}" if path else name))
            _assign(parameter, value)
        for name, _ in module.named_buffers(recurse=False):
            _require(module, path, name, "init_buffers()")
        if hasattr(module, "init_buffers"):
            module.init_buffers()


def _require(module: nn.Module, path: str, name: str, method: str) -> None:
    # A model that was built on the meta device would otherwise train on uninitialized memory.
    if not hasattr(module, method.split("(")[0]):
        raise ValueError(
            f"{path or 'the model'} ({type(module).__name__}) owns {name} but has no initial value for it:"
            f" give its class a method {method}"
        )


def _generator(seed: int, name: str) -> torch.Generator:
    # Python's own hash() of a string differs from process to process.
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "little"))


def _assign(parameter: Tensor, value: Tensor) -> None:
    """Copy a full value into a parameter; every rank holds the same value, so a sharded one takes its part of it."""
    if isinstance(parameter, DTensor):
        on_device = value.to(parameter.device)
        parameter.copy_(distribute_tensor(on_device, parameter.device_mesh, parameter.placements, src_data_rank=None))
    else:
        parameter.copy_(value)
