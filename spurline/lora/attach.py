"""Add adapters to a model, and merge them into its weights."""

from __future__ import annotations

from torch import nn

from spurline.lora.adapters import Adaptable, is_adapter
from spurline.parameter_rules import matches, names_near


def attach_adapters(model: nn.Module, rank: int, alpha: float, targets: tuple[str, ...]) -> None:
    """Add an adapter to each weight that a target pattern matches, and freeze all other parameters, in place.

    Call it before the model is sharded. A ValueError names the first target that matches nothing.
    """
    adaptable = {
        f"{path}.{name}" if path else name: (module, name)
        for path, module in model.named_modules()
        if isinstance(module, Adaptable)
        for name in module.adaptable_weights()
    }
    for pattern in targets:
        if not any(matches(pattern, name) for name in adaptable):
            others = any(matches(pattern, name) for name, _ in model.named_parameters())
            why = "matches no weight that can have an adapter (those of linear layers and of experts)"
            raise ValueError(
                f"lora.targets {pattern!r}: it {why if others else 'matches no weight'}{names_near(pattern, adaptable)}"
            )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for full_name, (module, name) in adaptable.items():
        if any(matches(pattern, full_name) for pattern in targets):
            module.add_adapter(name, rank, alpha / rank)


def fold_adapters(model: nn.Module) -> None:
    """Merge all adapters into their weights; the model then has the parameters of one without adapters."""
    for module in model.modules():
        if isinstance(module, Adaptable):
            module.fold_adapters()


def has_adapters(model: nn.Module) -> bool:
    return any(is_adapter(name) for name, _ in model.named_parameters())
