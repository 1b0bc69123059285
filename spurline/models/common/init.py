"""Seeded initial weights that depend only on the seed and each parameter's name.

A parameter is drawn in blocks of fixed size, each from a generator keyed by the seed, the parameter's name and the
block's position. A rank draws only the blocks that overlap its shard, so its work and memory scale with the shard, and
the values are the same in every layout.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spurline.comm.own_part import keep_own_part, note_new_value, own_indices
from spurline.lora.adapters import is_adapter
from spurline.models.common.decoder_config import DecoderConfig, portable
from spurline.ops.draw import KeyedGenerator, is_drawn_in_blocks

INIT_STD = 0.02

# Changing either changes every initial weight. Few rows suit parameters sharded by rows over many ranks, few columns
# suit column sharding; a block is still large enough that drawing its numbers dominates its cost.
BLOCK_COLUMNS = 256
BLOCK_ELEMENTS = 64 * BLOCK_COLUMNS


def residual_std(num_layers: int) -> float:
    """Standard deviation for matrices that write into the residual stream, of which each layer has two."""
    return INIT_STD / (2 * num_layers) ** 0.5


def initialize(model: nn.Module, seed: int) -> None:
    """Give every parameter and buffer of `model` its initial value, on any device and in any sharding.

    A module fills its own parameters in `init_parameter(name, tensor, generator)` and its buffers in `init_buffers()`.
    Values do not depend on the order or on other parameters. An `init_parameter` decorated with `drawn_in_blocks` is
    called once per block; otherwise once with the full parameter, of which a rank then keeps its shard.
    """
    initialize_parameters(model, seed)
    initialize_buffers(model)


@torch.no_grad()
def initialize_parameters(model: nn.Module, seed: int, only_adapters: bool = False) -> None:
    """Initialize only the parameters, which is unnecessary when a checkpoint is loaded.

    With only_adapters, only the low-rank adapters: for a model whose weights have been loaded.
    """
    generator = KeyedGenerator()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            key = f"{seed} {path}.{name}" if path else f"{seed} {name}"
            if is_adapter(name):
                _draw_blocks(module.init_adapter, name, parameter, generator, key)
                continue
            if only_adapters:
                continue
            _require(module, path, name, "init_parameter(name, tensor, generator)")
            if is_drawn_in_blocks(module):
                _draw_blocks(module.init_parameter, name, parameter, generator, key)
            else:
                _draw_whole(module, name, parameter, generator, key)


@torch.no_grad()
def initialize_buffers(model: nn.Module) -> None:
    """Initialize only the buffers: also needed before loading a checkpoint, which does not contain all of them."""
    for path, module in model.named_modules():
        for name, _ in module.named_buffers(recurse=False):
            _require(module, path, name, "init_buffers()")
        if hasattr(module, "init_buffers"):
            module.init_buffers()


def build_to_load(
    config: DecoderConfig, device: torch.device | str, adapt: Callable[[nn.Module], object] = lambda model: None
) -> nn.Module:
    """Build the model, portable, on one device with uninitialized parameters, for weights that are about to be loaded.

    `adapt` may change it while it is on the meta device.
    """
    with torch.device("meta"):
        model: nn.Module = portable(config).build()
    adapt(model)
    model.to_empty(device=device)
    initialize_buffers(model)
    return model


def _require(module: nn.Module, path: str, name: str, method: str) -> None:
    # A model that was built on the meta device would otherwise train on uninitialized memory.
    if not hasattr(module, method.split("(")[0]):
        raise ValueError(
            f"{path or 'the model'} ({type(module).__name__}) owns {name} but has no initial value for it:"
            f" give its class a method {method}"
        )


def _draw_blocks(fill: Callable[..., None], name: str, parameter: Tensor, generator: KeyedGenerator, key: str) -> None:
    """Fill this rank's shard of a parameter, using the memory of one block at a time."""
    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if part.numel() == 0:
        return
    num_rows, num_columns = _matrix_shape(parameter)
    row_r, column_c = _own_rows_and_columns(parameter)
    shape = row_r.numel(), column_c.numel()
    part_rc = part.view(shape) if part.is_contiguous() else part.new_empty(shape)
    width = min(num_columns, BLOCK_COLUMNS)
    height = BLOCK_ELEMENTS // width
    column_blocks = list(_overlaps(column_c, width))
    for row, own_rows, rows_inside in _overlaps(row_r, height):
        for column, own_columns, columns_inside in column_blocks:
            block = torch.empty(min(height, num_rows - row), min(width, num_columns - column), dtype=torch.float32)
            fill(name, block, generator.at(f"{key} {row} {column}"))
            part_rc[own_rows, own_columns] = block[rows_inside][:, columns_inside].to(part.device)
    if not part.is_contiguous():
        part.copy_(part_rc.view(part.shape))
    note_new_value(parameter)


def _draw_whole(module: nn.Module, name: str, parameter: Tensor, generator: KeyedGenerator, key: str) -> None:
    value = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    module.init_parameter(name, value, generator.at(key))  # type: ignore[operator]
    keep_own_part(parameter, value)


def _matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Shape of a parameter viewed as a matrix: columns are its last dim, rows all others. A vector is one column."""
    return (parameter.shape[:-1].numel(), parameter.shape[-1]) if parameter.ndim > 1 else (parameter.numel(), 1)


def _own_rows_and_columns(parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows and columns of that matrix this rank holds."""
    indices = own_indices(parameter)
    column_c = indices.pop() if parameter.ndim > 1 else torch.zeros(1, dtype=torch.int64)
    row_r = torch.zeros(1, dtype=torch.int64)
    for index, size in zip(indices, parameter.shape, strict=False):
        row_r = (row_r.unsqueeze(1) * size + index).flatten()
    return row_r, column_c


def _overlaps(index_n: Tensor, size: int) -> Iterator[tuple[int, slice, slice | Tensor]]:
    """Yield each block that contains some of the indices: its start, their slice of index_n, their offsets in it."""
    block_m, count_m = torch.unique_consecutive(index_n // size, return_counts=True)
    end = 0
    for block, count in zip(block_m.tolist(), count_m.tolist(), strict=True):
        own, end = slice(end, end + count), end + count
        inside_i = index_n[own] - block * size
        first, last = int(inside_i[0]), int(inside_i[-1])
        # Copying a slice is faster than copying by a list of indices.
        yield block * size, own, slice(first, last + 1) if last - first + 1 == count else inside_i
