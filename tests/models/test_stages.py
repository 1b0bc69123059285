"""Pipeline stages, run one after the other, against the whole model: logits, loss and every gradient."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spurline.config import Compile, Parallelism
from spurline.data.batch import Images, Spot
from spurline.data.patches import PATCH_DIM
from spurline.models import family_configs, family_names
from spurline.models.agpt.configs import AGPTConfig
from spurline.models.agpt.model import AGPT
from spurline.models.common.cache import KVCache
from spurline.models.common.decoder import Decoder
from spurline.models.common.init import initialize
from spurline.parallel.blocks import blocks_of
from spurline.parallel.compile import apply_compile
from spurline.parallel.model import parallelize_model
from spurline.parallel.remat import apply_remat
from spurline.parallel.world import joined_world
from spurline.testing import RankPool
from spurline.testing.equivalence import relative_error
from spurline.testing.params import slow_but
from spurline.testing.tiny import tiny_model
from spurline.train.loss import IGNORE_INDEX, cross_entropy_sum, make_loss_sum

DEBUG_MODELS = {
    name: replace(make().model, num_layers=5)
    for family in family_names()
    for name, make in family_configs(family).items()
    if "debugmodel" in name
}
DEEPSEEK = DEBUG_MODELS["deepseek_v3_debugmodel"]
MODELS = DEBUG_MODELS | {
    "deepseek_v3_mtp": replace(DEEPSEEK, num_mtp_layers=2),
    "deepseek_v3_mtp_tied": replace(DEEPSEEK, num_mtp_layers=1, tied_embeddings=True),
}
CUTS = {
    "2 stages": [(0, 2), (2, 5)],
    "4 stages": [(0, 2), (2, 3), (3, 4), (4, 5)],
    "head by itself": [(0, 3), (3, 5), (5, 5)],
}
SMALL = AGPTConfig(vocab_size=50, dim=32, num_layers=4, dense_hidden_dim=40, num_heads=4, num_kv_heads=2, head_dim=8)
SMALL_MTP = tiny_model(
    vocab_size=24,
    num_layers=4,
    num_heads=2,
    v_head_dim=8,
    num_mtp_layers=2,
    moe={"hidden_dim": 8, "num_experts": 4, "aux_loss": "sequence"},
    q_lora_rank=0,
)


def built(config: Any) -> Decoder:
    model = config.build()
    initialize(model, 0)
    return model


def stages_of(config: Any, cut: list[tuple[int, int]]) -> list[Decoder]:
    """Each cut out of a model without memory, then initialized by itself, as the ranks of a pipeline would."""
    with torch.device("meta"):
        whole = config.build()
    last = len(cut) - 1
    stages = [whole.stage(*cut[i], is_first=i == 0, is_last=i == last) for i in range(len(cut))]
    for stage in stages:
        stage.to_empty(device="cpu")
        initialize(stage, 0)
    return stages


def batch(vocab_size: int, B: int = 2, L: int = 14) -> tuple[Tensor, Tensor]:
    window_BL = torch.randint(vocab_size, (B, L + 1), generator=torch.Generator().manual_seed(1))
    labels_BL = window_BL[:, 1:].clone()
    labels_BL[0, 3:6] = IGNORE_INDEX
    return window_BL[:, :-1], labels_BL


def run_stages(
    stages: list[Decoder], tokens_BL: Tensor, **arguments: Any
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The last stage's output, and what left each stage and entered the next: tensors that share no graph."""
    crossings: list[tuple[Tensor, Tensor]] = []
    for stage in stages[:-1]:
        sent = stage(tokens_BL, hidden_BlD=crossings[-1][1] if crossings else None, **arguments)
        crossings.append((sent, sent.detach().clone().requires_grad_()))
    return stages[-1](tokens_BL, hidden_BlD=crossings[-1][1], **arguments), crossings


