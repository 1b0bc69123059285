"""What every decoder-only language model shares: embedding, pre-norm residual blocks, final norm, output head."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spurline.models.common.cache import Cache, LayerCache
from spurline.models.common.decoder_config import DecoderConfig
from spurline.models.common.feed_forward import FeedForward
from spurline.models.common.init import INIT_STD, residual_std
from spurline.models.common.linear import Embedding, Linear
from spurline.models.common.mask import mask_of_documents
from spurline.models.common.norm import RMSNorm
from spurline.models.common.rope import Rope, rope_tables
from spurline.moe import MoE
from spurline.parallel.tensor import TensorParallel

LossSum = Callable[[Tensor, Tensor], Tensor]
"""Logits (B, L, V) and labels (B, L) -> a sum over labels."""
MOST_LOGITS = 1 << 26
"""Logits that are held at once while a loss is computed: 256 MB in float32."""


class DecoderBlock(nn.Module):
    """Pre-norm residual attention, then a dense feed-forward or an MoE layer: (B, l, D) -> (B, l, D)."""

    def __init__(self, config: DecoderConfig, layer: int, attention: nn.Module) -> None:
        super().__init__()
        moe, output_std = config.moe_of_layer(layer), residual_std(config.num_layers)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = attention
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = None if moe else FeedForward(config.dim, config.dense_hidden_dim, output_std)
        self.moe = MoE(moe, INIT_STD, output_std) if moe else None
        self.tp = TensorParallel()

    def forward(
        self,
        x_BlD: Tensor,
        rope: Rope,
        length: int | None = None,
        cache: LayerCache | None = None,
        mask_B1LL: Tensor | None = None,
    ) -> Tensor:
        """`length` is that of the whole sequences, where x is this rank's share; rope and mask are for all of it."""
        attended_BLD = self.attention(
            self.tp.all_gather_sequence(self.attention_norm(x_BlD), length), rope, cache, mask_B1LL
        )
        x_BlD = x_BlD + self.tp.reduce_scatter_sequence(attended_BLD)
        if self.moe is not None:
            return x_BlD + self.moe(self.ffn_norm(x_BlD))
        assert self.feed_forward is not None
        return x_BlD + self.tp.reduce_scatter_sequence(
            self.feed_forward(self.tp.all_gather_sequence(self.ffn_norm(x_BlD), length))
        )


class Decoder(nn.Module):
    """Language model: tokens (B, L) -> logits (B, L, vocab_size) in `compute_dtype`.

    A family gives its attention: make_attention(output_std), called for each block, with the standard deviation of the
    initial weights that write into the residual stream. It is called as attention(x_BLD, rope, cache, mask_B1LL), where
    the mask says what each position sees (None: all before it), and says by `rope_dim` how many channels rotate. Under
    tensor parallelism, a rank has its share of the positions between blocks, and of the vocabulary at the end.
    """

    def __init__(self, config: DecoderConfig, make_attention: Callable[[float], nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32
        self.embedding = Embedding(config.vocab_size, config.dim)
        output_std = residual_std(config.num_layers)
        self.layers = nn.ModuleDict(
            {str(layer): DecoderBlock(config, layer, make_attention(output_std)) for layer in range(config.num_layers)}
        )
        self.rope_dim: int = self.layers["0"].attention.rope_dim  # type: ignore[union-attr, assignment]
        self.norm = RMSNorm(config.dim, config.norm_eps)
        # Tied, the embedding is the output head: one parameter in one place, also where it is split or sharded.
        self.output = None if config.tied_embeddings else Linear(config.dim, config.vocab_size)
        self.tensor_parallel_dims = {} if config.tied_embeddings else {"output.weight": 0}
        self.tp = TensorParallel()

    def forward(
        self,
        tokens_BL: Tensor,
        cache: Cache | None = None,
        labels_BL: Tensor | None = None,
        loss_sum: LossSum | None = None,
        **extras: Any,
    ) -> Tensor:
        """With labels, what loss_sum(logits, labels) makes of them, without ever holding the logits of all positions.

        With a cache, tokens go on where those of the last call ended, and only the last one's logits are returned:
        (B, 1, V).
        Extras are what a family's `hidden` takes besides.
        """
        x_BLD = self.hidden(tokens_BL, cache, **extras)
        if labels_BL is not None and loss_sum is not None:
            return self.loss(x_BLD, tokens_BL, labels_BL, loss_sum, **extras)
        return self.logits(x_BLD if cache is None else x_BLD[:, -1:])

    def hidden(self, tokens_BL: Tensor, cache: Cache | None = None, documents_BL: Tensor | None = None) -> Tensor:
        """What the output head sees: (B, L) -> (B, L, D). With documents, each position sees its own alone."""
        length, device = tokens_BL.shape[1], tokens_BL.device
        positions_L = torch.arange(length, device=device) if cache is None else cache.advance(length, device)
        mask_B1LL = None if documents_BL is None else mask_of_documents(documents_BL)
        x_BlD = self.run_blocks(self.embed(tokens_BL), self.rope(positions_L), length, cache, mask_B1LL)
        return self.tp.all_gather_sequence(self.norm(x_BlD), length)

    def embed(self, tokens_BL: Tensor) -> Tensor:
        """(B, L) -> (B, l, D), in the dtype of the whole model: every module follows that of its input."""
        return self.embedding(tokens_BL).to(self.compute_dtype)

    def rope(self, positions_L: Tensor) -> Rope:
        """What turns queries and keys by their positions, in all blocks: (L,) or (B, L) -> two of (.., L, P)."""
        return rope_tables(positions_L, self.rope_dim, self.config.rope_theta, self.config.yarn)

    def run_blocks(
        self,
        x_BlD: Tensor,
        rope: Rope,
        length: int,
        cache: Cache | None = None,
        mask_B1LL: Tensor | None = None,
    ) -> Tensor:
        """All blocks, one after another: (B, l, D) -> (B, l, D)."""
        for layer, block in enumerate(self.layers.values()):
            x_BlD = block(x_BlD, rope, length, None if cache is None else cache.layers[layer], mask_B1LL)
        return x_BlD

    def logits(self, x_BLD: Tensor) -> Tensor:
        """The output head: (B, L, D) -> logits (B, L, V)."""
        return self.embedding.logits(x_BLD) if self.output is None else self.output(x_BLD)

    def loss(self, x_BLD: Tensor, tokens_BL: Tensor, labels_BL: Tensor, loss_sum: LossSum, **extras: Any) -> Tensor:
        """The summed loss of what `hidden` returned; a family may have more to add."""
        return self._loss_by_chunks(x_BLD.flatten(0, 1), labels_BL.flatten(), loss_sum)

    def _loss_by_chunks(self, x_TD: Tensor, labels_T: Tensor, loss_sum: LossSum) -> Tensor:
        """Logits of one chunk of positions at a time: made, summed up and dropped; and made again for backward."""

        def loss_of(x_1cD: Tensor, labels_1c: Tensor) -> Tensor:
            return loss_sum(self.logits(x_1cD), labels_1c)

        chunk = max(1, MOST_LOGITS // self.config.vocab_size)
        if x_TD.shape[0] <= chunk:
            return loss_of(x_TD.unsqueeze(0), labels_T.unsqueeze(0))
        chunks = zip(x_TD.unsqueeze(0).split(chunk, 1), labels_T.unsqueeze(0).split(chunk, 1), strict=True)
        losses = [checkpoint(loss_of, *parts, use_reentrant=False, preserve_rng_state=False) for parts in chunks]
        return torch.stack(losses).sum()
