"""Tokens a second that the debug models write, with a cache of the past and without.

    python benchmarks/generation.py

Both are interleaved in one run, and write the same tokens; the figures are medians. One prompt or four of them, each
of half the context.
"""

import statistics
import time

from torch import nn

from spurline.models import family_configs, family_names
from spurline.models.common.generate import generate
from spurline.models.common.init import initialize
from spurline.models.common.sampling import GREEDY

CONTEXT, NUM_TOKENS, REPETITIONS = 256, 24, 3


def tokens_per_second(model: nn.Module, batch_size: int, cached: bool) -> tuple[float, list[list[int]]]:
    prompts = [[(row + position) % 256 for position in range(CONTEXT // 2)] for row in range(batch_size)]
    start = time.perf_counter()
    written = generate(model, prompts, NUM_TOKENS, sampling=GREEDY, max_context=CONTEXT, cached=cached)
    return batch_size * NUM_TOKENS / (time.perf_counter() - start), written


def measure(model: nn.Module, batch_size: int) -> tuple[float, float]:
    """Median tokens a second without a cache, and with it."""
    figures: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(REPETITIONS):
        results = {cached: tokens_per_second(model, batch_size, cached) for cached in figures}
        assert results[False][1] == results[True][1], "the cache has changed what the model writes"
        for cached, (speed, _) in results.items():
            figures[cached].append(speed)
    return statistics.median(figures[False]), statistics.median(figures[True])


def main() -> None:
    print(f"{'model':28}  {'prompts':>7}  {'without':>9}  {'with cache':>10}  ratio")
    for family in family_names():
        for name, preset in family_configs(family).items():
            if "debugmodel" not in name:
                continue
            model = preset().model.build()
            initialize(model, 0)
            for batch_size in (1, 4):
                without, cached = measure(model, batch_size)
                print(
                    f"{name:28}  {batch_size:7}  {without:9.1f}  {cached:10.1f}  {cached / without:4.1f}x", flush=True
                )


if __name__ == "__main__":
    main()
