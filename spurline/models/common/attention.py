"""Multi-head latent attention (MLA): keys and values of all heads come from one narrow latent per token.

Shapes: B batch rows, L positions, D model width, H heads, C latent rank, N head width without position,
R head width with rotary position, V head width of the value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spurline.models.common.decoder_config import YarnConfig
from spurline.models.common.init import INIT_STD
from spurline.models.common.linear import Linear
from spurline.models.common.norm import RMSNorm
from spurline.models.common.rope import apply_rope, rope_tables


class LatentAttention(nn.Module):
    """Causal multi-head latent attention: (B, L, D) -> (B, L, D).

    A head's query and key have two parts: one from the latents, without position, and one that is rotated by position.
    The rotated key is computed once and shared by all heads.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        q_lora_rank: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        rope_theta: float,
        norm_eps: float,
        yarn: YarnConfig | None = None,
        output_std: float = INIT_STD,
    ) -> None:
        super().__init__()
        self.q_lora_rank = q_lora_rank
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.qk_head_dim = qk_nope_head_dim + qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.rope_theta = rope_theta
        self.yarn = yarn or YarnConfig()
        self.softmax_scale = self.qk_head_dim**-0.5 * self.yarn.softmax_scale

        if q_lora_rank:
            self.wq_a = Linear(dim, q_lora_rank)
            self.q_norm = RMSNorm(q_lora_rank, norm_eps)
            self.wq_b = Linear(q_lora_rank, num_heads * self.qk_head_dim)
        else:
            self.wq = Linear(dim, num_heads * self.qk_head_dim)
        self.wkv_a = Linear(dim, kv_lora_rank + qk_rope_head_dim)
        self.kv_norm = RMSNorm(kv_lora_rank, norm_eps)
        self.wkv_b = Linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim))
        self.wo = Linear(num_heads * v_head_dim, dim, std=output_std)
        # By heads; what comes before them is the same for all.
        per_head_query = "wq_b.weight" if q_lora_rank else "wq.weight"
        self.tensor_parallel_dims = {per_head_query: 0, "wkv_b.weight": 0, "wo.weight": 1}

    def forward(self, x_BLD: Tensor, positions_L: Tensor | None = None) -> Tensor:
        if positions_L is None:
            positions_L = torch.arange(x_BLD.shape[1], device=x_BLD.device)
        tables = rope_tables(positions_L, self.qk_rope_head_dim, self.rope_theta, self.yarn)
        q_BLHQ = self._queries(x_BLD, tables)
        k_BLHQ, v_BLHV = self._keys_and_values(x_BLD, tables)
        out_BHLV = F.scaled_dot_product_attention(
            q_BLHQ.transpose(1, 2),
            k_BLHQ.transpose(1, 2),
            v_BLHV.transpose(1, 2),
            is_causal=True,
            scale=self.softmax_scale,
        )
        return self.wo(out_BHLV.transpose(1, 2).flatten(2))

    def _queries(self, x_BLD: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Each head's query, [without position | rotated]: (B, L, D) -> (B, L, H, N + R)."""
        q = self.wq_b(self.q_norm(self.wq_a(x_BLD))) if self.q_lora_rank else self.wq(x_BLD)
        q_BLHQ = q.unflatten(-1, (-1, self.qk_head_dim))
        q_BLHN, q_BLHR = q_BLHQ.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        return torch.cat([q_BLHN, apply_rope(q_BLHR, *tables)], dim=-1)

    def _keys_and_values(self, x_BLD: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Each head's key, [without position | rotated], and value: (B, L, D) -> (B, L, H, N + R), (B, L, H, V)."""
        latent_BLC, k_BLR = self.wkv_a(x_BLD).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        kv_BLH = self.wkv_b(self.kv_norm(latent_BLC)).unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim))
        k_BLHN, v_BLHV = kv_BLH.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        k_BLHR = apply_rope(k_BLR.unsqueeze(2), *tables).expand(-1, -1, k_BLHN.shape[2], -1)
        return torch.cat([k_BLHN, k_BLHR], dim=-1), v_BLHV
