"""What every decoder-only language model shares: embedding, blocks, and a head of final norm and output matrix.

B sequences of L positions, of which this rank has l; D model width, V vocabulary, P pairs of rotary channels.
"""

from typing import Any

import torch
from torch import Tensor, nn

from spurline.models.common.block import DecoderBlock
from spurline.models.common.cache import KVCache
from spurline.models.common.context import BlockContext
from spurline.models.common.decoder_config import DecoderConfig
from spurline.models.common.init import residual_std
from spurline.models.common.linear import Embedding, Linear
from spurline.models.common.loss import LossSum, chunked_loss_sum
from spurline.models.common.mask import document_mask
from spurline.models.common.norm import RMSNorm
from spurline.models.common.rope import Rope, rope_tables
from spurline.parallel.tensor import TensorParallel


class Decoder(nn.Module):
    """Language model: tokens (B, L) -> logits (B, L, vocab_size) in `compute_dtype`.

    A family overrides `make_attention(layer)`. Under tensor parallelism, a rank has a part of the positions between
    blocks, and of the vocabulary in the logits.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = torch.float32
        self.output_std = residual_std(config.num_layers)
        self.embedding = Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict(
            {str(layer): DecoderBlock(config, layer, self.make_attention(layer)) for layer in range(config.num_layers)}
        )
        self.norm = RMSNorm(config.dim, config.norm_eps)
        # Tied, the embedding is the output matrix too: one parameter in one place, also where it is split or sharded.
        self.output = None if config.tied_embeddings else Linear(config.dim, config.vocab_size)
        self.tensor_parallel_dims = {} if config.tied_embeddings else {"output.weight": 0}
        self.tp = TensorParallel()

    def make_attention(self, layer: int) -> nn.Module:
        """The attention of block number `layer`, called as attention(x_BLD, context) -> (B, L, D).

        It may read `self.config`, and `self.output_std`, the standard deviation of initial weights that write into the
        residual stream. Attributes that a subclass sets in its own constructor do not exist yet.
        """
        raise NotImplementedError

    def forward(
        self,
        tokens_BL: Tensor,
        cache: KVCache | None = None,
        labels_BL: Tensor | None = None,
        loss_sum: LossSum | None = None,
        **extras: Any,
    ) -> Tensor:
        """Logits; with labels, loss_sum(logits, labels) instead, without holding the logits of all positions.

        With a KV cache, tokens continue those of the previous call, and only the last position's logits are returned:
        (B, 1, V). Extras are what the family's `block_context` takes besides.
        """
        hidden_BLD = self.last_hidden_state(tokens_BL, cache, **extras)
        if labels_BL is not None and loss_sum is not None:
            return self.loss(hidden_BLD, tokens_BL, labels_BL, loss_sum, **extras)
        return self.logits(hidden_BLD if cache is None else hidden_BLD[:, -1:])

    def last_hidden_state(self, tokens_BL: Tensor, cache: KVCache | None = None, **extras: Any) -> Tensor:
        """The hidden states behind the final norm, for all positions: (B, L) -> (B, L, D)."""
        return self.final_norm(self.hidden_states(tokens_BL, cache, **extras), tokens_BL.shape[1])

    def hidden_states(self, tokens_BL: Tensor, cache: KVCache | None = None, **extras: Any) -> Tensor:
        """The hidden states behind the last block, for this rank's positions: (B, L) -> (B, l, D)."""
        return self.run_blocks(self.embed(tokens_BL), self.block_context(tokens_BL, cache, **extras), cache)

    def embed(self, tokens_BL: Tensor) -> Tensor:
        """(B, L) -> (B, l, D), in `compute_dtype`: every module follows the dtype of its input."""
        return self.embedding(tokens_BL).to(self.compute_dtype)

    def block_context(
        self, tokens_BL: Tensor, cache: KVCache | None = None, documents_BL: Tensor | None = None
    ) -> BlockContext:
        """What all blocks need besides activations; with document ids, each position attends to its own document only.

        It depends on the shape of the tokens alone, not on their values. A cache moves on by L positions.
        """
        length, device = tokens_BL.shape[1], tokens_BL.device
        positions_L = torch.arange(length, device=device) if cache is None else cache.advance(length, device)
        mask_B1LL = None if documents_BL is None else document_mask(documents_BL)
        return BlockContext(self.rope(positions_L), length, mask_B1LL)

    def rope(self, positions_L: Tensor) -> Rope:
        """Cosine and sine of the rotary angles: (L,) or (B, L) -> two of (.., L, P)."""
        return rope_tables(positions_L, self.config.rope_dim, self.config.rope_theta, self.config.yarn)

    def run_blocks(self, x_BlD: Tensor, context: BlockContext, cache: KVCache | None = None) -> Tensor:
        """All blocks, one after another: (B, l, D) -> (B, l, D)."""
        for layer, block in self.layers.items():
            x_BlD = block(x_BlD, context.with_cache(None if cache is None else cache.layers[int(layer)]))
        return x_BlD

    def final_norm(self, x_BlD: Tensor, length: int) -> Tensor:
        """The first half of the head: (B, l, D) -> (B, L, D)."""
        return self.tp.all_gather_sequence(self.norm(x_BlD), length)

    def logits(self, hidden_BLD: Tensor) -> Tensor:
        """The second half of the head (`lm_head` elsewhere): (B, L, D) -> (B, L, V)."""
        return self.embedding.logits(hidden_BLD) if self.output is None else self.output(hidden_BLD)

    def loss(
        self, hidden_BLD: Tensor, tokens_BL: Tensor, labels_BL: Tensor, loss_sum: LossSum, **extras: Any
    ) -> Tensor:
        """The summed loss of what `last_hidden_state` returned; a family may add terms of its own."""
        return self.chunked_loss_sum(hidden_BLD, labels_BL, loss_sum)

    def chunked_loss_sum(self, hidden_BLD: Tensor, labels_BL: Tensor, loss_sum: LossSum) -> Tensor:
        """The summed loss of any hidden states behind a norm, by this model's output matrix."""
        return chunked_loss_sum(hidden_BLD, labels_BL, self.logits, loss_sum, self.config.vocab_size)
