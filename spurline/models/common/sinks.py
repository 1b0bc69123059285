"""Attention with sinks: each head has a learned logit that takes part in its softmax and adds nothing to the output.

B batch rows, L positions, H query heads, G heads of keys and values with N = H / G query heads each, R head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def attend_with_sinks(
    q_BHLR: Tensor, k_BGLR: Tensor, v_BGLR: Tensor, sinks_H: Tensor, mask_B1LL: Tensor | None, scale: float
) -> Tensor:
    """Causal attention, or attention under the mask, with sinks: -> (B, H, L, R).

    A sink is an extra key, before all others, whose dot product with its head's queries is the sink and whose value is
    zero. For one key to serve the N query heads of its group, queries get N extra channels: a one-hot encoding of the
    head. An extra query in front keeps attention causal. No logits are materialized: any fused kernel can run it.
    """
    B, H, L, R = q_BHLR.shape
    G = k_BGLR.shape[1]
    N = H // G
    q_BGNLR = F.pad(q_BHLR.view(B, G, N, L, R), [0, 0, 1, 0])
    head_N1N = torch.eye(N, dtype=q_BHLR.dtype, device=q_BHLR.device).unsqueeze(1)
    q_BHLX = torch.cat([q_BGNLR, head_N1N.expand(B, G, N, L + 1, N)], dim=-1).flatten(1, 2)
    sink_BG1X = F.pad(sinks_H.view(1, G, 1, N) / scale, [R, 0]).expand(B, G, 1, R + N)
    k_BGLX = torch.cat([sink_BG1X, F.pad(k_BGLR, [0, N])], dim=2)
    v_BGLX = F.pad(v_BGLR, [0, N, 1, 0])
    if mask_B1LL is not None:
        mask_B1LL = F.pad(F.pad(mask_B1LL, [1, 0], value=True), [0, 0, 1, 0], value=True)
    out_BHLX = F.scaled_dot_product_attention(
        q_BHLX, k_BGLX, v_BGLX, attn_mask=mask_B1LL, is_causal=mask_B1LL is None, scale=scale, enable_gqa=True
    )
    return out_BHLX[:, :, 1:, :R]
