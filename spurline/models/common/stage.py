"""Split a decoder into pipeline stages: contiguous parts that are models of their own."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, TypeVar

from torch import nn

if TYPE_CHECKING:
    from spurline.models.common.decoder import Decoder

D = TypeVar("D", bound="Decoder")


def cut_stage(
    model: D, first_layer: int, end_layer: int, is_first: bool | None = None, is_last: bool | None = None
) -> D:
    """A copy of `model` with layers first_layer to end_layer - 1 and the other modules of that stage."""
    num_layers, name = model.config.num_layers, type(model).__name__
    if model.tp.group is not None:
        raise ValueError(f"{name}: cut the model into stages before it is parallelized")
    if not (model.is_first_stage and model.is_last_stage):
        raise ValueError(f"{name}: only a whole model can be cut, and this is a stage of one")
    is_first = first_layer == 0 if is_first is None else is_first
    is_last = end_layer == num_layers if is_last is None else is_last
    _check_range(name, num_layers, first_layer, end_layer, is_first, is_last)
    on_first, on_last = model.first_stage_modules(), model.last_stage_modules()
    if homeless := {*model._modules, *model._parameters, *model._buffers} - {"layers"} - on_first - on_last:
        raise ValueError(
            f"{name}: {', '.join(sorted(homeless))} would be on no stage: name it in first_stage_modules() or"
            " last_stage_modules()"
        )
    kept = (on_first if is_first else set()) | (on_last if is_last else set())

    stage = copy.copy(model)
    stage.is_first_stage, stage.is_last_stage = is_first, is_last
    stage._parameters = {name: tensor if name in kept else None for name, tensor in model._parameters.items()}
    stage._buffers = {name: tensor if name in kept else None for name, tensor in model._buffers.items()}
    stage._modules = {name: module if name in kept else _empty(module) for name, module in model._modules.items()}
    stage._modules["layers"] = nn.ModuleDict(
        {str(layer): model.layers[str(layer)] for layer in range(first_layer, end_layer)}
    )
    return copy.deepcopy(stage)


def _check_range(name: str, num_layers: int, first: int, end: int, is_first: bool, is_last: bool) -> None:
    if not 0 <= first <= end <= num_layers or (first == end and not (is_first or is_last)):
        raise ValueError(f"{name}: a stage must be a range of the {num_layers} layers, got {first} to {end - 1}")
    if (is_first and first > 0) or (is_last and end < num_layers):
        raise ValueError(
            f"{name}: layers {first} to {end - 1} of {num_layers} can't be the {'first' if is_first else 'last'} stage"
        )


def _empty(module: nn.Module | None) -> nn.Module | None:
    """The placeholder of a module that a stage does not have: None, or an empty list or dict to iterate over."""
    return type(module)() if isinstance(module, nn.ModuleDict | nn.ModuleList) else None
