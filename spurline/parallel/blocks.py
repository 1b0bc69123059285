"""Which parts of a model are recomputed, compiled and sharded one by one."""

from torch import nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Those that the model names in its method `blocks()`, if it has one; else the children of model.layers."""
    named = getattr(model, "blocks", None)
    return list(named() if callable(named) else model.layers.children())  # type: ignore[union-attr]
