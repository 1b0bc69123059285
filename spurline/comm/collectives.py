"""All collectives on activations, each with its backward next to its forward.

They take and return plain local tensors, trace in one graph, and are the identity on a group of one rank, without
communication. Functions of a sequence work along any `dim`; each rank must pass the same shape.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

from spurline.comm.sequence import SequenceShard

# The traceable forms of torch.distributed's collectives; each is complete once it has been waited for.
_ops = torch.ops._c10d_functional
_wait = _ops.wait_tensor


def all_gather_sequence(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Concatenate the tensors of all ranks along dim: (.., l, ..) -> (.., size * l, ..). Mirror: reduce-scatter."""
    return x if group_size(group) == 1 else _AllGather.apply(x, group, dim % x.dim())


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(grad, ctx.group, ctx.dim), None, None


def reduce_scatter_sequence(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Sum over ranks and keep this rank's shard of dim: (.., size * l, ..) -> (.., l, ..). Mirror: all-gather."""
    size = group_size(group)
    if x.size(dim) % size:
        raise ValueError(
            f"reduce_scatter_sequence: {size} ranks can't share the {x.size(dim)} positions of dim {dim} evenly;"
            " pad them first (SequenceShard)"
        )
    return x if size == 1 else _ReduceScatter.apply(x, group, dim % x.dim())


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(grad, ctx.group, ctx.dim), None, None


def all_reduce_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, on every rank. Mirror: the identity, as every rank continues with the same sum."""
    return x if group_size(group) == 1 else _AllReduceSum.apply(x, group)


class _AllReduceSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@torch.no_grad()
def all_reduce_max(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The maximum over ranks, on every rank. Has no gradient."""
    return x if group_size(group) == 1 else _wait(_ops.all_reduce(x.contiguous(), "max", group.group_name))


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The identity, for a replicated tensor that each rank uses differently. Mirror: the sum over ranks."""
    return x if group_size(group) == 1 else _CopyToGroup.apply(x, group)


class _CopyToGroup(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


def all_to_all_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send slice r of dim 0 to rank r: (size, ..) -> (size, ..), indexed by source rank. Mirror: itself."""
    return x if group_size(group) == 1 else _AllToAll.apply(x, group)


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad, ctx.group), None


def split_sequence(x: Tensor, shard: SequenceShard, group: dist.ProcessGroup, dim: int) -> Tensor:
    """This rank's real positions of a replicated tensor: (.., L, ..) -> (.., l, ..). Mirror: join_sequence."""
    return x if group_size(group) == 1 else _SplitSequence.apply(x, shard, group, dim % x.dim())


def join_sequence(x: Tensor, shard: SequenceShard, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Every rank's real positions, on every rank: (.., l, ..) -> (.., L, ..). Mirror: split_sequence.

    Unlike after all_gather_sequence, all ranks compute the same loss from the same tensor, so gradients aren't summed.
    """
    return x if group_size(group) == 1 else _JoinSequence.apply(x, shard, group, dim % x.dim())


class _SplitSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: SequenceShard, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.shard, ctx.group, ctx.dim = shard, group, dim
        return shard.shard(x, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _join(grad, ctx.shard, ctx.group, ctx.dim), None, None, None


class _JoinSequence(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shard: SequenceShard, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.shard, ctx.dim = shard, dim
        return _join(x, shard, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.shard.shard(grad, ctx.dim).contiguous(), None, None, None


def _join(x: Tensor, shard: SequenceShard, group: dist.ProcessGroup, dim: int) -> Tensor:
    return shard.trim(_all_gather(shard.pad(x, dim), group, dim), dim).contiguous()


@torch.no_grad()
def all_gather_counts(count: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's counts, on every rank, in rank order: (..) -> (size, ..). Has no gradient."""
    return count[None] if group_size(group) == 1 else _all_gather(count[None], group, 0)


@torch.no_grad()
def all_reduce_counts(count: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Counts summed over ranks, on every rank. Has no gradient."""
    return count if group_size(group) == 1 else _all_reduce(count, group)


def group_size(group: dist.ProcessGroup) -> int:
    """The number of ranks of the group; a ValueError if it is not a process group."""
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"group must be a ProcessGroup (of a mesh: mesh.get_group(axis)), got {type(group).__name__}")
    return group.size()


# The collectives themselves, without autograd.


def _all_gather(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    size = group.size()
    gathered = _wait(_ops.all_gather_into_tensor(x.contiguous(), size, group.group_name))
    if dim == 0:
        return gathered
    # One copy after the collective, and none if the dims before `dim` are 1.
    return gathered.unflatten(0, (size, x.size(0))).movedim(0, dim).flatten(dim, dim + 1)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    size = group.size()
    if dim:
        x = x.unflatten(dim, (size, x.size(dim) // size)).movedim(dim, 0).flatten(0, 1)
    return _wait(_ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group.group_name))


def _all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return _wait(_ops.all_reduce(x.contiguous(), "sum", group.group_name))


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    splits = [1] * group.size()
    return _wait(_ops.all_to_all_single(x.contiguous(), splits, splits, group.group_name))
