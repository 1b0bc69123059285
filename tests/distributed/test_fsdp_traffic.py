"""What a step on ranks sends, keeps for its backward pass and reads, counted while it runs."""

import os
import sys
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from spurline.config import Parallelism, RunConfig
from spurline.parallel.world import joined_world
from spurline.testing import RankPool
from spurline.testing.tiny import tiny_model, tiny_run, write_words
from spurline.train.trainer import Trainer, make_trainer

MICRO_BATCHES = 4


@dataclass
class Observed(TorchDispatchMode):
    """Collectives, and what is read on the host, of whatever runs inside."""

    gathered: dict[torch.dtype, int] = field(default_factory=dict)
    """Bytes that weights have when they are gathered, by dtype; bytes where a message has several."""
    reduced: list[tuple[torch.dtype, int]] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket._qualified_op_name
        if name == "c10d::_allgather_base_":
            whole = args[0]
            self.gathered[whole.dtype] = self.gathered.get(whole.dtype, 0) + whole.nbytes
        elif name == "c10d::_reduce_scatter_base_":
            self.reduced.append((args[1].dtype, args[1].nbytes))
        elif name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal"):
            self.reads.append(name)
        return op(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """Reads that are no ops of their own on a CPU."""

    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
            caller = sys._getframe(1)
            where = caller.f_globals.get("__name__", "")
            if not where.startswith("spurline.moe.dispatch"):  # on a CPU a plan reads its counts: that is free there
                self.reads.append(f"{name} in {where}:{caller.f_lineno}")
        return function(*args, **(kwargs or {}))


class KeptWeights:
    """Tensors shaped like a weight that autograd keeps, unless they are the gathered weight itself."""

    def __init__(self, trainer: Trainer) -> None:
        self.model = trainer.model
        self.shapes = {tuple(sorted(p.shape)) for p in self.model.parameters()}
        self.kept: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def pack(self, tensor: Tensor) -> Tensor:
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        own = {_storage(p) for p in self.model.parameters()}
        if tuple(sorted(part.shape)) in self.shapes and _storage(part) not in own:
            self.kept.append((part.dtype, tuple(part.shape)))
        return tensor


def _storage(tensor: Tensor) -> int:
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.untyped_storage().data_ptr()


def observe(rank: int, config: RunConfig[Any]) -> tuple[Observed, list[Any], dict[str, Any]]:
    """The second step of a run on ranks; its metrics are read afterwards."""
    environment = {"WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, environment), joined_world(config.parallelism) as world:
        trainer = make_trainer(config, world)
        trainer.step(1)
        kept = KeptWeights(trainer)
        observed = Observed()
        with (
            observed,
            Reads(observed.reads),
            torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor),
        ):
            metrics = trainer.step(2)
        return observed, kept.kept, metrics.read()


_observed: dict[str, list[Any]] = {}


def observe_on_ranks(ranks: RankPool, config: RunConfig[Any]) -> list[tuple[Observed, list[Any], dict[str, Any]]]:
    """What each of two ranks observes; every config is run once."""
    if (key := repr(config)) not in _observed:
        _observed[key] = ranks.run(observe, 2, config)
    return _observed[key]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> RunConfig[Any]:
    # No size is that of another: neither the tokens of a micro-batch nor a width may look like a weight.
    moe = {"hidden_dim": 40, "num_experts": 6, "bias_update_rate": 1e-3, "aux_loss": "sequence"}
    model = tiny_model(
        moe={**moe, "experts_backend": "grouped_mm"}, dim=32, dense_hidden_dim=56, q_lora_rank=24, kv_lora_rank=72
    )
    folder = write_words(tmp_path_factory.mktemp("text"))
    sizes = {"local_batch_size": 1, "global_batch_size": 2, "seq_len": 44}
    return tiny_run(folder, model, training={**sizes, "steps": 3, "threads": 1})


def changed(config: RunConfig[Any], dtype: str = "float32", batch: int = 2, **parallelism: Any) -> RunConfig[Any]:
    return replace(
        config,
        training=replace(config.training, dtype=dtype, global_batch_size=batch),
        parallelism=Parallelism(**parallelism),
    )


@pytest.mark.parametrize("ep", [1, 2])
def test_bfloat16_gathers_half_the_bytes_and_keeps_no_weights_for_the_backward_pass(
    ranks: RankPool, config: RunConfig[Any], ep: int
) -> None:
    in_float32 = observe_on_ranks(ranks, changed(config, expert_parallel_degree=ep))[0]
    for observed, kept, record in observe_on_ranks(ranks, changed(config, "bfloat16", expert_parallel_degree=ep)):
        assert kept == []
        exact = observed.gathered[torch.float32]
        assert observed.gathered[torch.bfloat16] == (sum(in_float32[0].gathered.values()) - exact) / 2
        assert exact < 0.1 * observed.gathered[torch.bfloat16], "norms and gates alone stay in float32"
        assert {dtype for dtype, _ in observed.reduced} == {torch.float32}
        assert sum(size for _, size in observed.reduced) == sum(size for _, size in in_float32[0].reduced)
        assert record["loss"] == pytest.approx(in_float32[2]["loss"], rel=2e-3)
        assert record["loss"] != in_float32[2]["loss"]


def test_weights_that_are_gathered_in_float32_are_cast_for_each_use_and_kept(
    ranks: RankPool, config: RunConfig[Any]
) -> None:
    config = changed(config, "bfloat16")
    config = replace(config, training=replace(config.training, mixed_precision_param="float32"))
    observed, kept, _ = observe_on_ranks(ranks, config)[0]
    assert set(observed.gathered) == {torch.float32}
    assert kept, "the test above would see nothing"


def test_gradients_are_reduced_once_a_step_unless_each_micro_batch_is_asked_for(
    ranks: RankPool, config: RunConfig[Any]
) -> None:
    one = observe_on_ranks(ranks, changed(config))[0][0]
    four, _, record = observe_on_ranks(ranks, changed(config, batch=2 * MICRO_BATCHES))[0]
    each, _, same = observe_on_ranks(
        ranks, changed(config, batch=2 * MICRO_BATCHES, fsdp_reduce_each_micro_batch=True)
    )[0]
    assert four.reduced == one.reduced
    assert len(each.reduced) == MICRO_BATCHES * len(one.reduced)
    for key in ("loss", "grad_norm"):
        assert record[key] == pytest.approx(same[key], rel=1e-5)


def test_reduction_in_bfloat16_sends_half(ranks: RankPool, config: RunConfig[Any]) -> None:
    in_float32 = observe_on_ranks(ranks, changed(config, "bfloat16"))[0][0]
    config = changed(config, "bfloat16")
    low = replace(config, training=replace(config.training, mixed_precision_reduce="bfloat16"))
    observed, _, _ = observe_on_ranks(ranks, low)[0]
    sizes = {dtype: sum(size for of, size in observed.reduced if of == dtype) for dtype, _ in observed.reduced}
    exact = sizes[torch.float32]
    assert sizes[torch.bfloat16] == (sum(size for _, size in in_float32.reduced) - exact) / 2


@pytest.mark.parametrize(("reshard", "times"), [("never", 1), ("default", None), ("always", 2)])
def test_weights_are_gathered_once_or_again_for_the_backward_pass(
    ranks: RankPool, config: RunConfig[Any], reshard: str, times: int | None
) -> None:
    observed, _, _ = observe_on_ranks(ranks, changed(config, fsdp_reshard_after_forward=reshard))[0]
    once, _, _ = observe_on_ranks(ranks, changed(config, fsdp_reshard_after_forward="never"))[0]
    ratio = observed.gathered[torch.float32] / once.gathered[torch.float32]
    assert 1 < ratio < 2 if times is None else 1 <= ratio <= times


@pytest.mark.parametrize("batch", [2, 2 * MICRO_BATCHES])
def test_step_on_ranks_that_is_not_logged_reads_nothing(ranks: RankPool, config: RunConfig[Any], batch: int) -> None:
    for observed, _, _ in observe_on_ranks(ranks, changed(config, "bfloat16", batch)):
        assert observed.reads == []


def units_and_what_they_prefetch(rank: int, config: RunConfig[Any]) -> dict[str, tuple[list[str], list[str]]]:
    environment = {"WORLD_SIZE": str(dist.get_world_size())}
    with mock.patch.dict(os.environ, environment), joined_world(config.parallelism) as world:
        model = make_trainer(config, world).model
        names = {id(m._get_fsdp_state()): name for name, m in model.named_modules() if isinstance(m, FSDPModule)}
        states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
        return {
            names[id(state)]: (
                [names[id(other)] for other in state._states_to_forward_prefetch],
                [names[id(other)] for other in state._states_to_backward_prefetch],
            )
            for state in states
        }


def test_units_gather_the_weights_of_their_neighbors(ranks: RankPool, config: RunConfig[Any]) -> None:
    assert ranks.run(units_and_what_they_prefetch, 2, changed(config))[0] == {
        "": ([], []),
        "embedding": (["layers.0"], []),
        "layers.0": (["layers.1"], ["embedding"]),
        "layers.1": (["layers.2"], ["layers.0"]),
        "layers.2": (["output"], ["layers.1"]),
        "output": ([], ["layers.2"]),
    }
