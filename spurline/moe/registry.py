"""The parts of an MoE layer that a config chooses by name: ours, and those that users register. Free of torch.

A part is the object itself, or "module:attribute", which is imported when a layer is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spurline.registry import register, resolve

if TYPE_CHECKING:
    from torch import nn

    from spurline.moe.config import MoEConfig
    from spurline.moe.dispatch.plan import Dispatcher
    from spurline.moe.experts import Backend

ROUTERS: dict[str, Any] = {"top_k": "spurline.moe.router:Router"}
EXPERTS_BACKENDS: dict[str, Any] = {
    "loop": "spurline.moe.experts:loop_experts",
    "grouped_mm": "spurline.moe.experts:grouped_mm_experts",
    "bmm": "spurline.moe.experts:bmm_experts",
    "stream": "spurline.moe.experts:stream_rows",
}
DISPATCHERS: dict[str, Any] = {"local": "spurline.moe.dispatch.local:LocalDispatcher"}


def register_router(name: str, make: Callable[[MoEConfig, float], nn.Module] | str) -> None:
    """Make a router of your own known as MoEConfig.router = name: make(config, init_std) -> module.

    The module turns (x_TD, num_sequences) into a Routing. What subclasses spurline.moe.Router is counted and balanced.
    """
    register("router", ROUTERS, name, make)


def register_experts_backend(name: str, backend: Backend | str) -> None:
    """Make a backend of your own known as MoEConfig.experts_backend = name."""
    register("experts_backend", EXPERTS_BACKENDS, name, backend)


def register_dispatcher(name: str, make: Callable[[MoEConfig], Dispatcher] | str) -> None:
    """Make a dispatcher of your own known as MoEConfig.dispatcher = name: make(config) -> dispatcher."""
    register("dispatcher", DISPATCHERS, name, make)


def make_router(config: MoEConfig, init_std: float) -> Any:
    return resolve("router", config.router, ROUTERS)(config, init_std)


def make_dispatcher(config: MoEConfig) -> Dispatcher:
    return resolve("dispatcher", config.dispatcher, DISPATCHERS)(config)


def experts_backend(name: str) -> Backend:
    return resolve("experts_backend", name, EXPERTS_BACKENDS)
