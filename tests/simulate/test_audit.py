"""Planted violations are caught and named; and the debug models keep to the budgets."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import spurline.parallel.fsdp
from spurline.config import ActivationCheckpoint, Compile, Parallelism, RunConfig, Training
from spurline.hardware import hardware_named
from spurline.models import family_configs, family_names
from spurline.models.common.decoder import Decoder
from spurline.models.common.feed_forward import FeedForward
from spurline.moe.layer import MoE
from spurline.simulate.audit import Audit, audit_step, violations, waits
from spurline.simulate.budget import Budget
from spurline.simulate.routing import zipf
from spurline.testing.tiny import tiny_model
from spurline.train.trainer import Trainer

H100 = hardware_named("h100")
MODEL = tiny_model(
    dim=64, dense_hidden_dim=64, moe={"hidden_dim": 64, "bias_update_rate": 1e-3, "aux_loss": "sequence"}
)
CONFIG: RunConfig[Any] = RunConfig(
    model=MODEL,
    training=Training(seq_len=32, local_batch_size=2, dtype="bfloat16"),
    parallelism=Parallelism(expert_parallel_degree=4),
)
ANYTHING = Budget(100, 100, 100, 1.0, 1 << 40, 100, 100)
WAITS = replace(ANYTHING, host_waits_per_layer=None, host_waits_per_step=0, host_waits_per_log=1)
"""The default limits of host waits, and no other."""


def audit(config: RunConfig[Any] = CONFIG, ranks: int = 8) -> Audit:
    return audit_step(config, ranks, H100)


def plant(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, before: Callable[..., Any]) -> None:
    """Have a method do something first."""
    method = getattr(owner, name)

    def planted(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(*args)
        return method(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, planted)


def test_a_generous_budget_is_kept() -> None:
    assert violations(audit(), ANYTHING) == []


def test_hot_experts_keep_more_for_backward() -> None:
    hot = audit_step(CONFIG, 8, H100, zipf(2.0, MODEL.moe.num_experts))
    kept, kept_if_balanced = (sum(row.kept_bytes for row in found.layers) for found in (hot, audit()))
    assert kept > 1.2 * kept_if_balanced


def test_an_item_in_a_layer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, MoE, "_forward", read_a_number)
    found = violations(audit(), replace(ANYTHING, host_waits_per_layer=1))
    assert [line.split(":")[0] for line in found] == ["layers.1", "layers.2"]
    line = read_a_number.__code__.co_firstlineno + 1
    assert f"tests/simulate/test_audit.py:{line} item()" in found[0]


def read_a_number(x: Tensor, *args: Any) -> None:
    assert x.sum().item() is not None


@pytest.mark.parametrize(
    ("owner", "method"), [(Trainer, "loss_of"), (Decoder, "embed"), (Decoder, "final_norm"), (FeedForward, "forward")]
)
def test_an_item_anywhere_else_in_a_step_is_named(monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> None:
    """The read that a layer with experts is allowed is not one for the loss, the embedding, or a dense layer."""
    plant(monkeypatch, owner, method, lambda x, *args: read_a_number(getattr(x, "tokens_BL", x)))
    (line,) = violations(audit(), WAITS)
    assert line.startswith("a step: the host waits 1 times, 0 allowed: tests/simulate/test_audit.py:")


def test_a_tensor_made_of_a_list_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Trainer, "accumulate_gradients", lambda *args: make_tensors())
    found = audit()
    accesses = [access for access in found.simulation.trace.host if "test_audit.py" in access.place.line]
    first = make_tensors.__code__.co_firstlineno + 1
    assert [access.place.line.rpartition(":")[2] for access in accesses] == [str(first + i) for i in range(3)]
    assert all(access.direction == "write" and access.blocking for access in accesses)
    (line,) = violations(found, replace(ANYTHING, host_waits_per_step=0))
    assert f"tests/simulate/test_audit.py:{first} tensor made of numbers" in line


def make_tensors() -> None:
    torch.tensor([1.0, 2.0], device="meta")
    torch.zeros(2, device="meta").new_tensor([1, 2])
    torch.full((), 2.0).to("meta")


def test_gathers_in_another_dtype_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fully_shard = spurline.parallel.fsdp.fully_shard

    def without_policy(module: Any, **options: Any) -> Any:
        options.pop("mp_policy", None)
        return fully_shard(module, **options)

    monkeypatch.setattr(spurline.parallel.fsdp, "fully_shard", without_policy)
    found = violations(audit(), replace(ANYTHING, gather_dtype_share=0.02))
    assert len(found) == 1
    assert "of the bytes of parameters in float32" in found[0]
    assert "layers.1" in found[0]


def test_weights_that_casts_keep_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = audit(replace(CONFIG, parallelism=Parallelism()), ranks=1)
    lines = violations(found, replace(ANYTHING, kept_weight_bytes=0))
    assert len(lines) == 1  # one rank has no FSDP2 that could have cast them
    assert "bytes of cast weights" in lines[0]


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        (4, {"expert_parallel_degree": 2}),
        (8, {"expert_parallel_degree": 8}),
        (64, {"expert_parallel_degree": 64}),
        (8, {"expert_parallel_degree": 4, "tensor_parallel_degree": 2}),
        (8, {"expert_parallel_degree": 8, "tensor_parallel_degree": 2, "context_parallel_degree": 2}),
    ],
    ids=["ep 2", "ep 8", "ep 64", "ep 4, tp 2", "ep 8, tp 2, cp 2"],
)
@pytest.mark.parametrize("is_forced", [False, True])
def test_one_wait_a_layer_and_none_with_forced_balance(ranks: int, degrees: dict[str, int], is_forced: bool) -> None:
    found = audit(spread_over(is_forced, **degrees), ranks)
    assert violations(found, replace(WAITS, gather_dtype_share=0.0)) == []
    by_layer = {row.name: row.host_waits for row in found.layers}
    number = 0 if is_forced else 1
    assert (by_layer["layers.0"], by_layer["layers.1"], by_layer["layers.2"]) == (0, number, number)


def spread_over(is_forced: bool, **degrees: int) -> RunConfig[Any]:
    model = replace(MODEL, moe=replace(MODEL.moe, num_experts=64, force_load_balance=is_forced))
    return replace(CONFIG, model=model, parallelism=Parallelism(**degrees))


@pytest.mark.parametrize(
    "degrees",
    [{}, {"context_parallel_degree": 2}, {"pipeline_parallel_degree": 2}],
    ids=str,
)
def test_layouts_keep_to_the_default_budget(degrees: dict[str, int]) -> None:
    """Activations of the shape of a weight (64 tokens of width 64) are none, and micro-batches have a wait each."""
    training = replace(CONFIG.training, local_batch_size=4, global_batch_size=64)
    config = replace(CONFIG, training=training, parallelism=Parallelism(expert_parallel_degree=2, **degrees))
    assert violations(audit(config), Budget()) == []


@pytest.mark.parametrize(("mode", "num_waits"), [("selective", 0), ("selective_resend", 0), ("full", 2)])
def test_only_full_recomputation_reads_counts_again(mode: Any, num_waits: int) -> None:
    """Selective recomputation keeps the counts of both layers, and does not wait for them in the backward pass."""
    found = audit(replace(CONFIG, activation_checkpoint=ActivationCheckpoint(mode=mode)))
    assert len(waits(found.simulation.trace.host, "backward")) == num_waits
    assert len(violations(found, WAITS)) == (num_waits > 0)


DEBUG = {name: make for family in family_names() for name, make in family_configs(family).items() if "debug" in name}


@pytest.mark.parametrize("name", DEBUG)
def test_debug_models_keep_to_the_default_budget(name: str) -> None:
    config = DEBUG[name]()
    ep = 4 if hasattr(config.model, "moe") else 1
    training, parallelism = replace(config.training, dtype="bfloat16"), Parallelism(expert_parallel_degree=ep)
    assert violations(audit(replace(config, training=training, parallelism=parallelism)), Budget()) == []


@pytest.mark.parametrize(("ranks", "ep"), [(1, 1), (4, 2), (64, 64)])
def test_fixed_capacity_never_waits(ranks: int, ep: int) -> None:
    moe = replace(MODEL.moe, num_experts=64, dispatcher="capacity", overflow="grow")
    config = replace(CONFIG, model=replace(MODEL, moe=moe), parallelism=Parallelism(expert_parallel_degree=ep))
    found = audit(config, ranks)
    assert violations(found, replace(ANYTHING, host_waits_per_layer=None)) == []
    assert sum(row.host_waits for row in found.layers) == 0


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("ep", "is_forced"),
    [
        (2, False),
        *(pytest.param(*case, marks=SLOW) for case in ((8, False), (64, False), (2, True), (8, True), (64, True))),
    ],
)
def test_compiled_blocks_wait_once_and_never_with_forced_balance(ep: int, is_forced: bool) -> None:
    config = compiled(spread_over(is_forced, expert_parallel_degree=ep))
    found = audit(config, ranks=ep)
    # With forced balance, a length may need the other permutation (uniform or by segments), and then one graph more.
    assert violations(found, replace(WAITS, graph_breaks=0, recompiles=int(is_forced))) == []
    assert sum(row.host_waits for row in found.layers) == (0 if is_forced else 1)
    first, second, third = found.graphs_by_length
    assert first > 0
    assert second <= first
    assert third <= is_forced


def compiled(config: RunConfig[Any]) -> RunConfig[Any]:
    return replace(config, model=replace(config.model, num_layers=2), compile=Compile(enable=True))
