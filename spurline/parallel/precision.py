"""Convert layers of a model, selected by name, to 8-bit matmuls."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import nn

from spurline.config import Precision
from spurline.device import lacks_8_bit_products
from spurline.ops.low_precision import LowPrecision
from spurline.ops.torchao_products import MULTIPLES, has_torchao


def convert_layers(model: nn.Module, section: Precision, device: torch.device) -> None:
    """Convert the matching layers, in place; a ValueError if a pattern matches none, or the device can't.

    Layers that can be converted have an attribute `precision`: linear layers, experts and shared experts.
    """
    if section.recipe == "none":
        return
    native = device.type not in ("cpu", "meta") and not section.emulate
    if native and (problem := _missing(section, device)):
        raise ValueError(f"precision.recipe {section.recipe} {problem}")
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "precision")}
    for pattern in section.layers:
        named = [name for name in layers if _matches(name, pattern)]
        if not named:
            raise ValueError(
                f"precision.layers {pattern!r} names no layer that can be converted. There are, among others,"
                f" {', '.join(_examples(layers))}"
            )
        for name in named:
            if native:
                _check_widths(name, layers[name], section.recipe)
            layers[name].precision = LowPrecision(section.recipe, section.grad_dtype, native)


def converted_layers(model: nn.Module) -> dict[str, int]:
    """The converted layers, with block indices as `*`, and how many there are of each."""
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if getattr(module, "precision", None) is not None:
            alike = ".".join("*" if part.isdigit() else part for part in name.split("."))
            found[alike] = found.get(alike, 0) + 1
    return found


def _missing(section: Precision, device: torch.device) -> str:
    """What this recipe lacks on this device, if anything."""
    if problem := lacks_8_bit_products(device, section.recipe):
        return f"{problem}. --precision.emulate rounds operands and multiplies in training.dtype"
    if section.grad_dtype != "e4m3":
        return f"has gradients of e4m3 on an accelerator, not {section.grad_dtype}: set --precision.grad_dtype e4m3"
    return "" if has_torchao() else "needs torchao on an accelerator: pip install 'spurline[lowprecision]'"


def _check_widths(name: str, module: nn.Module, recipe: str) -> None:
    for parameter, weight in module.named_parameters(recurse=False):
        if weight.dim() > 1 and "gate" not in parameter and any(size % MULTIPLES[recipe] for size in weight.shape[-2:]):
            raise ValueError(
                f"precision.layers: {name}.{parameter} has shape {tuple(weight.shape)}, and {recipe} needs widths that"
                f" are multiples of {MULTIPLES[recipe]} on an accelerator: leave it out by other patterns"
            )


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(name, alternative) for alternative in pattern.split("|"))


def _examples(layers: dict[str, nn.Module]) -> list[str]:
    """One name of each kind of layer."""
    alike = {type(module): name for name, module in reversed(layers.items())}
    return sorted(alike.values())
