"""What every decoder-only language model shares: embedding, pre-norm residual blocks, final norm, output head."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from spurline.models.common.linear import Embedding, Linear
from spurline.models.common.norm import RMSNorm


class DecoderBlock(nn.Module):
    """Pre-norm residual attention, then a dense feed-forward or an MoE layer: (B, L, D) -> (B, L, D)."""

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

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD))
        ffn = self.feed_forward if self.moe is None else self.moe
        assert ffn is not None
        return x_BLD + ffn(self.ffn_norm(x_BLD))


class Decoder(nn.Module):
    """Language model: tokens (B, L) -> logits (B, L, vocab_size) in `compute_dtype`."""

    def __init__(
        self, *, vocab_size: int, dim: int, num_layers: int, norm_eps: float, make_block: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.compute_dtype = torch.float32
        self.embedding = Embedding(vocab_size, dim)
        self.layers = nn.ModuleDict({str(layer): make_block(layer) for layer in range(num_layers)})
        self.norm = RMSNorm(dim, norm_eps)
        self.output = Linear(dim, vocab_size)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        # Every module follows the dtype of its input, so this cast decides for the whole model.
        x_BLD = self.embedding(tokens_BL).to(self.compute_dtype)
        for block in self.layers.values():
            x_BLD = block(x_BLD)
        return self.output(self.norm(x_BLD))
