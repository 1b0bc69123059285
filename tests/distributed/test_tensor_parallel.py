"""Tensor parallelism on real gloo ranks against plain torch in one process, forward and in every gradient.

B sequences of L positions, l of them on this rank; D width, V vocabulary, v of it on this rank; P ranks.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from spurline.comm.sequence import SequenceShard
from spurline.models.common.init import initialize
from spurline.models.deepseek_v3.model import DeepSeekV3
from spurline.parallel.compile import apply_compile, compile_function
from spurline.parallel.tensor import TensorParallel, apply_tensor_parallel
from spurline.testing import RankPool
from spurline.testing.equivalence import relative_error
from spurline.testing.params import slow_but
from spurline.testing.tiny import tiny_model
from spurline.train.loss import IGNORE_INDEX, cross_entropy_sum, make_loss_sum

# Lengths that 2 and 4 divide, that neither does, and that leave ranks without a position.
LENGTHS = [8, 7, 5, 3, 1]
SHAPES = list(itertools.product([1, 3], LENGTHS))
"""(B, L)"""
D, V = 4, 12


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of_every_rank(*shape: int, seed: int = 100) -> Tensor:
    """What each rank brings, or multiplies its result with to make a loss: (P, ...), the same on all ranks."""
    return seeded(dist.get_world_size(), *shape, seed=seed)


def own_positions(x: Tensor, dim: int = 1) -> Tensor:
    return SequenceShard(x.shape[dim], dist.get_world_size(), dist.get_rank()).shard(x, dim)


def own_part(x: Tensor, dim: int) -> Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def leaf(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


# Each of these runs on every rank, with its TensorParallel, for sequences of shape (B, L).


def check_gather(tp: TensorParallel, B: int, L: int) -> None:
    x_BLD, direction_PBLD = seeded(B, L, D), of_every_rank(B, L, D)
    x_BlD = leaf(own_positions(x_BLD))
    gathered_BLD = tp.all_gather_sequence(x_BlD, L)
    assert torch.equal(gathered_BLD, x_BLD)
    # Every rank goes on with the gathered tensor in its own way.
    (gathered_BLD * direction_PBLD[tp.rank]).sum().backward()
    assert_close(x_BlD.grad, own_positions(direction_PBLD.sum(0)))


def check_scatter(tp: TensorParallel, B: int, L: int) -> None:
    x_PBLD, direction_BLD = of_every_rank(B, L, D), seeded(B, L, D)
    x_BLD = leaf(x_PBLD[tp.rank])
    scattered_BlD = tp.reduce_scatter_sequence(x_BLD)
    assert_close(scattered_BlD, own_positions(x_PBLD.sum(0)))
    (scattered_BlD * own_positions(direction_BLD)).sum().backward()
    assert_close(x_BLD.grad, direction_BLD)


def check_scatter_undoes_gather(tp: TensorParallel, B: int, L: int) -> None:
    x_BlD = own_positions(seeded(B, L, D))
    assert_close(tp.reduce_scatter_sequence(tp.all_gather_sequence(x_BlD, L)), x_BlD * dist.get_world_size())


def make_ids(B: int, L: int) -> Tensor:
    """Ids of which the first sequence has those at the borders of every rank's part, as many as fit."""
    ids_BL = torch.randint(V, (B, L), generator=torch.Generator().manual_seed(L))
    borders = torch.tensor([V - 1, 0, V // 2 - 1, V // 2, V // 4 - 1, V // 4, 3 * V // 4 - 1, 3 * V // 4])
    ids_BL[0, : len(borders)] = borders[:L]
    return ids_BL


def check_look_up(tp: TensorParallel, B: int, L: int) -> None:
    tokens_BL, direction_BLD = make_ids(B, L), seeded(B, L, D)
    table_VD = leaf(seeded(V, D, seed=1))
    expected_BLD = F.embedding(tokens_BL, table_VD)
    (expected_BLD * direction_BLD).sum().backward()

    part_vD = leaf(own_part(table_VD, 0))
    found_BlD = tp.reduce_scatter_sequence(tp.embed(tokens_BL, part_vD))
    assert torch.equal(found_BlD, own_positions(expected_BLD))  # all but one rank add zeros
    (found_BlD * own_positions(direction_BLD)).sum().backward()
    assert_close(part_vD.grad, own_part(table_VD.grad, 0))


def make_labels(B: int, L: int) -> Tensor:
    """Labels at the borders of parts, and some that don't count."""
    labels_BL = make_ids(B, L)
    labels_BL[B // 2, L // 2 :: 2] = IGNORE_INDEX
    return labels_BL


def check_cross_entropy(tp: TensorParallel, B: int, L: int) -> None:
    for labels_BL in (make_ids(B, L), make_labels(B, L), torch.full((B, L), IGNORE_INDEX)):
        for scale, offset in ((1.0, 0.0), (50.0, 0.0), (1.0, 1e4)):
            logits_BLV = leaf(scale * seeded(B, L, V) + offset)
            expected = cross_entropy_sum(logits_BLV, labels_BL)
            (2 * expected).backward()

            logits_BLv = leaf(own_part(logits_BLV, -1))
            loss = tp.cross_entropy_sum(logits_BLv, labels_BL, IGNORE_INDEX)
            (2 * loss).backward()
            # Near 1e4, fp32 itself is only good to 1e-3.
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5 if offset == 0 else 1e-2 * L * B)
            torch.testing.assert_close(logits_BLv.grad, own_part(logits_BLV.grad, -1), rtol=1e-5, atol=1e-5)
            assert not logits_BLv.grad[labels_BL == IGNORE_INDEX].any()


def check_cross_entropy_of_bfloat16_logits_is_summed_in_float32(tp: TensorParallel, B: int, L: int) -> None:
    labels_BL, logits_BLV = make_labels(B, L), seeded(B, L, V).bfloat16()
    loss = tp.cross_entropy_sum(own_part(logits_BLV, -1), labels_BL, IGNORE_INDEX)
    assert loss.dtype == torch.float32
    assert_close(loss, cross_entropy_sum(logits_BLV, labels_BL))


def check_join_vocabulary(tp: TensorParallel, B: int, L: int) -> None:
    logits_BLV, direction_PBLV = seeded(B, L, V), of_every_rank(B, L, V)
    for logits, direction in ((logits_BLV, direction_PBLV), (logits_BLV[:, -1], direction_PBLV[:, :, -1])):
        logits_v = leaf(own_part(logits, -1))
        joined = tp.join_vocabulary(logits_v)
        assert torch.equal(joined, logits)
        (joined * direction[tp.rank]).sum().backward()
        assert_close(logits_v.grad, own_part(direction.sum(0), -1))


def run_check(rank: int, check: Callable[[TensorParallel, int, int], None]) -> None:
    for B, L in SHAPES:
        check(TensorParallel(dist.group.WORLD), B, L)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "check",
    [
        check_gather,
        check_scatter,
        check_scatter_undoes_gather,
        check_look_up,
        check_cross_entropy,
        check_cross_entropy_of_bfloat16_logits_is_summed_in_float32,
        check_join_vocabulary,
    ],
)
def test_function_of_split_tensors_equals_plain_torch(
    ranks: RankPool, check: Callable[[TensorParallel, int, int], None], world: int
) -> None:
    ranks.run(run_check, world, check)


def test_without_a_group_nothing_is_split() -> None:
    alone = TensorParallel()
    x_BLD, tokens_BL, table_VD = seeded(2, 5, D), make_ids(2, 5), seeded(V, D)
    assert alone.all_gather_sequence(x_BLD, None) is x_BLD
    assert alone.reduce_scatter_sequence(x_BLD) is x_BLD
    assert alone.join_vocabulary(x_BLD) is x_BLD
    assert torch.equal(alone.embed(tokens_BL, table_VD), table_VD[tokens_BL])
    assert make_loss_sum(alone) is cross_entropy_sum


def make_model(q_lora_rank: int = 8, num_dense_layers: int = 1) -> DeepSeekV3:
    """Two blocks, the first of them dense."""
    model = tiny_model(
        vocab_size=24,
        num_layers=2,
        num_dense_layers=num_dense_layers,
        q_lora_rank=q_lora_rank,
        v_head_dim=6,
        moe={"hidden_dim": 12, "num_experts": 4, "score_func": "sigmoid"},
    ).build()
    initialize(model, seed=0)
    # Away from its start, where norm weights are ones and residual branches next to nothing.
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter += 0.2 * seeded(*parameter.shape, seed=number)
    return model


def make_batch(B: int, L: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of which about a third don't count."""
    generator = torch.Generator().manual_seed(17 * B + L)
    tokens_BL, labels_BL = torch.randint(24, (2, B, L), generator=generator)
    ignored_BL = torch.rand(B, L, generator=generator) < 0.3
    ignored_BL[0, 0] = False
    return tokens_BL, labels_BL.masked_fill(ignored_BL, IGNORE_INDEX)


def make_split_model(**options: int) -> DeepSeekV3:
    model = make_model(**options)
    apply_tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))
    return model


