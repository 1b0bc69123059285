"""Activation checkpointing: blocks keep little for the backward pass and compute the rest a second time.

`full` keeps a block's input and computes all of the block again. `selective` keeps what is dear and computes the rest
again: see `_keep_rows`. `selective_resend` does the same, but sends rows to their experts a second time instead of
keeping what arrived: K rows a token, the largest part by far of what a layer with experts keeps. What comes back from
the experts is neither kept nor sent again: nothing behind it is needed, and recomputation stops before it (but for a
compiled block under `full`, whose graph runs as a whole).
In all of them statistics count once: `accumulate_once` is not fooled by recomputation.
"""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops import flex_attention, inductor_compiled_code
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import spurline.comm.exchange
import spurline.moe.kernels.cpu.stream
import spurline.moe.kernels.grouped
import spurline.moe.kernels.triton.experts
import spurline.ops.functional  # noqa: F401
from spurline.parallel.blocks import blocks_of

_aten = torch.ops.aten
_DECISIONS = {
    torch.ops.spurline.stable_topk.default,
    _aten.sort.default,
    _aten.sort.stable,
    _aten.topk.default,
}
_ATTENTION = {
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
    flex_attention,
    inductor_compiled_code,  # flex_attention in an eager block
}
_exchange = torch.ops.spurline.start_exchange.default
_wait = torch.ops._c10d_functional.wait_tensor.default
_EXPERTS = {torch.ops.spurline.stream_experts.default, torch.ops.spurline.triton_experts.default}
# With the place of the left factor among the arguments.
_PRODUCTS = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
    torch.ops.spurline.grouped_matmul.default: 0,
}
# The hooks of an FSDP unit inside a block (experts by themselves) mark for the profiler what they do, which is not the
# same in both passes; torch would take the marks for computation that has changed.
_MARKS = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}


MODES = ("none", "full", "selective", "selective_resend")


def apply_remat(model: nn.Module, mode: str) -> None:
    """Have each block of the model recompute in the backward pass, in place, by one of MODES.

    Names of modules and parameters stay as they are. Of several calls, the last one holds.
    """
    if mode not in MODES:
        raise ValueError(f"activation_checkpoint.mode must be {', '.join(MODES[:-1])} or {MODES[-1]}, got {mode!r}")
    # What a block changes in Python (it frees weights packed for evaluation) need not be done a second time.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    SAC_IGNORED_OPS.update(_MARKS)
    for block in blocks_of(model):
        block.__dict__.pop("forward", None)
        if mode == "full":
            block.forward = FullRecomputation(block)
        elif mode != "none":
            block.forward = MethodType(SELECTIVE[mode], block)


class FullRecomputation:
    """A block's forward that keeps its inputs alone.

    What is compiled is `compute`, inside of it: a graph that held the recomputation as well would have to keep meshes
    of DTensors for its backward pass, which torch 2.13 fails at.
    """

    def __init__(self, block: nn.Module) -> None:
        self.compute: Callable[..., Any] = MethodType(type(block).forward, block)
        self.is_compiled = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.compute, *args, use_reentrant=False, **kwargs)

    def compile(self, **options: Any) -> None:
        """Once: a second call changes nothing."""
        if not self.is_compiled:
            self.compute, self.is_compiled = torch.compile(self.compute, **options), True


def _forward_selective(block: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _checkpointed(block, _keep_rows, x, *args, **kwargs)


def _forward_selective_resend(block: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _checkpointed(block, _resend_rows, x, *args, **kwargs)


SELECTIVE = {"selective": _forward_selective, "selective_resend": _forward_selective_resend}


def _checkpointed(block: nn.Module, policy: Callable[..., CheckpointPolicy], x: Tensor, *args: Any, **kw: Any) -> Any:
    contexts = partial(_selective_contexts, policy, int(x.shape[-1]))
    return checkpoint(type(block).forward, block, x, *args, use_reentrant=False, context_fn=contexts, **kw)


def _selective_contexts(policy: Callable[..., CheckpointPolicy], width: int) -> Any:
    return create_selective_checkpoint_contexts(partial(policy, width))


def _resend_rows(
    width: int, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """As `_keep_rows`, but rows that came from other ranks are sent again."""
    if op is _exchange:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return _keep_rows(width, context, op, *args, **kwargs)


def _keep_rows(width: int, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep or recompute the result of op, in a block of the given model width.

    Kept are decisions, so that a token meets the same experts again whatever rounding does; what other ranks sent, so
    that nothing is sent twice; what the host waited for; attention; experts; and matrix products each number of which
    is a sum over at least the model's width. A shorter sum is soon done again, and it is often such sums that make the
    largest results: keys and values out of a narrow latent, or the output of experts that are narrower than the model,
    K times for each token.
    """
    if op in _PRODUCTS:
        keep = args[_PRODUCTS[op]].shape[-1] >= width
    elif op is _aten._to_copy.default:
        keep = args[0].device.type != "cpu" and kwargs.get("device") == torch.device("cpu")
    elif op is _exchange:
        keep = not args[-1]  # returning rows: nothing behind them is needed, so that nobody sends them again
    else:
        keep = op in _DECISIONS or op in _ATTENTION or op in _EXPERTS
        # What was waited for is what was started, and that is kept.
        keep = keep or (op.namespace == "_c10d_functional" and op is not _wait)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
