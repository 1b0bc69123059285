"""Convert layers of a model, selected by name, to 8-bit matmuls."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import nn

from spurline.config import Precision
from spurline.device import lacks_8_bit_products
from spurline.ops.low_precision import LowPrecision
from spurline.ops.torchao_products import EXPERT_MULTIPLES, LINEAR_MULTIPLES, has_torchao, missing_packages


def convert_layers(model: nn.Module, section: Precision, device: torch.device, dtype: torch.dtype) -> None:
    """Convert the matching layers, in place; a ValueError if a pattern matches none, or the device can't.

    Layers that can be converted have an attribute `precision`: linear layers, experts and shared experts. Each
    alternative of `a|b` must match. `dtype` is that of the activations.
    """
    if section.recipe == "none":
        return
    native = device.type not in ("cpu", "meta") and not section.emulate
    if native and (problem := _missing(section, device, dtype)):
        raise ValueError(f"precision.recipe {section.recipe} {problem}")
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "precision")}
    for alternatives, pattern in [(entry, part) for entry in section.layers for part in entry.split("|")]:
        named = [name for name in layers if fnmatchcase(name, pattern)]
        if not named:
            where = f" (of {alternatives!r})" if alternatives != pattern else ""
            raise ValueError(
                f"precision.layers {pattern!r}{where} names no layer that can be converted. There are, among others,"
                f" {', '.join(_examples(layers))}"
            )
        for name in named:
            if native:
                _check_weights(name, layers[name], section.recipe)
            layers[name].precision = LowPrecision(section.recipe, section.grad_dtype, native)


def converted_layers(model: nn.Module) -> dict[str, int]:
    """The converted layers, with block indices as `*`, and how many there are of each, in all pipeline stages."""
    if (of_all_stages := getattr(model, "converted_layers", None)) is not None:
        return dict(of_all_stages)
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if getattr(module, "precision", None) is not None:
            alike = ".".join("*" if part.isdigit() else part for part in name.split("."))
            found[alike] = found.get(alike, 0) + 1
    return found


def _missing(section: Precision, device: torch.device, dtype: torch.dtype) -> str:
    """What this recipe lacks on this device, if anything."""
    if problem := lacks_8_bit_products(device, section.recipe):
        return f"{problem}. --precision.emulate rounds operands and multiplies in training.dtype"
    if dtype != torch.bfloat16:
        return "needs --training.dtype bfloat16 on an accelerator, or --precision.emulate"
    if section.grad_dtype != "e4m3":
        return f"has gradients of e4m3 on an accelerator, not {section.grad_dtype}: set --precision.grad_dtype e4m3"
    return "" if has_torchao() else "needs torchao on an accelerator: pip install 'spurline[lowprecision]'"


def _check_weights(name: str, module: nn.Module, recipe: str) -> None:
    for parameter in module.adaptable_weights():  # type: ignore[operator]
        shape = tuple(module.get_parameter(parameter).shape)
        is_grouped = len(shape) == 3
        multiple = (EXPERT_MULTIPLES if is_grouped else LINEAR_MULTIPLES)[recipe]
        if any(size % multiple for size in shape[-2:]):
            raise ValueError(
                f"precision.layers: {name}.{parameter} has shape {shape}, and {recipe} needs widths that are multiples"
                f" of {multiple} on an accelerator: leave it out by other patterns"
            )
        if is_grouped and recipe == "mxfp8" and (missing := missing_packages()):
            raise ValueError(
                f"precision.recipe mxfp8 needs more packages for {name} on an accelerator: pip install"
                f" {' '.join(missing)}"
            )


def _examples(layers: dict[str, nn.Module]) -> list[str]:
    """One name of each kind of layer."""
    alike = {type(module): name for name, module in reversed(layers.items())}
    return sorted(alike.values())
