"""A simulated device: PyTorch's meta device in place of an accelerator.

A tensor on it has a shape, a dtype and a storage with a size, but no data. It is not a CPU tensor, so all code takes
the accelerator branches; host tensors stay real. Within `simulated_device`, the queries that FSDP2, autocast, fused
optimizers and attention make to an accelerator are answered here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed._tools.fake_collectives  # (c10d collectives on meta tensors)
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils import _foreach_utils

import spurline.accelerator
import spurline.models.common.mask
import spurline.moe.kernels.grouped_mm
import spurline.train.metrics.step_metrics
import spurline.train.optimizer.build
import spurline.train.optimizer.masked
from spurline.simulate.timeline import Event, Stream, Timeline

DEVICE = torch.device("meta")


@contextmanager
def simulated_device(
    timeline: Timeline, on_wait: Callable[[str], None], on_list: Callable[[Tensor], None]
) -> Iterator[None]:
    """Make the meta device act as an accelerator with the streams of `timeline`.

    on_wait is called with a description wherever the host waits for a stream or an event; on_list with each tensor
    created on the device from Python numbers, which no op reports.
    """
    # The functions that `with torch.device(..)` applies to are cached per process: cache the real ones first.
    torch.utils._device._device_constructors()
    with ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(replaced(owner, name, value))

        module = _device_module(timeline, on_wait)
        replace(torch, DEVICE.type, module)
        replace(torch, "Event", _simulated_or(torch.Event, module.Event))
        replace(torch, "Stream", _simulated_or(torch.Stream, module.Stream))
        for name, answer in _AUTOCAST.items():
            replace(torch, name, _answered(getattr(torch, name), answer))
        memory = timeline.hardware.memory_bytes
        replace(
            torch.accelerator, "current_accelerator", _accelerator_for_others(torch.accelerator.current_accelerator)
        )
        replace(torch.accelerator, "get_memory_info", lambda device=None: (memory, memory))
        replace(torch.accelerator, "current_stream", module.current_stream)
        replace(torch.accelerator, "synchronize", module.synchronize)
        replace(torch.Tensor, "new_tensor", _noted(torch.Tensor.new_tensor, on_list))
        replace(torch, "as_tensor", _noted(torch.as_tensor, on_list))
        replace(torch, "tensor", _noted(torch.tensor, on_list))
        replace(torch.Tensor, "record_stream", lambda tensor, stream: None)
        replace(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)
        # FSDP2 rejects parameters on the meta device as not materialized.
        replace(FSDPParamGroup, "_validate_no_meta_params", lambda group: None)
        optimizers = (import_module(f"torch.optim.{name}") for name in ("optimizer", "adam", "adamw"))
        for user in (_foreach_utils, *optimizers, spurline.train.optimizer.build):
            if known := getattr(user, _FUSED, None):
                replace(user, _FUSED, lambda known=known: [*known(), DEVICE.type])
        # The simulated device has fused optimizers that can skip a step, and a grouped matmul kernel.
        replace(spurline.train.optimizer.masked, "can_skip_fused_adamw", lambda device: True)
        replace(spurline.moe.kernels.grouped_mm, "has_grouped_mm_kernel", lambda device, dtype: dtype == torch.bfloat16)
        replace(spurline.models.common.mask, "_flex", lambda device: _attention_by_blocks)
        # The other pipeline stages don't exist and have no records.
        replace(spurline.train.metrics.step_metrics, "join_records", lambda record, reductions, group: record)
        # Drop state cached for another simulated device.
        replace(spurline.accelerator, "_side_streams", {})
        spurline.accelerator._memory_of.cache_clear()
        stack.callback(spurline.accelerator._memory_of.cache_clear)
        library = torch.library.Library("aten", "IMPL")
        stack.callback(library._destroy)
        library.impl("scaled_dot_product_attention", _attention, "AutogradMeta")
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or class within the block."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


_FUSED = "_get_fused_kernels_supported_devices"


def _device_module(timeline: Timeline, on_wait: Callable[[str], None]) -> Any:
    """Stand-in for torch.<device>, with the parts that are used."""

    class WaitedEvent(Event):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(timeline)

        def synchronize(self) -> None:
            on_wait("Event.synchronize()")
            super().synchronize()

    class WaitedStream(Stream):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(timeline)

        def synchronize(self) -> None:
            on_wait("Stream.synchronize()")
            super().synchronize()

        def record_event(self, event: Event | None = None) -> Event:
            return (event or WaitedEvent()).record(self)

    def synchronize(*args: Any) -> None:
        on_wait("synchronize()")
        timeline.host_wait(max(timeline.current.tail, *(stream.tail for stream in timeline.groups.values()), 0.0))

    return SimpleNamespace(
        Stream=WaitedStream,
        Event=WaitedEvent,
        current_stream=lambda *args: timeline.current,
        stream=lambda stream: stream,
        synchronize=synchronize,
        current_device=lambda: 0,
        set_device=lambda device: None,
        device_count=lambda: 1,
        is_available=lambda: True,
        is_initialized=lambda: True,
        is_bf16_supported=lambda: True,
    )


def _simulated_or(real: Any, simulated: Any) -> Any:
    """torch.Event or torch.Stream, which makes simulated ones for the simulated device."""

    class Either(type):
        def __call__(cls, device: Any = None, *args: Any, **kwargs: Any) -> Any:
            if device is None or torch.device(device).type == DEVICE.type:
                return simulated()
            return real(device, *args, **kwargs)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, real)

    return Either(real.__name__, (), {})


def _noted(make: Callable[..., Tensor], note: Callable[[Tensor], None]) -> Callable[..., Tensor]:
    def made(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():  # a graph holds a constant and copies it when it runs
            return make(*args, **kwargs)
        tensor = make(*args, **kwargs)
        is_copy = isinstance(kwargs.get("data", args[-1]), Tensor)
        if tensor.device == DEVICE and not is_copy:
            note(tensor)
        return tensor

    return made


def _accelerator_for_others(real: Callable[..., Any]) -> Callable[..., Any]:
    """Report the simulated device to all callers except PyTorch, whose compiler would expect more of it."""

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__") == "torch.accelerator":
            frame = frame.f_back
        is_torch = frame.f_globals.get("__name__", "").partition(".")[0] == "torch"
        return real(check_available) if is_torch else DEVICE

    return current_accelerator


# Autocast functions that PyTorch calls for any accelerator, with the results for ours, which has no autocast.
_AUTOCAST = {
    "is_autocast_enabled": False,
    "get_autocast_dtype": torch.bfloat16,
    "set_autocast_enabled": None,
    "set_autocast_dtype": None,
}


def _answered(real: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    return lambda *args: answer if args[:1] == (DEVICE.type,) else real(*args)


def _attention(
    q_BHLR: Tensor,
    k_BGSR: Tensor,
    v_BGSV: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's op on an accelerator: flash attention, or memory-efficient attention for masks and other shapes."""
    if attn_mask is None and q_BHLR.shape[-1] == v_BGSV.shape[-1]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(q_BHLR, k_BGSR, v_BGSV, dropout_p, is_causal, False, scale=scale)[0]
    if enable_gqa and (repeats := q_BHLR.shape[1] // k_BGSR.shape[1]) > 1:
        k_BGSR, v_BGSV = k_BGSR.repeat_interleave(repeats, 1), v_BGSV.repeat_interleave(repeats, 1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q_BHLR.dtype).masked_fill_(~attn_mask, float("-inf"))
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q_BHLR, k_BGSR, v_BGSV, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


def _attention_by_blocks(
    q_BHLR: Tensor, k_BGSR: Tensor, v_BGSV: Tensor, block_mask: Any, scale: float, enable_gqa: bool
) -> Tensor:
    """Stand-in for flex_attention, which can't run on this device: the same work if half of the keys are visible."""
    return torch.nn.functional.scaled_dot_product_attention(
        q_BHLR, k_BGSR, v_BGSV, is_causal=True, scale=scale, enable_gqa=enable_gqa
    )
