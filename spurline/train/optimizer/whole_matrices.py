"""Assemble full matrices from their shards on many ranks, and shard them again.

n matrices, of which this rank has shards of a rows and b columns; k of them are assembled on this rank, with A rows and
B columns. A parameter is one matrix (A, B), or a stack of matrices (E, A, B) as experts are.

A stack that is sharded only along its first dim has full matrices on every rank, and nothing is communicated. Otherwise
the ranks that hold shards of the same matrices exchange them in an all-to-all, so that each matrix is assembled on one
of them; and the same way back. Each rank sends and receives about as many bytes as its own shards have, once in each
direction, and no matrix is processed twice, except on axes over which a parameter is replicated: their ranks all do the
same work and communicate nothing. (All-gathering every matrix to every rank would take P times the work, and P/2 times
the bytes, on P ranks.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from spurline.comm.exchange import exchange_rows


@dataclass(frozen=True)
class Cut:
    """A mesh axis whose ranks hold shards of the same matrices."""

    group: ProcessGroup
    dim: int
    """The sharded dim: -2 (rows) or -1 (columns)."""
    sizes: tuple[int, ...]
    """Each rank's size along dim."""


def cuts_of(parameter: Tensor) -> tuple[Cut, ...]:
    """How the matrices of a parameter are sharded, from the outermost cut to the innermost; empty if they are not."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh, placements = parameter.device_mesh, parameter.placements
    # A strided shard is a cut inside those of later axes: FSDP2 shards what tensor or expert parallelism left.
    axes = sorted(range(mesh.ndim), key=lambda axis: isinstance(placements[axis], _StridedShard))
    shape, cuts = list(parameter.shape), []
    for axis in axes:
        placement = placements[axis]
        if placement.is_replicate() or mesh.size(axis) == 1:
            continue
        dim: int = placement.dim  # type: ignore[attr-defined]
        sizes = chunk_sizes(shape[dim], mesh.size(axis))
        shape[dim] = sizes[mesh.get_local_rank(axis)]
        if dim >= parameter.ndim - 2:
            cuts.append(Cut(mesh.get_group(axis), dim - parameter.ndim, sizes))
    assert torch.Size(shape) == parameter.to_local().shape, f"{placements} are not cut as expected"
    return tuple(cuts)


def chunk_sizes(size: int, num_chunks: int) -> tuple[int, ...]:
    """The sizes that torch.chunk gives, with zeros for chunks that it omits: 5 in 4 is 2, 2, 1, 0."""
    most = -(-size // num_chunks)
    return tuple(max(0, min(most, size - most * i)) for i in range(num_chunks))


def exchange_parts_for_matrices(parts_nab: Tensor, cuts: tuple[Cut, ...]) -> Tensor:
    """(n, a, b) shards of n matrices -> (k, A, B): this rank's share of the n matrices, in full."""
    x = parts_nab
    for cut in reversed(cuts):
        shares, rank = chunk_sizes(x.size(0), cut.group.size()), cut.group.rank()
        shapes = [_shape_with(x, cut.dim, size, num=shares[rank]) for size in cut.sizes]
        send = [num * x.size(1) * x.size(2) for num in shares]
        receive = [shape.numel() for shape in shapes]
        received = exchange_rows(x.reshape(-1), torch.tensor([send, receive]), cut.group).split(receive)
        x = torch.cat([part.view(shape) for part, shape in zip(received, shapes, strict=True)], cut.dim)
    return x


def exchange_matrices_for_parts(matrices_kAB: Tensor, cuts: tuple[Cut, ...], num_matrices: int) -> Tensor:
    """The inverse: (k, A, B) -> (n, a, b), where n is num_matrices."""
    nums = [num_matrices]  # how many matrices this rank had shards of before each exchange
    for cut in reversed(cuts[1:]):
        nums.append(chunk_sizes(nums[-1], cut.group.size())[cut.group.rank()])
    x = matrices_kAB
    for cut in cuts:
        num, rank = nums.pop(), cut.group.rank()
        parts = [part.reshape(-1) for part in x.split(cut.sizes, cut.dim)]
        shape = _shape_with(x, cut.dim, cut.sizes[rank], num)
        receive = [share * shape[1] * shape[2] for share in chunk_sizes(num, cut.group.size())]
        splits_2P = torch.tensor([[part.numel() for part in parts], receive])
        x = exchange_rows(torch.cat(parts), splits_2P, cut.group).view(shape)
    return x


def _shape_with(x: Tensor, dim: int, size: int, num: int) -> torch.Size:
    """The shape of `num` matrices like those of x, with `size` along dim."""
    shape = [num, *x.shape[1:]]
    shape[dim] = size
    return torch.Size(shape)
