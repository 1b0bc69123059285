"""The cost of an op: FLOPs, bytes moved, and whether it is a kernel at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import spurline.moe.kernels.grouped  # noqa: F401  (registers the ops)

_aten = torch.ops.aten
_spurline = torch.ops.spurline


class Work(NamedTuple):
    flops: int
    num_bytes: int
    is_fp32: bool
    kind: str
    """matmul, experts, attention or other."""


def _mm(args: Sequence[Any]) -> int:
    a, b = args[-2:] if len(args) < 4 else args[:2]
    return 2 * math.prod(a.shape) * b.shape[-1]


def _addmm(args: Sequence[Any]) -> int:
    return 2 * math.prod(args[1].shape) * args[2].shape[-1]


def _grouped_matmul(args: Sequence[Any]) -> int:
    rows_RI, w_eOI = args[:2]
    return 2 * math.prod(rows_RI.shape) * w_eOI.shape[1]


def _grouped_outer(args: Sequence[Any]) -> int:
    a_RO, b_RI = args[:2]
    return 2 * math.prod(a_RO.shape) * b_RI.shape[1]


def _grouped_mm(args: Sequence[Any]) -> int:
    a, b = args[:2]
    return 2 * math.prod(a.shape) * b.shape[-1]


def _attended(qkv: Sequence[Tensor], is_causal: bool) -> int:
    """FLOPs of queries times keys and of weights times values; half as many with a causal mask."""
    q, k, v = qkv
    flops = 2 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (q.shape[3] + v.shape[3])
    return flops // 2 if is_causal else flops


def _flash(args: Sequence[Any]) -> int:
    return _attended(args[:3], is_causal=len(args) > 4 and bool(args[4]))


def _efficient(args: Sequence[Any]) -> int:
    return _attended(args[:3], is_causal=len(args) > 6 and bool(args[6]))


def _attention_backward(args: Sequence[Any]) -> int:
    """2.5 times the forward FLOPs, of which 0.5 is the recomputation of the attention weights."""
    return 5 * _attended(args[1:4], is_causal=any(arg is True for arg in args)) // 2


def _conv(args: Sequence[Any]) -> int:
    x, weight = args[:2]
    return 2 * x.shape[0] * math.prod(weight.shape)


_FLOPS: dict[Any, tuple[str, Callable[[Sequence[Any]], int]]] = {
    _aten.mm.default: ("matmul", _mm),
    _aten.mm.out: ("matmul", _mm),
    _aten.bmm.default: ("matmul", _mm),
    _aten.addmm.default: ("matmul", _addmm),
    _aten.baddbmm.default: ("matmul", _addmm),
    _aten.convolution.default: ("matmul", _conv),
    _aten._grouped_mm.default: ("experts", _grouped_mm),
    _spurline.grouped_matmul.default: ("experts", _grouped_matmul),
    _spurline.grouped_outer.default: ("experts", _grouped_outer),
    _aten._scaled_dot_product_flash_attention.default: ("attention", _flash),
    _aten._scaled_dot_product_efficient_attention.default: ("attention", _efficient),
    _aten._scaled_dot_product_flash_attention_backward.default: ("attention", _attention_backward),
    _aten._scaled_dot_product_efficient_attention_backward.default: ("attention", _attention_backward),
}
_NO_KERNEL = {
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "lift_fresh",
    "detach",
    "alias",
    "set_",
    "resize_",
    "is_same_size",
    "promote_types",
    "wait_tensor",
}


def is_kernel(op: Any) -> bool:
    """Whether an op launches a kernel, and does not just allocate, view or inspect a tensor."""
    if op.namespace in ("prim", "profiler", "c10d", "_c10d_functional") or op.overloadpacket.__name__ in _NO_KERNEL:
        return False
    return not op.is_view


def work_of(op: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> Work:
    """The cost of a kernel that reads and writes these tensors."""
    kind, count = _FLOPS.get(op, ("other", None))
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    flops = count(args) if count else 0
    return Work(flops, num_bytes, flops > 0 and tensors[0].dtype == torch.float32, kind)
