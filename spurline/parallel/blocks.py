"""The blocks of a model, each of which is recomputed, compiled and sharded by itself."""

from torch import nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks that the model's method `blocks()` returns, if it has one; else the children of model.layers."""
    named = getattr(model, "blocks", None)
    return list(named() if callable(named) else model.layers.children())  # type: ignore[union-attr]
