"""The Qwen3-VL family's configs and presets. No torch import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from spurline.config import Data, Metrics, ParallelFacts, RunConfig
from spurline.data.patch_sizes import MERGE, PATCH_DIM
from spurline.models.common.costs import Cost
from spurline.models.common.decoder_config import SparseDecoderConfig, not_positive
from spurline.models.common.presets import debug_run, full_size_run, spread_experts
from spurline.models.qwen3.configs import Qwen3Config
from spurline.moe.config import MoEConfig

if TYPE_CHECKING:
    from spurline.models.qwen3_vl.model import Qwen3VL


@dataclass(frozen=True)
class VisionConfig:
    """The vision encoder: patches of 16 x 16 pixels, of which 2 x 2 become one position of the sequence."""

    dim: int = 1152
    """Width of the encoder."""
    num_layers: int = 27
    """Blocks of the encoder."""
    num_heads: int = 16
    """Attention heads of the encoder."""
    hidden_dim: int = 4304
    """Hidden width of the encoder's feed-forward."""
    positions_per_side: int = 48
    """Side of the square grid of learned position embeddings, which is interpolated to the size of each image."""
    deepstack_layers: tuple[int, ...] = (8, 16, 24)
    """DeepStack: encoder blocks whose outputs are also added to the text model, after its first block, second, etc."""

    def problems(self) -> list[str]:
        found = not_positive(self, "dim", "num_layers", "num_heads", "hidden_dim", "positions_per_side")
        if self.num_heads > 0 and self.dim % (4 * self.num_heads):
            found.append(f"dim {self.dim} must be a multiple of 4 * num_heads: heads turn with rows and with columns")
        layers = list(self.deepstack_layers)
        if layers != sorted(set(layers)) or any(not 0 <= layer < self.num_layers for layer in layers):
            found.append(f"deepstack_layers must be rising numbers below num_layers {self.num_layers}, got {layers}")
        return found

    def num_params(self, text_dim: int) -> int:
        attention = 4 * self.dim * (self.dim + 1)
        feed_forward = 2 * self.dim * self.hidden_dim + self.hidden_dim + self.dim
        blocks = self.num_layers * (attention + feed_forward + 4 * self.dim)
        merged_dim = MERGE**2 * self.dim
        merger = merged_dim * (merged_dim + 1) + (merged_dim + 1) * text_dim
        mergers = merger + 2 * self.dim + len(self.deepstack_layers) * (merger + 2 * merged_dim)
        return (PATCH_DIM + 1) * self.dim + self.num_table_params() + blocks + mergers

    def num_table_params(self) -> int:
        return self.positions_per_side**2 * self.dim


