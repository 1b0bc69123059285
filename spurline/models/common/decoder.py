"""What every decoder-only language model shares: embedding, pre-norm residual blocks, final norm, output head."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from spurline.models.common.linear import Embedding, Linear
from spurline.models.common.norm import RMSNorm
from spurline.parallel.tensor import TensorParallel


class DecoderBlock(nn.Module):
    """Pre-norm residual attention, then a dense feed-forward or an MoE layer: (B, l, D) -> (B, l, D)."""

    def __init__(
        self,
        dim: int,
        norm_eps: float,
        attention: nn.Module,
        *,
        feed_forward: nn.Module | None = None,
        moe: nn.Module | None = None,
    ) -> None:
        super().__init__()
        assert (feed_forward is None) != (moe is None), "a block has either a feed_forward or a moe"
        self.attention_norm = RMSNorm(dim, norm_eps)
        self.attention = attention
        self.ffn_norm = RMSNorm(dim, norm_eps)
        self.feed_forward = feed_forward
        self.moe = moe
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

    Under tensor parallelism, a rank has its share of the positions between blocks, and its share of the vocabulary at
    the end.
    """

    tensor_parallel_dims: ClassVar = {"output.weight": 0}

    def __init__(
        self, *, vocab_size: int, dim: int, num_layers: int, norm_eps: float, make_block: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.compute_dtype = torch.float32
        self.embedding = Embedding(vocab_size, dim)
        self.layers = nn.ModuleDict({str(layer): make_block(layer) for layer in range(num_layers)})
        self.norm = RMSNorm(dim, norm_eps)
        self.output = Linear(dim, vocab_size)
        self.tp = TensorParallel()

    def forward(self, tokens_BL: Tensor) -> Tensor:
        # Every module follows the dtype of its input, so this cast decides for the whole model.
        x_BlD = self.embedding(tokens_BL).to(self.compute_dtype)
        for block in self.layers.values():
            x_BlD = block(x_BlD, tokens_BL.shape[1])
        return self.output(self.tp.gather(self.norm(x_BlD), tokens_BL.shape[1]))
