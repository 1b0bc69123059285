"""The components of an MoE layer that a config selects by name, built-in or registered by users. Torch-free.

A component is the object itself, or "module:attribute", which is imported when a layer is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spurline.moe.layout import CLAMPED_SWIGLU, SWIGLU, Layout, layout_problems
from spurline.registry import register, resolve

ROUTERS: dict[str, Any] = {"top_k": "spurline.moe.router:Router"}
DISPATCHERS: dict[str, Any] = {
    "local": "spurline.moe.dispatch.local:LocalDispatcher",
    "capacity": "spurline.moe.dispatch.capacity:CapacityDispatcher",
    "deep_ep": "spurline.moe.dispatch.deep_ep:DeepEPDispatcher",
    "deep_ep_low_latency": "spurline.moe.dispatch.deep_ep:DeepEPLowLatencyDispatcher",
    "hybrid_ep": "spurline.moe.dispatch.hybrid_ep:HybridEPDispatcher",
}
EXPERTS: dict[str, Any] = {
    "swiglu": "spurline.moe.experts.swiglu:SwiGLUExperts",
    "clamped_swiglu": "spurline.moe.experts.clamped_swiglu:ClampedSwiGLUExperts",
}
LAYOUTS: dict[str, Layout] = {"swiglu": SWIGLU, "clamped_swiglu": CLAMPED_SWIGLU}
KERNELS: dict[str, Any] = {
    "stream": "spurline.moe.kernels.cpu.stream:StreamKernel",
    "bmm": "spurline.moe.kernels.bmm:BmmKernel",
    "triton": "spurline.moe.kernels.triton.experts:TritonKernel",
    "grouped_mm": "spurline.moe.kernels.grouped_mm:GroupedMMKernel",
    "loop": "spurline.moe.kernels.loop:LoopKernel",
}
BUILT_IN_KERNELS = tuple(KERNELS)
"""Those that `auto` chooses from: what users register later is chosen by name."""


def register_router(name: str, make: Callable[..., Any] | str) -> None:
    """Register a router as MoEConfig.router = name: make(config, init_std) -> module.

    The module maps (x_TD, num_sequences) to a Routing. Rows are counted and balanced only for subclasses of
    spurline.moe.Router.
    """
    register("router", ROUTERS, name, make)


def register_dispatcher(name: str, make: Callable[..., Any] | str) -> None:
    """Register a dispatcher as MoEConfig.dispatcher = name: make(config) -> dispatcher."""
    register("dispatcher", DISPATCHERS, name, make)


def register_experts(name: str, experts: Callable[..., Any] | str, layout: Layout) -> None:
    """Register experts as MoEConfig.experts = name: a subclass of spurline.moe.Experts, and its layout.

    The layout names the axes of every weight (see `spurline.moe.layout`); sharding, initialization and parameter
    counts read it.
    """
    if problems := layout_problems(layout):
        raise ValueError(f"experts {name!r}: " + "; ".join(problems))
    register("experts", EXPERTS, name, experts)
    LAYOUTS[name] = layout


def register_kernel(name: str, make: Callable[[], Any] | str) -> None:
    """Register a kernel as MoEConfig.experts_backend = name: a subclass of spurline.moe.Kernel."""
    register("experts_backend", KERNELS, name, make)


def register_experts_backend(name: str, backend: Callable[..., Any] | str) -> None:
    """Register a function as MoEConfig.experts_backend = name: it computes complete SwiGLU experts.

    backend(rows_RD, w1_eFD, w3_eFD, w2_eDF, rows_per_expert) -> rows_RD; see docs/extending.md.
    """
    register("experts_backend", KERNELS, name, backend)


def make_router(config: Any, init_std: float) -> Any:
    return resolve("router", config.router, ROUTERS)(config, init_std)


def make_dispatcher(config: Any) -> Any:
    return resolve("dispatcher", config.dispatcher, DISPATCHERS)(config)


def make_experts(config: Any, init_std: float, output_std: float | None) -> Any:
    return resolve("experts", config.experts, EXPERTS)(config, init_std, output_std)
