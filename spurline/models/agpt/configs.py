"""The AGPT family's config and presets. No torch import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from spurline.config import RunConfig
from spurline.models.common.decoder_config import GroupedQueryConfig
from spurline.models.common.presets import debug_run, full_size_run

if TYPE_CHECKING:
    from spurline.models.agpt.model import AGPT


@dataclass(frozen=True)
class AGPTConfig(GroupedQueryConfig):
    """A dense decoder in the style of Llama: grouped-query attention, SwiGLU, RMSNorm."""

    def build(self) -> AGPT:
        from spurline.models.agpt.model import AGPT

        return AGPT(self)


def agpt_debugmodel() -> RunConfig[AGPTConfig]:
    """A tiny dense model that learns in seconds on a CPU."""
    return debug_run(AGPTConfig(dim=128, num_layers=3, dense_hidden_dim=384, head_dim=32))


def _full_size(
    lr: float,
    *,
    dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    dense_hidden_dim: int,
    rope_theta: float = 500_000.0,
    recompute: Literal["selective", "full"] = "selective",
) -> RunConfig[AGPTConfig]:
    model = AGPTConfig(
        vocab_size=256_128,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=dim // num_heads,
        dense_hidden_dim=dense_hidden_dim,
        rope_theta=rope_theta,
    )
    return full_size_run(model, lr, recompute=recompute)


def agpt_2b() -> RunConfig[AGPTConfig]:
    """12 layers of width 2048; half of the parameters are in the embedding and output matrix."""
    return _full_size(
        3e-4, dim=2048, num_layers=12, num_heads=16, num_kv_heads=4, dense_hidden_dim=11_008, rope_theta=50_000.0
    )


def agpt_20b() -> RunConfig[AGPTConfig]:
    """64 layers of width 5120."""
    return _full_size(2e-4, dim=5120, num_layers=64, num_heads=40, num_kv_heads=8, dense_hidden_dim=14_336)


def agpt_50b() -> RunConfig[AGPTConfig]:
    """56 layers of width 8192."""
    return _full_size(1.5e-4, dim=8192, num_layers=56, num_heads=64, num_kv_heads=8, dense_hidden_dim=28_672)


def agpt_80b() -> RunConfig[AGPTConfig]:
    """84 layers of width 9216; with 12 key/value heads, the tensor-parallel degree can be 2, 3, 4, 6 or 12."""
    return _full_size(
        1.5e-4, dim=9216, num_layers=84, num_heads=72, num_kv_heads=12, dense_hidden_dim=25_600, recompute="full"
    )


def agpt_80b_wide() -> RunConfig[AGPTConfig]:
    """48 layers of width 10,752."""
    return _full_size(
        1.5e-4, dim=10_752, num_layers=48, num_heads=84, num_kv_heads=12, dense_hidden_dim=39_936, recompute="full"
    )


def agpt_80b_deep() -> RunConfig[AGPTConfig]:
    """96 layers of width 7680."""
    return _full_size(
        1.5e-4, dim=7680, num_layers=96, num_heads=60, num_kv_heads=12, dense_hidden_dim=28_672, recompute="full"
    )


CONFIGS: dict[str, Callable[[], RunConfig[Any]]] = {
    preset.__name__: preset
    for preset in (agpt_debugmodel, agpt_2b, agpt_20b, agpt_50b, agpt_80b, agpt_80b_wide, agpt_80b_deep)
}
