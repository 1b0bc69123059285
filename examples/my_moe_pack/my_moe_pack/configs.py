"""The family's config and presets: what `spurline configs` and `--module my_moe` show. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spurline.config import RunConfig
from spurline.models.common.decoder_config import GroupedQueryConfig, SparseDecoderConfig
from spurline.models.common.presets import debug_run
from spurline.moe import MoEConfig

if TYPE_CHECKING:
    from my_moe_pack.model import MyMoE


@dataclass(frozen=True)
class MyMoEConfig(SparseDecoderConfig, GroupedQueryConfig):
    """Grouped-query attention and experts. A field that is added here becomes an option, --model.<field>."""

    embedding_scale: float = 8.0
    """Factor that embeddings are multiplied by."""

    def build(self) -> MyMoE:
        from my_moe_pack.model import MyMoE

        return MyMoE(self)


def my_moe_tiny() -> RunConfig[MyMoEConfig]:
    """Two layers, 8 experts behind a cosine router: learns in seconds on a CPU."""
    moe = MoEConfig(hidden_dim=32, num_experts=8, top_k=2, aux_loss="sequence", router="cosine")
    return debug_run(MyMoEConfig(dim=32, num_layers=2, num_dense_layers=1, dense_hidden_dim=64, head_dim=8, moe=moe))


CONFIGS = {"my_moe_tiny": my_moe_tiny}
