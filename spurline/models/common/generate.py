"""Sample text from a language model."""

import torch
from torch import Tensor, nn

from spurline.parallel.tensor import TensorParallel


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens_BL: Tensor,
    num_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 40,
    generator: torch.Generator | None = None,
    max_context: int,
) -> Tensor:
    """Append `num_tokens` sampled tokens to each row: (B, L) -> (B, L + num_tokens).

    The model sees the last `max_context` tokens. Temperature 0 takes the likeliest token; top_k 0 keeps all tokens.
    """
    if tokens_BL.shape[1] == 0:
        raise ValueError("generate needs a prompt of at least one token, got none")
    if temperature < 0 or top_k < 0 or max_context < 1:
        raise ValueError(
            "generate needs temperature >= 0, top_k >= 0 and max_context >= 1,"
            f" got temperature {temperature}, top_k {top_k}, max_context {max_context}"
        )
    whole = getattr(model, "tp", TensorParallel()).join_vocabulary
    was_training = model.training
    model.eval()
    try:
        for _ in range(num_tokens):
            logits_BV = whole(model(tokens_BL[:, -max_context:])[:, -1])
            next_B1 = _choose(logits_BV, temperature, top_k, generator)
            tokens_BL = torch.cat([tokens_BL, next_B1.to(tokens_BL.device)], dim=1)
    finally:
        model.train(was_training)
    return tokens_BL


def _choose(logits_BV: Tensor, temperature: float, top_k: int, generator: torch.Generator | None) -> Tensor:
    """Pick one token a row: (B, V) -> (B, 1) on the CPU, where a seed means the same whatever the model's device."""
    logits_BV = logits_BV.float().cpu()
    if not torch.isfinite(logits_BV).all():
        raise ValueError("the model's logits are not finite numbers: it has diverged, and has nothing to sample from")
    if temperature == 0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    vocab_size = logits_BV.shape[1]
    best_BK, token_BK = logits_BV.topk(min(top_k or vocab_size, vocab_size), dim=-1)
    choice_B1 = torch.multinomial((best_BK / temperature).softmax(dim=-1), 1, generator=generator)
    return token_BK.gather(1, choice_B1)