def loss_and_gradients(
    model: DeepSeekV3, loss_sum: Callable[[Tensor, Tensor], Tensor], B: int, L: int
) -> dict[str, Tensor]:
    """The loss, and the whole gradient of every parameter by name."""
    tokens_BL, labels_BL = make_batch(B, L)
    model.zero_grad()
    loss = loss_sum(model(tokens_BL), labels_BL)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, gradient in gradients.items():
        if isinstance(gradient, DTensor):
            gradients[name] = gradient.full_tensor()
        elif model.tp.group is not None:
            # Experts stay whole, and each rank has met only its own positions; FSDP2 adds that up elsewhere.
            assert ".experts." in name
            dist.all_reduce(gradient)
    return {"loss": loss.detach()} | gradients


def run_split_model(rank: int, q_lora_rank: int) -> float:
    """The largest error of the loss and of any gradient."""
    model, whole = make_split_model(q_lora_rank=q_lora_rank), make_model(q_lora_rank=q_lora_rank)
    errors = {}
    for B, L in SHAPES:
        actual = loss_and_gradients(model, make_loss_sum(model.tp), B, L)
        expected = loss_and_gradients(whole, cross_entropy_sum, B, L)
        assert actual.keys() == expected.keys()
        assert all(expected[name].any() for name in expected if L > 3)
        errors |= {(B, L, name): difference(actual[name], expected[name]) for name in expected}
    return max(errors.values()), max(errors, key=errors.__getitem__)


