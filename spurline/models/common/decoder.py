"""What every decoder-only language model shares: embedding, pre-norm residual blocks, final norm, output head."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from spurline.models.common.decoder_config import DecoderConfig
from spurline.models.common.feed_forward import FeedForward
from spurline.models.common.init import INIT_STD, residual_std
from spurline.models.common.linear import Embedding, Linear
from spurline.models.common.norm import RMSNorm
from spurline.moe import MoE
from spurline.parallel.tensor import TensorParallel


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

    def forward(self, x_BlD: Tensor, length: int | None = None) -> Tensor:
        """`length` is that of the whole sequences, where x is this rank's share of them."""
        x_BlD = x_BlD + self._on_whole_sequences(self.attention, self.attention_norm(x_BlD), length)
        if self.moe is not None:
            return x_BlD + self.moe(self.ffn_norm(x_BlD))
        assert self.feed_forward is not None
        return x_BlD + self._on_whole_sequences(self.feed_forward, self.ffn_norm(x_BlD), length)

    def _on_whole_sequences(self, module: nn.Module, x_BlD: Tensor, length: int | None) -> Tensor:
        return self.tp.scatter(module(self.tp.gather(x_BlD, length)))


class Decoder(nn.Module):
    """Language model: tokens (B, L) -> logits (B, L, vocab_size) in `compute_dtype`.

    A family gives its attention: make_attention(output_std), called for each block, with the standard deviation of the
    initial weights that write into the residual stream. Under tensor parallelism, a rank has its share of the positions
    between blocks, and its share of the vocabulary at the end.
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
        self.norm = RMSNorm(config.dim, config.norm_eps)
        # Tied, the embedding is the output head: one parameter in one place, also where it is split or sharded.
        self.output = None if config.tied_embeddings else Linear(config.dim, config.vocab_size)
        self.tensor_parallel_dims = {} if config.tied_embeddings else {"output.weight": 0}
        self.tp = TensorParallel()

    def forward(self, tokens_BL: Tensor) -> Tensor:
        # Every module follows the dtype of its input, so this cast decides for the whole model.
        x_BlD = self.embedding(tokens_BL).to(self.compute_dtype)
        for block in self.layers.values():
            x_BlD = block(x_BlD, tokens_BL.shape[1])
        x_BLD = self.tp.gather(self.norm(x_BlD), tokens_BL.shape[1])
        return self.embedding.score(x_BLD) if self.output is None else self.output(x_BLD)
