"""Multi-head latent attention (MLA): keys and values of all heads come from one narrow latent per token.

Shapes: B batch rows, L positions, D model width, H heads, C latent rank, N head width without position,
R head width with rotary position, Q = N + R, V head width of the value; S positions of the KV cache, X = C + R.
"""

import torch
from torch import Tensor, nn

from spurline.comm.sequence import HeadTailShard
from spurline.lora.adapters import product, whole
from spurline.models.common.cache import LayerKVCache, attend_to_past
from spurline.models.common.context import BlockContext
from spurline.models.common.decoder_config import YarnConfig
from spurline.models.common.init import INIT_STD
from spurline.models.common.linear import Linear
from spurline.models.common.mask import attend
from spurline.models.common.norm import RMSNorm
from spurline.models.common.rope import Rope, apply_rope
from spurline.parallel.context import ContextParallel


class LatentAttention(nn.Module):
    """Causal multi-head latent attention: (B, L, D) -> (B, L, D).

    A head's query and key have two parts: one from the latents, without position, and one that is rotated by position.
    The rotated key is computed once and shared by all heads. That key and the latent are all that the KV cache holds.
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
        self.softmax_scale = self.qk_head_dim**-0.5 * (yarn or YarnConfig()).softmax_scale

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
        self.cp = ContextParallel()
        # Split by heads; the projections to the latents are replicated.
        per_head_query = "wq_b.weight" if q_lora_rank else "wq.weight"
        self.tensor_parallel_dims = {per_head_query: 0, "wkv_b.weight": 0, "wo.weight": 1}

    def forward(self, x_BLD: Tensor, context: BlockContext) -> Tensor:
        q_BLHN, q_BLHR = self._queries(x_BLD, context.rope)
        latent_BLC, k_BLR = self._latents(x_BLD, context.rope)
        if context.cache is not None:
            out_BLHV = self._attend_with_cache(q_BLHN, q_BLHR, latent_BLC, k_BLR, context.cache)
        else:
            out_BLHV = self._attend(q_BLHN, q_BLHR, latent_BLC, k_BLR, context)
        return self.wo(out_BLHV.flatten(2))

    def _attend(
        self, q_BLHN: Tensor, q_BLHR: Tensor, latent_BLC: Tensor, k_BLR: Tensor, context: BlockContext
    ) -> Tensor:
        shard = context.shard
        q_BLHQ = self.cp.queries(torch.cat([q_BLHN, q_BLHR], dim=-1), shard)
        if shard is not None:  # other ranks need one latent and one key per position, however many heads there are
            latent_BLX = self.cp.all_gather_positions(torch.cat([latent_BLC, k_BLR], dim=-1), shard)
            latent_BLC, k_BLR = latent_BLX.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        k_BLHQ, v_BLHV = self._keys_and_values(latent_BLC, k_BLR, shard)
        q_BHLQ, k_BHLQ, v_BHLV = (x.transpose(1, 2) for x in (q_BLHQ, k_BLHQ, v_BLHV))
        out_BHLV = attend(q_BHLQ, k_BHLQ, v_BHLV, context.mask, self.softmax_scale)
        return self.cp.outputs(out_BHLV.transpose(1, 2), shard)

    def _attend_with_cache(
        self, q_BLHN: Tensor, q_BLHR: Tensor, latent_BLC: Tensor, k_BLR: Tensor, cache: LayerKVCache
    ) -> Tensor:
        (past_BSX,) = cache.extend(torch.cat([latent_BLC, k_BLR], dim=-1))
        q_BHLN, q_BHLR = q_BLHN.transpose(1, 2), q_BLHR.transpose(1, 2)
        if cache.has_past:
            return self._attend_to_latents(q_BHLN, q_BHLR, past_BSX, cache.mask).transpose(1, 2)
        k_BLHQ, v_BLHV = self._keys_and_values(latent_BLC, k_BLR)
        q_BHLQ = torch.cat([q_BHLN, q_BHLR], dim=-1)
        keys_and_values = k_BLHQ.transpose(1, 2), v_BLHV.transpose(1, 2)
        return attend(q_BHLQ, *keys_and_values, cache.mask, self.softmax_scale).transpose(1, 2)

    def _queries(self, x_BLD: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Each head's query, without position and rotated: (B, L, D) -> (B, L, H, N), (B, L, H, R)."""
        q = self.wq_b(self.q_norm(self.wq_a(x_BLD))) if self.q_lora_rank else self.wq(x_BLD)
        q_BLHQ = q.unflatten(-1, (-1, self.qk_head_dim))
        q_BLHN, q_BLHR = q_BLHQ.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        return q_BLHN, apply_rope(q_BLHR, *rope)

    def _latents(self, x_BLD: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """The latent of keys and values, and the rotated key of all heads: (B, L, D) -> (B, L, C), (B, L, R)."""
        latent_BLC, k_BLR = self.wkv_a(x_BLD).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        return self.kv_norm(latent_BLC), apply_rope(k_BLR.unsqueeze(2), *rope).squeeze(2)

    def _keys_and_values(
        self, latent_BLC: Tensor, k_BLR: Tensor, shard: HeadTailShard | None = None
    ) -> tuple[Tensor, Tensor]:
        """Each head's key, [without position | rotated], and value: -> (B, L, H, Q), (B, L, H, V).

        With a shard, only for the heads that this rank attends with.
        """
        if shard is None:
            kv_BLX = self.wkv_b(latent_BLC)
        else:
            weight_XC = self.cp.own_heads(whole(self.wkv_b.weight_of("weight")), shard)
            kv_BLX = product(latent_BLC, weight_XC, self.wkv_b.precision)
        kv_BLH = kv_BLX.unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim))
        k_BLHN, v_BLHV = kv_BLH.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        k_BLHR = k_BLR.unsqueeze(2).expand(-1, -1, k_BLHN.shape[2], -1)
        return torch.cat([k_BLHN, k_BLHR], dim=-1), v_BLHV

    def _attend_to_latents(self, q_BHLN: Tensor, q_BHLR: Tensor, past_BSX: Tensor, mask_B1LS: Tensor | None) -> Tensor:
        """Attention to the cached latents, with the key and value projections absorbed into query and output.

        q . (W_k c) is (W_k^T q) . c, and a weighted sum of W_v c is W_v times the weighted sum of c: -> (B, H, L, V).
        """
        weight_HFC = whole(self.wkv_b.weight_of("weight")).to(q_BHLN.dtype).unflatten(0, (q_BHLN.shape[1], -1))
        key_HNC, value_HVC = weight_HFC.split([self.qk_nope_head_dim, self.v_head_dim], dim=1)
        q_BHLX = torch.cat([torch.einsum("bhln,hnc->bhlc", q_BHLN, key_HNC), q_BHLR], dim=-1)
        past_B1SX = past_BSX.unsqueeze(1)  # one head of keys, shared by all query heads
        latent_B1SC = past_B1SX[..., : self.kv_lora_rank]
        sum_BHLC = attend_to_past(q_BHLX, past_B1SX, latent_B1SC, mask_B1LS, self.softmax_scale)
        return torch.einsum("bhlc,hvc->bhlv", sum_BHLC, value_HVC)