def difference(actual: Tensor, expected: Tensor) -> float:
    """Relative; or absolute for a gradient that is zero but for rounding, such as a query's of one position."""
    return min(relative_error(actual, expected), (actual - expected).abs().max().item())


@pytest.mark.parametrize(("world", "q_lora_rank"), slow_but([(2, 0), (4, 8)], [(2, 0), (2, 8), (4, 0), (4, 8)]))
def test_each_gradient_of_a_split_model_is_that_of_the_whole_one(ranks: RankPool, world: int, q_lora_rank: int) -> None:
    for error, where in ranks.run(run_split_model, world, q_lora_rank):
        assert error < 1e-5, where


def describe_split_model(rank: int, q_lora_rank: int) -> dict[str, tuple[object, ...]]:
    """Placement and local shape of every parameter that is a DTensor; only the shape of the others."""
    found: dict[str, tuple[object, ...]] = {}
    for name, parameter in make_split_model(q_lora_rank=q_lora_rank).named_parameters():
        if isinstance(parameter, DTensor):
            found[name] = (*parameter.placements, tuple(parameter.to_local().shape))
        else:
            found[name] = (tuple(parameter.shape),)
    return found


SPLIT = {
    "embedding.weight": (Shard(0), (12, 16)),
    "layers.0.attention.wq_b.weight": (Shard(0), (16, 8)),
    "layers.0.attention.wkv_b.weight": (Shard(0), (20, 8)),
    "layers.0.attention.wo.weight": (Shard(1), (16, 12)),
    "layers.0.feed_forward.w1.weight": (Shard(0), (12, 16)),
    "layers.0.feed_forward.w3.weight": (Shard(0), (12, 16)),
    "layers.0.feed_forward.w2.weight": (Shard(1), (16, 12)),
    "layers.1.attention.wq_b.weight": (Shard(0), (16, 8)),
    "layers.1.attention.wkv_b.weight": (Shard(0), (20, 8)),
    "layers.1.attention.wo.weight": (Shard(1), (16, 12)),
    "output.weight": (Shard(0), (12, 16)),
}


