"""Two minutes of training a nanoGPT-like dense model, to compare with `make train`: bits per byte of held-out text.

    python benchmarks/first_two_minutes.py --seconds 110

A GPT-2-style decoder in plain PyTorch (learned positions, LayerNorm, GELU, tied embeddings, AdamW) with as many
parameters as the preset of `make train` has active per token. Tokenizer, training text, held-out text, tokens per step
and threads are the same. It trains for the given seconds of CPU time per thread, without validation, so a busy machine
makes it slower, not worse. The learning rate follows the time used: warmup, then a cosine.

B sequences of L positions, D width, V vocabulary.
"""

import argparse
import math
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spurline.data import open_data
from spurline.models.deepseek_v3.configs import deepseek_v3_first
from spurline.train.validation import count_text_bytes

HEAD_DIM = 32


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.num_heads = dim // HEAD_DIM
        self.norm1, self.norm2 = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, HEAD_DIM)).transpose(1, 2)
            for part in self.qkv(self.norm1(x_BLD)).chunk(3, dim=-1)
        )
        x_BLD = x_BLD + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x_BLD + self.down(F.gelu(self.up(self.norm2(x_BLD))))


class DenseGPT(nn.Module):
    def __init__(self, vocab_size: int, dim: int, num_layers: int, seq_len: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocab_size, dim), nn.Embedding(seq_len, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * num_layers) if into_residual else 1))

    def forward(self, tokens_BL: Tensor, labels_BL: Tensor) -> Tensor:
        """The cross-entropy summed over labels."""
        x_BLD = self.embedding(tokens_BL) + self.position.weight[: tokens_BL.shape[1]]
        for block in self.blocks:
            x_BLD = block(x_BLD)
        logits_BLV = F.linear(self.norm(x_BLD), self.embedding.weight)
        return F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten(), reduction="sum")


def num_params(vocab_size: int, dim: int, num_layers: int, seq_len: int) -> int:
    return (vocab_size + seq_len + 1) * dim + num_layers * (12 * dim**2 + 2 * dim)


def width_for(params: int, vocab_size: int, num_layers: int, seq_len: int) -> int:
    """The width, a multiple of HEAD_DIM, whose parameter count is closest to `params`."""
    widths = range(HEAD_DIM, 2049, HEAD_DIM)
    return min(widths, key=lambda dim: abs(num_params(vocab_size, dim, num_layers, seq_len) - params))


def learning_rate(progress: float, peak: float) -> float:
    """Linear warmup over the first twentieth of the time, then a cosine down to a tenth of the peak."""
    if progress < 0.05:
        return peak * progress / 0.05
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (progress - 0.05) / 0.95))))


@torch.no_grad()
def bits_per_byte(model: nn.Module, data: Any, batch_size: int) -> float:
    token_bytes_V = torch.from_numpy(data.tokenizer.token_bytes)
    nats, num_bytes = 0.0, 0
    for batch in data.validation.batches(batch_size, 10**9):
        nats += model(batch.tokens_BL, batch.labels_BL).item()
        num_bytes += count_text_bytes(batch.labels_BL, token_bytes_V)
    return nats / num_bytes / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=110.0, help="training time of each thread")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    config = deepseek_v3_first()
    training, vocab_size = config.training, config.model.vocab_size
    data = open_data(config.data, training.seq_len, options.seed)
    active = config.model.num_active_params()
    dim = width_for(active, vocab_size, options.layers, training.seq_len)
    model = DenseGPT(vocab_size, dim, options.layers, training.seq_len)
    total = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"dense: {options.layers} layers of width {dim}, {total / 1e6:.2f}M parameters;"
        f" active in the preset: {active / 1e6:.2f}M"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    started, began, step, said = time.process_time(), time.perf_counter(), 0, 0.0
    while (progress := (time.process_time() - started) / options.threads / options.seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, options.lr)
        batch = data.train.batch(step * training.local_batch_size, training.local_batch_size)
        loss = model(batch.tokens_BL, batch.labels_BL) / batch.labels_BL.numel()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if progress >= said:
            print(f"step {step:5}  loss {loss.item():.3f}  {progress:.0%} of the time", flush=True)
            said += 0.1
    used, wall = time.process_time() - started, time.perf_counter() - began
    found = bits_per_byte(model, data, training.local_batch_size)
    tokens = step * training.local_batch_size * training.seq_len
    print(f"{step} steps, {tokens:,} tokens, {used:.0f} s of CPU time, {wall:.0f} s: {found:.3f} bits per byte")


if __name__ == "__main__":
    main()