@dataclass(frozen=True)
class Qwen3VLConfig(Qwen3Config):
    """Qwen3 with a vision encoder."""

    mrope_section: tuple[int, int, int] = (24, 20, 20)
    """How many of a head's channel pairs rotate by time, by height and by width, interleaved."""
    vision: VisionConfig = field(default_factory=VisionConfig)

    def build(self) -> Qwen3VL:
        from spurline.models.qwen3_vl.model import Qwen3VL

        return Qwen3VL(self)

    def pairs_of_axis(self) -> list[int]:
        """The axis by which each of a head's channel pairs rotates: time (0), height (1) or width (2)."""
        _, height, width = self.mrope_section
        is_height = [pair % 3 == 1 and pair < 3 * height for pair in range(self.head_dim // 2)]
        is_width = [pair % 3 == 2 and pair < 3 * width for pair in range(self.head_dim // 2)]
        return [1 if h else 2 if w else 0 for h, w in zip(is_height, is_width, strict=True)]

    def parallel_facts(self) -> ParallelFacts:
        return replace(super().parallel_facts(), first_stage_layers=max(1, len(self.vision.deepstack_layers)))

    def problems(self) -> list[str]:
        found = super().problems() + [f"vision.{problem}" for problem in self.vision.problems()]
        counts = tuple(self.pairs_of_axis().count(axis) for axis in range(3))
        if counts != self.mrope_section:
            found.append(
                f"mrope_section {self.mrope_section} does not fit the {self.head_dim // 2} pairs of channels of a head"
                f" (head_dim / 2), which take turns: {counts} would"
            )
        num_added = len(self.vision.deepstack_layers)
        if num_added > self.num_layers:
            found.append(f"vision.deepstack_layers are {num_added}, more than num_layers {self.num_layers}")
        return found

    def _embed_cost(self) -> Cost:
        """The vision encoder is counted as if every fourth position were an image feature, made of 4 patches.

        Its attention is left out because it depends on image sizes. The position table is only looked up.
        """
        params, table = self.vision.num_params(self.dim), self.vision.num_table_params()
        return super()._embed_cost() + Cost(params, params, 6 * (params - table))


@dataclass(frozen=True)
class Qwen3VLMoEConfig(SparseDecoderConfig, Qwen3VLConfig):
    """Qwen3-VL with MoE layers in the text model."""


M = TypeVar("M", bound=Qwen3VLConfig)

_DEBUG: dict[str, Any] = {
    "dim": 128,
    "num_layers": 3,
    "head_dim": 48,
    "mrope_section": (8, 8, 8),
    "vision": VisionConfig(
        dim=64, num_layers=3, num_heads=4, hidden_dim=192, positions_per_side=8, deepstack_layers=(0, 1)
    ),
}


def _debug_run(model: M) -> RunConfig[M]:
    """Enough steps to learn what is in an image, which takes longer than learning to spell captions."""
    run = _on_pictures(debug_run(model))
    return replace(run, training=replace(run.training, steps=240, seq_len=48))


def _on_pictures(run: RunConfig[M]) -> RunConfig[M]:
    return replace(run, data=Data(kind="pictures"), metrics=Metrics(sample_prompt="a ", sample_tokens=80))


def qwen3_vl_debugmodel() -> RunConfig[Qwen3VLConfig]:
    """A tiny dense model that learns to describe drawn images in seconds on a CPU."""
    return _debug_run(Qwen3VLConfig(dense_hidden_dim=384, tied_embeddings=True, **_DEBUG))


def qwen3_vl_debugmodel_moe() -> RunConfig[Qwen3VLMoEConfig]:
    """The same with 8 experts, 2 per token."""
    moe = MoEConfig(hidden_dim=96, num_experts=8, top_k=2, route_norm=True, aux_loss="batch")
    return _debug_run(Qwen3VLMoEConfig(moe=moe, **_DEBUG))


_PUBLISHED: dict[str, Any] = {"vocab_size": 151_936, "head_dim": 128, "rope_theta": 5e6, "norm_eps": 1e-6}
_SMALL_VISION = VisionConfig(dim=1024, num_layers=24, hidden_dim=4096, deepstack_layers=(5, 11, 17))


def _dense(
    lr: float,
    vision: VisionConfig,
    dim: int,
    num_layers: int,
    num_heads: int,
    dense_hidden_dim: int,
    tied_embeddings: bool = False,
) -> RunConfig[Qwen3VLConfig]:
    model = Qwen3VLConfig(
        vision=vision,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        dense_hidden_dim=dense_hidden_dim,
        tied_embeddings=tied_embeddings,
        **_PUBLISHED,
    )
    return _on_pictures(full_size_run(model, lr))


def _sparse(
    lr: float, dim: int, num_layers: int, num_heads: int, expert_hidden_dim: int
) -> RunConfig[Qwen3VLMoEConfig]:
    moe = MoEConfig(
        hidden_dim=expert_hidden_dim,
        num_experts=128,
        top_k=8,
        route_norm=True,
        aux_loss="batch",
        aux_loss_weight=1e-3,
    )
    model = Qwen3VLMoEConfig(dim=dim, num_layers=num_layers, num_heads=num_heads, num_kv_heads=4, moe=moe, **_PUBLISHED)
    return _on_pictures(full_size_run(model, lr))


def qwen3_vl_2b() -> RunConfig[Qwen3VLConfig]:
    """Dense, 28 layers of width 2048, tied embeddings; 24 vision layers."""
    return _dense(4e-4, _SMALL_VISION, 2048, 28, num_heads=16, dense_hidden_dim=6144, tied_embeddings=True)


def qwen3_vl_4b() -> RunConfig[Qwen3VLConfig]:
    """Dense, 36 layers of width 2560, tied embeddings; 24 vision layers."""
    return _dense(3e-4, _SMALL_VISION, 2560, 36, num_heads=32, dense_hidden_dim=9728, tied_embeddings=True)


def qwen3_vl_8b() -> RunConfig[Qwen3VLConfig]:
    """Dense, 36 layers of width 4096; 27 vision layers."""
    return _dense(3e-4, VisionConfig(), 4096, 36, num_heads=32, dense_hidden_dim=12_288)


def qwen3_vl_32b() -> RunConfig[Qwen3VLConfig]:
    """Dense, 64 layers of width 5120; 27 vision layers."""
    return _dense(1.5e-4, VisionConfig(), 5120, 64, num_heads=64, dense_hidden_dim=25_600)


def qwen3_vl_30b_a3b() -> RunConfig[Qwen3VLMoEConfig]:
    """48 layers of width 2048 with 128 experts, 8 per token; 27 vision layers."""
    return _sparse(3e-4, dim=2048, num_layers=48, num_heads=32, expert_hidden_dim=768)


def qwen3_vl_235b_a22b() -> RunConfig[Qwen3VLMoEConfig]:
    """94 layers of width 4096 with 128 experts, 8 per token; 27 vision layers."""
    run = _sparse(2e-4, dim=4096, num_layers=94, num_heads=64, expert_hidden_dim=1536)
    return spread_experts(run, 16, resend_rows=True)


CONFIGS: dict[str, Callable[[], RunConfig[Any]]] = {
    preset.__name__: preset
    for preset in (
        qwen3_vl_debugmodel,
        qwen3_vl_debugmodel_moe,
        qwen3_vl_2b,
        qwen3_vl_4b,
        qwen3_vl_8b,
        qwen3_vl_32b,
        qwen3_vl_30b_a3b,
        qwen3_vl_235b_a22b,
    )
}
