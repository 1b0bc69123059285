"""Generation speed in tokens per second: with and without a KV cache, and against `transformers`.

    python benchmarks/generation.py

Candidates are interleaved in one run; results are medians. The debug models run with and without the cache and must
generate the same tokens. An MoE of 383M parameters runs against the same shape in `transformers`, if that is installed,
on one thread and on all threads.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from spurline.models import family_configs, family_names
from spurline.models.common.generate import generate
from spurline.models.common.init import initialize
from spurline.models.common.sampling import GREEDY

CONTEXT, NUM_TOKENS, REPETITIONS = 256, 24, 3
Tokens = list[list[int]]


def make_prompts(batch_size: int) -> Tokens:
    return [[(row + position) % 256 for position in range(CONTEXT // 2)] for row in range(batch_size)]


def write(model: nn.Module, prompts: Tokens, cached: bool) -> Tokens:
    return generate(model, prompts, NUM_TOKENS, sampling=GREEDY, max_context=CONTEXT, cached=cached)


def speeds(candidates: dict[str, Callable[[Tokens], object]], batch_size: int) -> dict[str, float]:
    """Median tokens per second of each candidate."""
    prompts = make_prompts(batch_size)
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(REPETITIONS):
        for name, run in candidates.items():
            start = time.perf_counter()
            run(prompts)
            seconds[name].append(time.perf_counter() - start)
    return {name: batch_size * NUM_TOKENS / statistics.median(values) for name, values in seconds.items()}


def with_and_without_cache() -> None:
    print(f"{'model':28}  {'prompts':>7}  {'without':>9}  {'with cache':>10}  ratio")
    for family in family_names():
        for name, preset in family_configs(family).items():
            if "debugmodel" not in name:
                continue
            model = preset().model.build()
            initialize(model, 0)
            for batch_size in (1, 4):
                prompts = make_prompts(batch_size)
                assert write(model, prompts, True) == write(model, prompts, False), "the cache changes the output"
                found = speeds(
                    {str(cached): partial(write, model, cached=cached) for cached in (False, True)}, batch_size
                )
                without, cached = found.values()
                print(
                    f"{name:28}  {batch_size:7}  {without:9.1f}  {cached:10.1f}  {cached / without:4.1f}x", flush=True
                )


def make_pair() -> tuple[nn.Module, dict[str, nn.Module]]:
    """A model of ours, and the same shape in `transformers` with each of its experts implementations."""
    import transformers

    from spurline.hf.families import architecture_for

    config: Any = family_configs("qwen3")["qwen3_debugmodel_moe"]().model
    moe = replace(config.moe, hidden_dim=512, num_experts=32, top_k=4)
    heads = {"num_heads": 16, "num_kv_heads": 4, "head_dim": 64}
    config = replace(config, dim=1024, num_layers=6, vocab_size=32_000, moe=moe, **heads)
    ours = config.build()
    initialize(ours, 0)
    architecture = architecture_for("qwen3", config)
    theirs = transformers.AutoConfig.for_model(architecture.model_type, **architecture.write(config))
    kind: Any = transformers.AutoModelForCausalLM._model_mapping[type(theirs)]
    ways = ("grouped_mm", "eager")
    return ours, {way: kind._from_config(theirs, experts_implementation=way).eval() for way in ways}


@torch.no_grad()
def write_in_transformers(model: Any, prompts: Tokens) -> None:
    options = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0}
    model.generate(torch.tensor(prompts), **options)


def beside_transformers() -> None:
    ours, theirs = make_pair()
    candidates: dict[str, Callable[[Tokens], object]] = {"spurline": partial(write, ours, cached=True)}
    candidates |= {f"transformers {way}": partial(write_in_transformers, model) for way, model in theirs.items()}
    print(f"\n{'threads':>7}  {'prompts':>7}" + "".join(f"  {name:>23}" for name in candidates) + "  ratio to the best")
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        for batch_size in (1, 2, 4, 8):
            found = speeds(candidates, batch_size)
            figures = "".join(f"  {speed:23.1f}" for speed in found.values())
            best = max(speed for name, speed in found.items() if name != "spurline")
            print(f"{threads:7}  {batch_size:7}{figures}  {found['spurline'] / best:.2f}x", flush=True)


if __name__ == "__main__":
    with_and_without_cache()
    if find_spec("transformers"):
        beside_transformers()
