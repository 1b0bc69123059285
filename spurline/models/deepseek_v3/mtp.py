"""Multi-token prediction: modules that look further ahead than the next token, while a model trains.

B sequences of L positions, of which this rank has l; D width.
"""

import torch
from torch import Tensor, nn

from spurline.models.common.decoder import DecoderBlock
from spurline.models.common.linear import Linear
from spurline.models.common.norm import RMSNorm
from spurline.models.common.rope import Rope
from spurline.models.deepseek_v3.configs import DeepSeekV3Config


class PredictionModule(nn.Module):
    """What the output head saw at each position, and the next token, to what it sees for one token more.

    (B, l, D) and embeddings (B, l, D) -> (B, l, D). Embedding and output head are those of the model.
    """

    def __init__(self, config: DeepSeekV3Config, attention: nn.Module) -> None:
        super().__init__()
        self.enorm = RMSNorm(config.dim, config.norm_eps)
        self.hnorm = RMSNorm(config.dim, config.norm_eps)
        self.eh_proj = Linear(2 * config.dim, config.dim)
        self.block = DecoderBlock(config, config.num_layers - 1, attention)  # one more like the last
        self.norm = RMSNorm(config.dim, config.norm_eps)

    def forward(
        self, x_BlD: Tensor, embedded_BlD: Tensor, rope: Rope, length: int, mask_B1LL: Tensor | None = None
    ) -> Tensor:
        x_BlD = self.eh_proj(torch.cat([self.enorm(embedded_BlD), self.hnorm(x_BlD)], dim=-1))
        return self.norm(self.block(x_BlD, rope, length, None, mask_B1LL))
