"""One block of a decoder. B sequences of L positions, of which this rank has l; D model width."""

from torch import Tensor, nn

from spurline.models.common.context import BlockContext
from spurline.models.common.decoder_config import DecoderConfig
from spurline.models.common.feed_forward import FeedForward
from spurline.models.common.init import INIT_STD, residual_std
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

    def forward(self, x_BlD: Tensor, context: BlockContext) -> Tensor:
        normed_BLD = self.tp.all_gather_sequence(self.attention_norm(x_BlD), context.length)
        x_BlD = x_BlD + self.tp.reduce_scatter_sequence(self.attention(normed_BLD, context))
        if self.moe is not None:
            return x_BlD + self.moe(self.ffn_norm(x_BlD), context.length, context.shard)
        assert self.feed_forward is not None
        normed_BLD = self.tp.all_gather_sequence(self.ffn_norm(x_BlD), context.length)
        return x_BlD + self.tp.reduce_scatter_sequence(self.feed_forward(normed_BLD))
