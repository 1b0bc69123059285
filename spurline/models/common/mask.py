"""Attention under a mask: causal, dense, or by blocks.

B sequences of L positions in n blocks; H heads of queries, G of keys and values, R and V their widths.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from spurline.accelerator import acts_as_accelerator

WITHOUT_BLOCKS = {"mps"}
"""Accelerators on which flex_attention does not train."""
BLOCK = 128
"""Positions of a block of a BlockMask: what the kernels on accelerators work on at a time."""


def attend(q_BHLR: Tensor, k_BGLR: Tensor, v_BGLV: Tensor, mask: Tensor | BlockMask | None, scale: float) -> Tensor:
    """Scaled dot-product attention -> (B, H, L, V); causal without a mask. Query heads may share heads of keys."""
    is_grouped = q_BHLR.shape[1] != k_BGLR.shape[1]
    if isinstance(mask, BlockMask):
        if not (q_BHLR.is_cpu and torch.is_grad_enabled()):
            return _flex(q_BHLR.device)(q_BHLR, k_BGLR, v_BGLV, block_mask=mask, scale=scale, enable_gqa=is_grouped)
        mask = dense_mask(mask)  # a CPU that stands in for an accelerator, on which flex_attention does not train
    return F.scaled_dot_product_attention(
        q_BHLR, k_BGLR, v_BGLV, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
    )


def document_mask(documents_BL: Tensor) -> Tensor | BlockMask:
    """Causal attention within each document: (B, L) document ids, which go up, -> a mask for `attend`.

    On a CPU (B, 1, L, L), True where a query sees a key; on an accelerator by blocks, so that no tensor has L * L
    numbers and blocks of other documents cost nothing. Rotary positions go on counting across a boundary: attention
    depends only on the distance between two positions.
    """
    if acts_as_accelerator(documents_BL.device) and documents_BL.device.type not in WITHOUT_BLOCKS:
        return document_blocks(documents_BL)
    length = documents_BL.shape[1]
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=documents_BL.device).tril()
    return (documents_BL.unsqueeze(2) == documents_BL.unsqueeze(1)).logical_and(causal_LL).unsqueeze(1)


def document_blocks(documents_BL: Tensor) -> BlockMask:
    """The same by blocks: which blocks of keys each block of queries sees in part, and which as a whole."""
    length = documents_BL.shape[1]
    num_blocks = -(-length // BLOCK)
    place_n = torch.arange(num_blocks, device=documents_BL.device)
    first_Bn = documents_BL[:, place_n * BLOCK]
    last_Bn = documents_BL[:, (place_n * BLOCK + BLOCK - 1).clamp(max=length - 1)]
    earlier_nn, same_nn = place_n < place_n.unsqueeze(1), place_n == place_n.unsqueeze(1)
    # Ids go up: an earlier block of keys is seen if its last document is still the first one of the queries.
    is_seen_Bnn = (last_Bn.unsqueeze(1) == first_Bn.unsqueeze(2)) & earlier_nn
    is_whole_Bnn = is_seen_Bnn & (first_Bn.unsqueeze(1) == last_Bn.unsqueeze(2))
    in_part_Bnn = (is_seen_Bnn & ~is_whole_Bnn) | same_nn

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (documents_BL[b, query] == documents_BL[b, key]) & (key <= query)

    return BlockMask.from_kv_blocks(
        *_ordered(in_part_Bnn), *_ordered(is_whole_Bnn), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, length)
    )


def _ordered(is_seen_Bnn: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each block of queries sees, (B, 1, n), and which, (B, 1, n, n): these first."""
    number_B1n = is_seen_Bnn.sum(-1, dtype=torch.int32).unsqueeze(1)
    order_B1nn = torch.argsort(is_seen_Bnn.to(torch.int8), dim=-1, descending=True, stable=True).unsqueeze(1)
    return number_B1n, order_B1nn.to(torch.int32)


def dense_mask(mask: Tensor | BlockMask | None) -> Tensor | None:
    """The mask as (B, 1, L, L), True where a query sees a key; None if it is causal."""
    if not isinstance(mask, BlockMask):
        return mask
    B, (length, _), device = mask.kv_num_blocks.shape[0], mask.seq_lengths, mask.kv_num_blocks.device
    batch, place = torch.arange(B, device=device), torch.arange(length, device=device)
    return mask.mask_mod(batch.view(-1, 1, 1), batch[:1], place.view(1, -1, 1), place.view(1, 1, -1)).unsqueeze(1)


def _flex(device: torch.device) -> Any:
    """flex_attention as one kernel: compiled by itself, unless the block that it is in is compiled."""
    return flex_attention if torch.compiler.is_compiling() or device.type == "cpu" else _compiled_flex()


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)
