"""Attention with a mask: causal, dense, or a BlockMask.

B sequences of L positions in n blocks, of which queries may have l in m blocks; H heads of queries, G of keys and
values, R and V their widths.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from spurline.accelerator import acts_as_accelerator
from spurline.comm.sequence import HeadTailShard

WITHOUT_BLOCKS = {"mps"}
"""Accelerators on which flex_attention does not train."""
BLOCK = 128
"""Positions per block of a BlockMask: the tile size of the kernels on accelerators."""


def attend(q_BHLR: Tensor, k_BGLR: Tensor, v_BGLV: Tensor, mask: Tensor | BlockMask | None, scale: float) -> Tensor:
    """Scaled dot-product attention -> (B, H, L, V); causal without a mask. Query heads may share heads of keys."""
    is_grouped = q_BHLR.shape[1] != k_BGLR.shape[1]
    if isinstance(mask, BlockMask):
        if not (q_BHLR.is_cpu and torch.is_grad_enabled()):
            return _flex(q_BHLR.device)(q_BHLR, k_BGLR, v_BGLV, block_mask=mask, scale=scale, enable_gqa=is_grouped)
        mask = dense_mask(mask)  # a CPU that emulates an accelerator: flex_attention does not train on CPUs
    return F.scaled_dot_product_attention(
        q_BHLR, k_BGLR, v_BGLV, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=is_grouped
    )


def attention_mask(
    documents_BL: Tensor | None, queries: HeadTailShard | None, like: Tensor
) -> Tensor | BlockMask | None:
    """The mask of causal attention for `attend`; None where it needs none.

    With document ids, each position attends only to its own document; with `queries`, queries are this rank's
    positions and keys are all positions.
    """
    if queries is None:
        return None if documents_BL is None else document_mask(documents_BL)
    if documents_BL is None:
        documents_BL = torch.zeros(1, queries.length, dtype=torch.int64, device=like.device)
    return document_mask(documents_BL, queries.positions(like.device))


def document_mask(documents_BL: Tensor, query_l: Tensor | None = None) -> Tensor | BlockMask:
    """Causal attention within each document: (B, L) ascending document ids -> a mask for `attend`.

    query_l are the ascending positions of the queries (None: all). On a CPU the mask is (B, 1, l, L), True where a
    query sees a key; on an accelerator it is a BlockMask, so that no tensor has L * L elements and blocks of other
    documents cost nothing. Rotary positions do not restart at document boundaries: attention depends only on the
    distance between two positions.
    """
    if acts_as_accelerator(documents_BL.device) and documents_BL.device.type not in WITHOUT_BLOCKS:
        return document_blocks(documents_BL, query_l)
    key_L = torch.arange(documents_BL.shape[1], device=documents_BL.device)
    is_before_lL = key_L <= (key_L if query_l is None else query_l).unsqueeze(1)
    query_document_Bl = documents_BL if query_l is None else documents_BL.index_select(1, query_l)
    return (query_document_Bl.unsqueeze(2) == documents_BL.unsqueeze(1)).logical_and(is_before_lL).unsqueeze(1)


def document_blocks(documents_BL: Tensor, query_l: Tensor | None = None) -> BlockMask:
    """The same as a BlockMask: which of n key blocks each of m query blocks sees partially, and which fully."""
    length = documents_BL.shape[1]
    key_L = torch.arange(length, device=documents_BL.device)
    position_l = key_L if query_l is None else query_l
    query_first_m, query_last_m = _first_and_last(position_l)
    key_first_n, key_last_n = _first_and_last(key_L)

    def document(place: Tensor) -> Tensor:
        return documents_BL.index_select(1, place)

    # Ids ascend: a key block is seen if its last document is the first document of the queries, or a later one.
    is_before_mn = key_first_n <= query_last_m.unsqueeze(1)
    is_seen_Bmn = (document(key_last_n).unsqueeze(1) >= document(query_first_m).unsqueeze(2)) & is_before_mn
    is_all_before_mn = key_first_n + BLOCK - 1 <= query_first_m.unsqueeze(1)  # and no key is past the end
    is_whole_Bmn = (document(key_first_n).unsqueeze(1) == document(query_last_m).unsqueeze(2)) & is_all_before_mn
    in_part_Bmn = is_seen_Bmn & ~is_whole_Bmn

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = position_l[query]
        return (documents_BL[b, position] == documents_BL[b, key]) & (key <= position)

    seq_lengths = len(position_l), length
    return BlockMask.from_kv_blocks(
        *_ordered(in_part_Bmn), *_ordered(is_whole_Bmn), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=seq_lengths
    )


def _first_and_last(position_l: Tensor) -> tuple[Tensor, Tensor]:
    """The positions at the ends of each block: (l,) -> two of (m,)."""
    length = len(position_l)
    start_m = torch.arange(0, length, BLOCK, device=position_l.device)
    return position_l[start_m], position_l[(start_m + BLOCK - 1).clamp(max=length - 1)]


def _ordered(is_seen_Bmn: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block sees, (B, 1, m), and all block indices with these first, (B, 1, m, n)."""
    number_B1m = is_seen_Bmn.sum(-1, dtype=torch.int32).unsqueeze(1)
    order_B1mn = torch.argsort(is_seen_Bmn.to(torch.int8), dim=-1, descending=True, stable=True).unsqueeze(1)
    return number_B1m, order_B1mn.to(torch.int32)


def dense_mask(mask: Tensor | BlockMask | None) -> Tensor | None:
    """The mask as (B, 1, L, L), True where a query sees a key; None if it is plainly causal."""
    if not isinstance(mask, BlockMask):
        return mask
    B, (num_queries, num_keys), device = mask.kv_num_blocks.shape[0], mask.seq_lengths, mask.kv_num_blocks.device
    batch = torch.arange(B, device=device)
    query, key = torch.arange(num_queries, device=device), torch.arange(num_keys, device=device)
    return mask.mask_mod(batch.view(-1, 1, 1), batch[:1], query.view(1, -1, 1), key.view(1, 1, -1)).unsqueeze(1)


def _flex(device: torch.device) -> Any:
    """flex_attention as one fused kernel: compiled on its own, unless the surrounding block is compiled."""
    return flex_attention if torch.compiler.is_compiling() or device.type == "cpu" else _compiled_flex()


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)
