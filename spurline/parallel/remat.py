"""Activation checkpointing: blocks save little for the backward pass and recompute the rest.

`full` saves a block's input and recomputes the entire block. `selective` saves what is expensive to recompute: see
`_keep_rows`. `selective_resend` does the same, but sends rows to their experts a second time instead of saving what
arrived: K rows per token, by far the largest part of what an MoE layer saves. What comes back from the experts is
neither saved nor sent again: nothing after it is needed, and recomputation stops before it (except in a compiled block
under `full`, whose graph runs to its end).
In all modes statistics count once: `accumulate_once` ignores recomputation.
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
    _CachedTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import spurline.comm.exchange
import spurline.moe.kernels.cpu.stream
import spurline.moe.kernels.grouped
import spurline.moe.kernels.triton.experts
import spurline.ops.functional  # noqa: F401
from spurline.accelerator import recomputation
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
# The matmul ops, with the index of the left operand among their arguments.
_PRODUCTS = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
    torch.ops.spurline.grouped_matmul.default: 0,
}
# The hooks of an FSDP unit inside a block (separate expert units) record profiler events, which differ between the two
# passes; torch would take that for a change in the computation.
_MARKS = {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}


MODES = ("none", "full", "selective", "selective_resend")


def apply_remat(model: nn.Module, mode: str) -> None:
    """Apply activation checkpointing to each block of the model, in place, by one of MODES.

    Names of modules and parameters do not change. Of several calls, the last one applies.
    """
    if mode not in MODES:
        raise ValueError(f"activation_checkpoint.mode must be {', '.join(MODES[:-1])} or {MODES[-1]}, got {mode!r}")
    # The Python side effects of a block (it clears fused weights) need not be repeated.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    SAC_IGNORED_OPS.update(_MARKS)
    for block in blocks_of(model):
        block.__dict__.pop("forward", None)
        if mode == "full":
            block.forward = FullRecomputation(block)
        elif mode != "none":
            block.forward = MethodType(SELECTIVE[mode], block)


class FullRecomputation:
    """A block's forward that saves only its inputs.

    Only `compute`, inside of it, is compiled: a graph that included the recomputation would have to save the meshes of
    DTensors for its backward pass, which fails in torch 2.13.
    """

    def __init__(self, block: nn.Module) -> None:
        self.compute: Callable[..., Any] = MethodType(type(block).forward, block)
        self.is_compiled = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.compute, *args, use_reentrant=False, **kwargs)

    def compile(self, **options: Any) -> None:
        """Compile `compute`; a second call changes nothing."""
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
    forward, recompute = create_selective_checkpoint_contexts(partial(policy, width))
    return forward, _SelectiveRecomputation(None, recompute.storage)


class _SelectiveRecomputation(_CachedTorchDispatchMode):
    """Torch's mode that returns what was saved instead of computing it again.

    Copies to the host are among that: the first pass has waited for them, so the host does not wait again.
    """

    def __enter__(self) -> Any:
        recomputation.keeps_host_copies = True
        return super().__enter__()

    def __exit__(self, *exception: Any) -> Any:
        recomputation.keeps_host_copies = False
        return super().__exit__(*exception)


def _resend_rows(
    width: int, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Like `_keep_rows`, but rows from other ranks are sent again."""
    if op is _exchange:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return _keep_rows(width, context, op, *args, **kwargs)


def _keep_rows(width: int, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save or recompute the result of op, in a block of the given model width.

    Saved are routing decisions, so that a token is routed to the same experts again whatever the rounding; what other
    ranks sent, so that nothing is sent twice; copies to the host; attention; experts; and matmuls whose reduction dim
    is at least the model's width. A shorter reduction is cheap to recompute, and often has the largest result: keys and
    values from a narrow latent, or the output of experts that are narrower than the model, K times for each token.
    """
    if op in _PRODUCTS:
        keep = args[_PRODUCTS[op]].shape[-1] >= width
    elif op is _aten._to_copy.default:
        keep = args[0].device.type != "cpu" and kwargs.get("device") == torch.device("cpu")
    elif op is _exchange:
        keep = not args[-1]  # returning rows: nothing after them is needed, so they are not sent again
    else:
        keep = op in _DECISIONS or op in _ATTENTION or op in _EXPERTS
        # The result of a wait is that of the started collective, which is saved.
        keep = keep or (op.namespace == "_c10d_functional" and op is not _wait)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
