"""Plans against real runs on gloo ranks: the bytes of every collective, and the growth of a process.

`make test-slow` prints the table of docs/planning.md with -s.
"""

import gc
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spurline.config import ActivationCheckpoint, Data, Metrics, Parallelism, RunConfig, Training
from spurline.hardware import hardware_named
from spurline.parallel.world import joined_world
from spurline.simulate.run import simulate_step
from spurline.testing import RankPool
from spurline.testing.tiny import tiny_model, write_words
from spurline.train.trainer import make_trainer


class Case(NamedTuple):
    ranks: int
    dtype: str = "float32"
    recompute: str = "none"
    ep: int = 1
    tp: int = 1

    def config(self, folder: Path, **model: Any) -> RunConfig[Any]:
        """With forced balance, so that a plan knows the rows, and experts that are computed the same everywhere."""
        moe = {"experts_backend": "grouped_mm"} | model.pop("moe", {})
        sizes = {"seq_len": model.pop("seq_len", 32), "local_batch_size": model.pop("local_batch_size", 2)}
        return RunConfig(
            model=tiny_model(moe, **model).with_forced_balance(),
            training=Training(steps=4, dtype=self.dtype, keep_freed_memory=False, **sizes),  # type: ignore[arg-type]
            parallelism=Parallelism(tensor_parallel_degree=self.tp, expert_parallel_degree=self.ep),
            activation_checkpoint=ActivationCheckpoint(mode=self.recompute),  # type: ignore[arg-type]
            data=Data(path=str(folder)),
            metrics=Metrics(layer_times=False),
        )


class CountBytes(TorchDispatchMode):
    """Another way to count: the largest tensor of each collective that really runs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        name = op.overloadpacket.__name__.strip("_")
        is_exchange = name == "start_exchange"
        if is_exchange or (op.namespace in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "barrier")):
            tensors = [t for t in tree_leaves((args, result)) if isinstance(t, Tensor)]
            if is_exchange:
                tensors = [t for t in tensors if t.is_floating_point()]
            self.found[_SAME.get(name, name), max(t.numel() * t.element_size() for t in tensors)] += 1
        return result


_SAME = {
    "allgather_base": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_base": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "start_exchange": "all-to-all",
    "all_to_all_single": "all-to-all",
}


def count_collectives(rank: int, config: RunConfig[Any]) -> Counter[tuple[str, int]]:
    os.environ["WORLD_SIZE"] = str(torch.distributed.get_world_size())
    with joined_world(config.parallelism) as world:
        trainer = make_trainer(config, world)
        trainer.step(1)
        with CountBytes() as counted:
            trainer.step(2)
    return counted.found


def predicted_collectives(config: RunConfig[Any], ranks: int) -> Counter[tuple[str, int]]:
    done = simulate_step(config, ranks, hardware_named("cpu"))
    return Counter((one.collective.kind, one.collective.num_bytes) for one in done.trace.collectives)


@pytest.mark.parametrize("case", [Case(2, "bfloat16", ep=2)], ids=str)
def test_bytes_of_every_collective_are_those_of_a_real_run(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    config = case.config(write_words(tmp_path))
    assert ranks.run(count_collectives, case.ranks, config)[0] == predicted_collectives(config, case.ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(2),
        Case(2, "bfloat16", "selective"),
        Case(2, tp=2),
        Case(4, "bfloat16", "full", ep=4),
        Case(4, ep=2, tp=2),
    ],
    ids=str,
)
def test_bytes_in_more_layouts(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    config = case.config(write_words(tmp_path))
    assert ranks.run(count_collectives, case.ranks, config, timeout=300)[0] == predicted_collectives(config, case.ranks)


def peak_growth(rank: int, config: RunConfig[Any]) -> int:
    """Bytes by which the process grows from before the trainer is built to the peak of its second step.

    A step of the same model comes first and is freed: it loads libraries, and leaves what they keep for shapes that
    they have seen (oneDNN's primitives among it), which a plan of tensors does not know.
    """
    import ctypes

    os.environ["WORLD_SIZE"] = str(torch.distributed.get_world_size())
    # Every tensor of any size in pages of its own, given back when it is freed.
    ctypes.CDLL(None).mallopt(-3, 16 << 10)
    with joined_world(config.parallelism) as world:
        warm = make_trainer(config, world)
        warm.step(1)
        del warm
        gc.collect()
        before = status("VmRSS")
        trainer = make_trainer(config, world)
        trainer.step(1)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # begin to look for the peak anew
        trainer.step(2)
        return status("VmHWM") - before


def status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


LARGE = {
    "dim": 512,
    "num_layers": 4,
    "num_dense_layers": 1,
    "dense_hidden_dim": 1536,
    "num_heads": 8,
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "vocab_size": 4096,
    "seq_len": 512,
    "local_batch_size": 2,
}
MEMORY_CASES = [
    Case(2),
    Case(2, recompute="selective"),
    Case(2, recompute="full"),
    Case(2, ep=2),
    Case(2, "bfloat16"),
    Case(2, "bfloat16", "selective", ep=2),
    Case(2, tp=2),
    Case(4, ep=4),
    Case(4, "bfloat16", "full", ep=2),
    Case(4, ep=2, tp=2),
]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory of a step is read from Linux")
@pytest.mark.parametrize("case", MEMORY_CASES, ids=str)
def test_memory_is_within_five_percent_of_the_growth_of_a_process(tmp_path: Path, case: Case) -> None:
    config = case.config(write_words(tmp_path, num_words=4000), moe={"hidden_dim": 512, "num_experts": 8}, **LARGE)
    pool = RankPool()
    try:
        real = pool.run(peak_growth, case.ranks, config, timeout=600)[0]
    finally:
        pool.close()
    predicted = simulate_step(config, case.ranks, hardware_named("cpu")).memory.peak()[1]
    print(f"\n| {case} | {predicted / 1e6:.1f} | {real / 1e6:.1f} | {predicted / real - 1:+.1%} |")
    assert predicted == pytest.approx(real, rel=0.05)