def loss_and_gradients(stages: list[Decoder], tokens_BL: Tensor, **arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """With the gradients of parameters that two stages have summed up."""
    loss, crossings = run_stages(stages, tokens_BL, **arguments)
    loss.backward()
    for sent, received in reversed(crossings):
        sent.backward(received.grad)
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None, name
            gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
    return loss.detach(), gradients


def check_against_whole(config: Any, cut: list[tuple[int, int]], **extras: Any) -> None:
    tokens_BL, labels_BL = batch(config.vocab_size)
    whole, stages = built(config), stages_of(config, cut)
    with torch.no_grad():
        logits_BLV, _ = run_stages(stages, tokens_BL, **extras)
        assert torch.equal(logits_BLV, whole(tokens_BL, **extras))
    arguments = {"labels_BL": labels_BL, "loss_sum": cross_entropy_sum, **extras}
    loss, gradients = loss_and_gradients(stages, tokens_BL, **arguments)
    expected_loss = whole(tokens_BL, **arguments)
    expected_loss.backward()
    assert torch.equal(loss, expected_loss)
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert expected[name].any(), name
        if name in whole.parameters_on_two_stages():  # added up in another order
            assert relative_error(gradient, expected[name]) < 1e-6, name
        else:
            assert torch.equal(gradient, expected[name]), name


def documents() -> Tensor:
    return torch.tensor([[0] * 5 + [1] * 9, [0] * 2 + [1] * 11 + [2]])


@pytest.mark.parametrize("cut", slow_but(["4 stages", "head by itself"], CUTS))
@pytest.mark.parametrize("name", MODELS)
def test_stages_compute_logits_loss_and_gradients_of_the_whole(name: str, cut: str) -> None:
    config = MODELS[name]
    extras = {}
    if name.startswith("qwen3_vl"):
        spots = (Spot(0, 2, 4, 4), Spot(1, 0, 2, 4), Spot(1, 7, 4, 6))
        patches = torch.randn(16 + 8 + 24, PATCH_DIM, generator=torch.Generator().manual_seed(2))
        extras = {"images": Images(patches, spots)}
    check_against_whole(config, CUTS[cut], **extras)


@pytest.mark.parametrize("name", ["agpt_debugmodel", "qwen3_debugmodel", "deepseek_v3_mtp"])
def test_every_stage_masks_documents(name: str) -> None:
    check_against_whole(MODELS[name], CUTS["4 stages"], documents_BL=documents())
    whole, (tokens_BL, _) = built(MODELS[name]), batch(MODELS[name].vocab_size)
    assert not torch.equal(whole(tokens_BL), whole(tokens_BL, documents_BL=documents()))


def test_embedding_can_be_a_stage_by_itself() -> None:
    check_against_whole(MODELS["qwen3_debugmodel"], [(0, 0), (0, 5), (5, 5)])


@pytest.mark.parametrize("name", MODELS)
def test_stages_have_the_parameters_of_the_whole_by_name_and_value(name: str) -> None:
    config = MODELS[name]
    expected = built(config).state_dict()
    first, *_, last = stages = stages_of(config, CUTS["4 stages"])
    found: dict[str, Tensor] = {}
    num_copies = {}
    for stage in stages:
        for key, value in stage.state_dict().items():
            assert torch.equal(value, expected[key]), key
            num_copies[key] = num_copies.get(key, 0) + 1
            found[key] = value
    assert found.keys() == expected.keys()
    twice = [key for key, num in num_copies.items() if num > 1]
    has_copy = config.tied_embeddings or getattr(config, "num_mtp_layers", 0) > 0
    assert twice == (["embedding.weight"] if has_copy else [])
    assert built(config).parameters_on_two_stages() == first.parameters_on_two_stages() == twice
    assert last.parameters_on_two_stages() == twice


def test_stages_share_no_memory_with_the_whole() -> None:
    whole = built(replace(SMALL, tied_embeddings=True))
    stages = [whole.stage(0, 2), whole.stage(2, 4)]
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    with torch.no_grad():
        for stage in stages:
            for parameter in stage.parameters():
                parameter.zero_()
            assert len(list(blocks_of(stage))) == 2
    assert all(torch.equal(value, before[name]) for name, value in whole.state_dict().items())
    assert whole.is_first_stage
    assert whole.is_last_stage
    assert list(whole.layers) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("remat", slow_but([], ["full", "selective"]))
def test_compiled_stages_that_recompute_have_the_gradients_of_the_whole(remat: str) -> None:
    torch.compiler.reset()
    whole, stages = built(SMALL_MTP), stages_of(SMALL_MTP, [(0, 2), (2, 4)])
    for stage in stages:
        apply_remat(stage, remat)
        apply_compile(stage, "aot_eager")
    assert len(blocks_of(stages[1])) == 2 + SMALL_MTP.num_mtp_layers
    tokens_BL, labels_BL = batch(24)
    arguments = {"labels_BL": labels_BL, "loss_sum": cross_entropy_sum, "documents_BL": documents()}
    loss, gradients = loss_and_gradients(stages, tokens_BL, **arguments)
    expected = whole(tokens_BL, **arguments)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in whole.named_parameters():
        assert relative_error(gradients[name], parameter.grad) < 1e-5, name


@torch.no_grad()
def test_stages_decode_with_caches_of_their_own() -> None:
    whole, stages = built(SMALL).eval(), stages_of(SMALL, [(0, 1), (1, 4)])
    tokens_BL, _ = batch(50)
    padding_B = torch.tensor([0, 3])
    cache, caches = KVCache(4, 14, padding_B), [KVCache(4, 14, padding_B) for _ in stages]
    for piece_BL in tokens_BL.split((6, 1, 7), dim=1):
        hidden_BLD = stages[0](piece_BL, caches[0])
        assert torch.equal(stages[1](piece_BL, caches[1], hidden_BlD=hidden_BLD), whole(piece_BL, cache))
    assert [len(layer._buffers) for layer in caches[1].layers] == [0, 2, 2, 2]


def run_on_rank(rank: int, cut: list[tuple[int, int]]) -> tuple[Tensor, dict[str, Tensor]]:
    with (
        mock.patch.dict(os.environ, {"WORLD_SIZE": str(dist.get_world_size())}),
        joined_world(Parallelism(tensor_parallel_degree=2, expert_parallel_degree=2)) as world,
    ):
        with torch.device("meta"):
            whole = SMALL_MTP.build()
        stages = [whole.stage(*layers) for layers in cut]
        for stage in stages:
            parallelize_model(stage, world.meshes, "none", Compile())
            stage.to_empty(device="cpu")
            initialize(stage, 0)
        tokens_BL, labels_BL = batch(24, L=13)  # which two ranks can't share evenly
        loss_sum = make_loss_sum(stages[-1].tp)
        loss, gradients = loss_and_gradients(stages, tokens_BL, labels_BL=labels_BL, loss_sum=loss_sum)
        return loss, {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items()}


def test_split_and_spread_stages_have_the_gradients_of_one_process(ranks: RankPool) -> None:
    whole, (tokens_BL, labels_BL) = built(SMALL_MTP), batch(24, L=13)
    expected = whole(tokens_BL, labels_BL=labels_BL, loss_sum=cross_entropy_sum)
    expected.backward()
    for loss, gradients in ranks.run(run_on_rank, 2, [(0, 1), (1, 3), (3, 4)]):
        torch.testing.assert_close(loss, expected.detach())
        for name, parameter in whole.named_parameters():
            assert relative_error(gradients[name], parameter.grad) < 1e-5, name


@pytest.mark.parametrize("layers", [(-1, 2), (3, 2), (0, 5), (2, 2), (4, 5)])
def test_ranges_that_are_no_stage_are_refused(layers: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="a stage must be a range of the 4 layers"):
        built(SMALL).stage(*layers)


def test_middle_layers_are_refused_as_first_or_last_stage() -> None:
    with pytest.raises(ValueError, match="layers 1 to 2 of 4 can't be the first stage"):
        built(SMALL).stage(1, 3, is_first=True)
    with pytest.raises(ValueError, match="layers 1 to 2 of 4 can't be the last stage"):
        built(SMALL).stage(1, 3, is_last=True)


def test_stage_of_a_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="only a whole model can be cut"):
        built(SMALL).stage(0, 2).stage(0, 1)


