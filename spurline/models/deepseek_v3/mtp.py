"""Multi-token prediction (MTP): modules that learn to predict tokens beyond the next one.

B sequences of L positions, of which this rank has l; D model width.
"""

import torch
from torch import Tensor, nn

from spurline.models.common.block import DecoderBlock
from spurline.models.common.context import BlockContext
from spurline.models.common.linear import Linear
from spurline.models.common.norm import RMSNorm
from spurline.models.deepseek_v3.configs import DeepSeekV3Config


class PredictionModule(nn.Module):
    """Hidden states and the embeddings of the tokens ahead -> hidden states that predict one token further.

    (B, l, D) and (B, l, D) -> (B, l, D). Embedding and output matrix are shared with the model.
    """

    def __init__(self, config: DeepSeekV3Config, attention: nn.Module) -> None:
        super().__init__()
        self.enorm = RMSNorm(config.dim, config.norm_eps)
        self.hnorm = RMSNorm(config.dim, config.norm_eps)
        self.eh_proj = Linear(2 * config.dim, config.dim)
        self.block = DecoderBlock(config, config.num_layers - 1, attention)
        self.norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, hidden_BlD: Tensor, embedded_BlD: Tensor, context: BlockContext) -> Tensor:
        x_BlD = self.eh_proj(torch.cat([self.enorm(embedded_BlD), self.hnorm(hidden_BlD)], dim=-1))
        return self.norm(self.block(x_BlD, context))