def test_matrices_are_split_by_heads_and_hidden_width_and_vocabulary_and_the_rest_is_replicated(
    ranks: RankPool,
) -> None:
    whole = {name: tuple(parameter.shape) for name, parameter in make_model().named_parameters()}
    expected = {name: (Replicate(), shape) for name, shape in whole.items()}
    expected |= {name: (shape,) for name, shape in whole.items() if ".experts." in name} | SPLIT
    for found in ranks.run(describe_split_model, 2, 8):
        assert found == expected


def test_one_full_query_matrix_is_split_by_heads(ranks: RankPool) -> None:
    for found in ranks.run(describe_split_model, 2, 0):
        for layer in (0, 1):
            assert found[f"layers.{layer}.attention.wq.weight"] == (Shard(0), (16, 16))


def run_compiled_dense_model(
    rank: int, backend: str, capture_scalar_outputs: bool, lengths: tuple[int, ...] = (8, 8, 7, 11, 13)
) -> tuple[float, list[int]]:
    """The largest error of a compiled model and its compiled loss, and the graphs after each length."""
    model, eager = make_split_model(num_dense_layers=2), make_split_model(num_dense_layers=2)
    torch._dynamo.utils.counters.clear()
    errors, graphs = [], []
    with torch._dynamo.config.patch(capture_scalar_outputs=capture_scalar_outputs):
        apply_compile(model, backend)
        loss_sum = compile_function(make_loss_sum(model.tp), backend)
        for L in lengths:
            actual = loss_and_gradients(model, loss_sum, 2, L)
            expected = loss_and_gradients(eager, make_loss_sum(eager.tp), 2, L)
            errors += [relative_error(actual[name], expected[name]) for name in expected]
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return max(errors), graphs


@pytest.mark.slow  # compiled blocks with tensor parallelism are in test_compile_layers.py
def test_compiled_dense_model_with_split_loss_and_ignored_labels_equals_eager(ranks: RankPool) -> None:
    # What MoE layers need for tracing is set for the whole process; a dense model next to them must not mind.
    for error, graphs in ranks.run(run_compiled_dense_model, 2, "aot_eager", True, (8, 8, 7), timeout=120):
        assert error < 1e-5
        assert graphs[:2] == [2, 2], "one for the blocks, one for the loss"


@pytest.mark.slow
@pytest.mark.parametrize("capture_scalar_outputs", [False, True])
def test_compiled_dense_model_stops_recompiling_as_lengths_change(
    ranks: RankPool, capture_scalar_outputs: bool
) -> None:
    results = ranks.run(run_compiled_dense_model, 2, "aot_eager", capture_scalar_outputs, timeout=120)
    for error, graphs in results:
        assert error < 1e-5
        assert graphs[0] == graphs[1] == 2
        assert graphs[-1] == graphs[-2]


@pytest.mark.slow
@pytest.mark.parametrize("capture_scalar_outputs", [False, True])
def test_generated_code_of_a_dense_model_with_split_loss_equals_eager(
    ranks: RankPool, capture_scalar_outputs: bool
) -> None:
    results = ranks.run(run_compiled_dense_model, 2, "inductor", capture_scalar_outputs, timeout=280)
    for error, _ in results:
        assert error < 1e-5