@pytest.mark.parametrize("layers", [(0, 1), (1, 5)])
def test_deepstack_layers_must_be_on_the_first_stage(layers: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="the first stage must have the first 2 layers, behind which DeepStack"):
        built(MODELS["qwen3_vl_debugmodel"]).stage(*layers)


def test_hidden_states_must_be_given_to_all_stages_but_the_first() -> None:
    first, second = stages_of(SMALL, [(0, 2), (2, 4)])
    tokens_BL, _ = batch(50)
    with pytest.raises(ValueError, match="must be given to every pipeline stage but the first; this is another one"):
        second(tokens_BL)
    with pytest.raises(ValueError, match="this is the first"):
        first(tokens_BL, hidden_BlD=torch.zeros(2, 14, 32))


class WithExtras(AGPT):
    """A family with a module and a parameter of which nobody said where they belong."""

    def __init__(self, config: AGPTConfig) -> None:
        super().__init__(config)
        self.adapter = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(3))


class WithExtrasInPlace(WithExtras):
    def first_stage_modules(self) -> set[str]:
        return super().first_stage_modules() | {"scale"}

    def last_stage_modules(self) -> set[str]:
        return super().last_stage_modules() | {"adapter"}


def test_extras_of_a_family_are_on_the_stage_that_it_names() -> None:
    with pytest.raises(ValueError, match="WithExtras: adapter, scale would be on no stage: name it in"):
        WithExtras(SMALL).stage(0, 2)
    whole = WithExtrasInPlace(SMALL)
    first, middle, last = (whole.stage(*layers).state_dict().keys() for layers in [(0, 1), (1, 2), (2, 4)])
    assert {name for name in first if not name.startswith("layers.")} == {"embedding.weight", "scale"}
    assert all(name.startswith("layers.1.") for name in middle)
    assert {name for name in last if not name.startswith("layers.")} == {
        "norm.weight",
        "output.weight",
        "adapter.weight",
        "adapter.bias",
    }
