"""Generate text with a language model, with or without a KV cache.

B texts, L positions of one forward pass, V vocabulary, K most probable tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spurline.models.common.cache import KVCache
from spurline.models.common.sampling import Sampling
from spurline.parallel.tensor import TensorParallel


def generate(model: nn.Module, prompts: Sequence[Sequence[int]], num_tokens: int, **options: Any) -> list[list[int]]:
    """The continuation of each prompt, up to `num_tokens` tokens; the options are those of `stream`."""
    written: list[list[int]] = [[] for _ in prompts]
    for tokens in stream(model, prompts, num_tokens, **options):
        for text, token in zip(written, tokens, strict=True):
            if token is not None:
                text.append(token)
    return written


@torch.no_grad()
def stream(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    sampling: Sampling,
    seed: int = 0,
    max_context: int,
    stop_id: int | Collection[int] | None = None,
    cached: bool = True,
) -> Iterator[list[int | None]]:
    """Yield the next token of every text, `num_tokens` times; None for a text that has ended with a `stop_id`.

    A text depends on its prompt and on `seed` plus its index, never on the other texts. The model sees at most the
    last `max_context` tokens: when a text exceeds that, the older half is dropped at once (see `window_start`).
    """
    if not prompts or not all(prompts):
        raise ValueError("generate needs prompts of at least one token each")
    if problems := sampling.problems():
        raise ValueError(f"generate: {'; '.join(problems)}")
    if max_context < 1:
        raise ValueError(f"generate needs max_context >= 1, got {max_context}")
    texts = [list(prompt) for prompt in prompts]
    has_ended = [False] * len(texts)
    stop_ids = {stop_id} if stop_id is None or isinstance(stop_id, int) else set(stop_id)
    generators = [torch.Generator().manual_seed(seed + number) for number in range(len(texts))]
    reader = _Reader(model, num_tokens, max_context, cached)
    was_training = model.training
    model.eval()
    try:
        for _ in range(num_tokens):
            logits_BV = reader.logits(texts)
            tokens: list[int | None] = [None] * len(texts)
            for number, text in enumerate(texts):
                if not has_ended[number]:
                    token = sample_token(logits_BV[number], sampling, generators[number])
                    if token in stop_ids:
                        has_ended[number] = True
                        del text[:-1]  # it is complete, and must not add padding to the other texts
                    else:
                        tokens[number] = token
                        text.append(token)
            if all(has_ended):
                return
            yield tokens
    finally:
        model.train(was_training)


def printable(text: str) -> str:
    """The text without control characters, which an untrained model may produce."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def sample_token(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Sample one token from logits (V,) on the CPU, so that a seed means the same on every device."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    vocab_size = len(logits_V)
    best_K, token_K = logits_V.topk(min(sampling.top_k or vocab_size, vocab_size))
    probability_K = (best_K / sampling.temperature).softmax(dim=-1)
    if sampling.top_p < 1:
        # A token is kept if the more probable ones do not reach top_p; the first token always is.
        probability_K = probability_K * (probability_K.cumsum(dim=-1) - probability_K < sampling.top_p)
    return int(token_K[torch.multinomial(probability_K, 1, generator=generator)])


def window_start(num_tokens: int, max_context: int) -> int:
    """The first position of a text that the model sees.

    It stays the same until the context is full, then moves by half the context, so that a KV cache is rarely rebuilt.
    It depends only on the text's own length: neither the cache nor other texts change what the model sees.
    """
    half = (max_context + 1) // 2
    return -(-max(num_tokens - max_context, 0) // half) * half


class _Reader:
    """Computes the next token's logits for texts that grow by at most one token from call to call."""

    def __init__(self, model: nn.Module, num_tokens: int, max_context: int, cached: bool) -> None:
        self.model = model
        self.num_tokens = num_tokens
        self.max_context = max_context
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.join_vocabulary = getattr(model, "tp", TensorParallel()).join_vocabulary
        self.cached = cached and getattr(model, "takes_kv_cache", False)  # not every model supports it
        self.cache: KVCache | None = None

    def logits(self, texts: list[list[int]]) -> Tensor:
        """The next token's logits of each text: (B, V), float32 on the CPU."""
        read = self._with_cache if self.cached else self._without_cache
        logits_BV = self.join_vocabulary(read(texts)).float().cpu()
        if not torch.isfinite(logits_BV).all():
            raise ValueError("the model's logits are not finite numbers: its training has diverged")
        return logits_BV

    def _without_cache(self, texts: list[list[int]]) -> Tensor:
        windows = self._windows(texts)
        longest = max(map(len, windows))
        # Padding on the right needs no mask: causal attention never looks at it.
        tokens_BL = self._tensor([window + [0] * (longest - len(window)) for window in windows])
        last_B = self._tensor([len(window) - 1 for window in windows])
        return self.model(tokens_BL)[torch.arange(len(texts), device=self.device), last_B]

    def _with_cache(self, texts: list[list[int]]) -> Tensor:
        # While there are free slots, no text is longer than the context, so no window has moved.
        if self.cache is not None and self.cache.stop < self.cache.num_slots:
            return self.model(self._tensor([text[-1:] for text in texts]), self.cache)[:, -1]
        windows = self._windows(texts)
        longest = max(map(len, windows))
        padding = [longest - len(window) for window in windows]
        num_slots = min(longest + self.num_tokens, self.max_context)
        config: Any = self.model.config
        self.cache = KVCache(config.num_layers, num_slots, self._tensor(padding))
        tokens_BL = self._tensor([[0] * num + window for num, window in zip(padding, windows, strict=True)])
        return self.model(tokens_BL, self.cache)[:, -1]

    def _windows(self, texts: list[list[int]]) -> list[list[int]]:
        return [text[window_start(len(text), self.max_context) :] for text in texts]

    def _tensor(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(numbers, device=self.device)
