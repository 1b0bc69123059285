"""What is special in Qwen3-VL: pictures in sequences, configs, compilation, and that it learns to see."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from spurline.config import Data, LRScheduler, Optimizer, RunConfig, Training
from spurline.data.batch import Images, Spot
from spurline.data.patches import PATCH_DIM
from spurline.models.common.generate import generate
from spurline.models.common.init import initialize
from spurline.models.common.sampling import Sampling
from spurline.models.qwen3_vl.configs import Qwen3VLConfig, Qwen3VLMoEConfig, VisionConfig
from spurline.models.qwen3_vl.geometry import sequence_positions
from spurline.models.qwen3_vl.model import Qwen3VL
from spurline.moe.config import MoEConfig
from spurline.parallel.compile import apply_compile
from spurline.train.captions import write_captions
from spurline.train.trainer import make_trainer

VISION = VisionConfig(dim=16, num_layers=2, num_heads=2, hidden_dim=20, positions_per_side=3, deepstack_layers=(0, 1))
SIZE: dict[str, Any] = {
    "dim": 16,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 12,
    "mrope_section": (2, 2, 2),
    "vision": VISION,
}
DENSE = Qwen3VLConfig(**SIZE, dense_hidden_dim=24)
SPARSE = Qwen3VLMoEConfig(**SIZE, moe=MoEConfig(hidden_dim=8, num_experts=4, route_norm=True))


def built(config: Qwen3VLConfig) -> Qwen3VL:
    model = config.build()
    initialize(model, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def make_inputs(spots: tuple[Spot, ...], seed: int = 0) -> tuple[Tensor, Images]:
    generator = torch.Generator().manual_seed(seed)
    tokens_BL = torch.randint(257, (2, 12), generator=generator)
    num_patches = sum(spot.num_patches for spot in spots)
    return tokens_BL, Images(torch.randn(num_patches, PATCH_DIM, generator=generator), spots)


def test_positions_count_on_in_text_and_spread_over_pictures():
    time, height, width = sequence_positions([Spot(1, 2, 4, 6), Spot(1, 9, 2, 2)], B=2, L=12).tolist()
    assert time[0] == height[0] == width[0] == list(range(12))
    assert time[1] == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8]
    assert height[1] == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8]
    assert width[1] == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8]


def test_tokens_below_a_picture_do_not_matter_and_the_picture_does():
    model = built(DENSE)
    tokens_BL, images = make_inputs((Spot(0, 3, 4, 4),))
    logits_BLV = model(tokens_BL, images=images)
    others_BL = tokens_BL.clone()
    others_BL[0, 3:7] += 1
    assert torch.equal(model(others_BL, images=images), logits_BLV)
    changed = replace(images, patches_NC=images.patches_NC + torch.eye(16, PATCH_DIM))
    differs_BL = (model(tokens_BL, images=changed) != logits_BLV).any(-1)
    assert differs_BL.tolist() == [[position >= 3 for position in range(12)], [False] * 12]


def test_pictures_do_not_see_each_other():
    model = built(DENSE)
    small, large = Spot(0, 0, 2, 2), Spot(1, 0, 4, 6)
    tokens_BL, images = make_inputs((small, large))
    logits_BLV = model(tokens_BL, images=images)
    for row, spot in enumerate((small, large)):
        alone = images.take([row])
        torch.testing.assert_close(model(tokens_BL[row : row + 1], images=alone)[0], logits_BLV[row])
        assert alone.spots == (replace(spot, row=0),)


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "moe"])
def test_batch_without_pictures_is_text_and_gives_the_encoder_zeros_as_gradient(config):
    model = built(config)
    tokens_BL, images = make_inputs(())
    text_BLV = model(tokens_BL)
    logits_BLV = model(tokens_BL, images=images)
    torch.testing.assert_close(logits_BLV, text_BLV)
    logits_BLV.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any() != name.startswith("vision."), name


def test_compiled_blocks_are_one_graph_and_compute_the_same_for_any_pictures():
    eager, compiled = built(DENSE), built(DENSE)
    apply_compile(compiled, backend="aot_eager")
    assert all(block._compiled_call_impl is not None for block in compiled.blocks())
    assert len(compiled.blocks()) == 4
    for seed, spots in enumerate(
        [
            (Spot(0, 3, 4, 4), Spot(1, 0, 2, 2)),
            (Spot(0, 1, 2, 4), Spot(0, 4, 4, 6), Spot(1, 2, 2, 2)),
            (Spot(1, 4, 2, 6),),
            (),
        ]
    ):
        tokens_BL, images = make_inputs(spots, seed)
        for model in (eager, compiled):
            model.zero_grad()
            model(tokens_BL, images=images).square().mean().backward()
        for (name, ours), theirs in zip(compiled.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, msg=lambda m, name=name: f"{name}: {m}")


def test_writes_text_with_a_cache_as_without():
    model = built(DENSE)
    texts = [
        generate(model, [[256, 97, 32]], 8, sampling=Sampling(0.0), max_context=64, cached=cached)
        for cached in (True, False)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0][0]) == 8


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"mrope_section": (1, 3, 2)}, "mrope_section (1, 3, 2) does not fit the 6 pairs"),
        ({"vision": replace(VISION, dim=20)}, "vision.dim 20 must be a multiple of 4 * num_heads"),
        ({"vision": replace(VISION, deepstack_layers=(1, 0))}, "vision.deepstack_layers must be rising"),
        ({"vision": replace(VISION, deepstack_layers=(2,))}, "below num_layers 2, got [2]"),
        ({"num_layers": 1}, "vision.deepstack_layers are 2, more than num_layers 1"),
        ({"vision": replace(VISION, hidden_dim=0)}, "vision.hidden_dim must be positive"),
    ],
)
def test_unsound_configs_are_refused(changes, problem):
    assert DENSE.problems() == []
    assert any(problem in found for found in replace(DENSE, **changes).problems())


def test_encoder_counts_in_flops_as_if_every_fourth_position_were_a_pictures():
    blocks = sum(p.numel() for name, p in built(DENSE).named_parameters() if name.startswith("vision.layers"))
    deeper = replace(DENSE, vision=replace(VISION, num_layers=4))
    assert deeper.flops_per_token(64) - DENSE.flops_per_token(64) == 6 * blocks
    larger_table = replace(DENSE, vision=replace(VISION, positions_per_side=30))
    assert larger_table.flops_per_token(64) == DENSE.flops_per_token(64)


def caption_losses(trainer) -> tuple[float, float]:
    """The mean loss on held-out texts, with their own pictures and with those of others."""
    right, wrong, num_tokens = 0.0, 0.0, 0
    trainer.model.eval()
    with torch.no_grad():
        for batch in trainer.data.validation.batches(8, 4):
            others = replace(batch.images, patches_NC=batch.images.patches_NC.flip(0))
            right += trainer.loss_sum(trainer.model(batch.tokens_BL, images=batch.images), batch.labels_BL).item()
            wrong += trainer.loss_sum(trainer.model(batch.tokens_BL, images=others), batch.labels_BL).item()
            num_tokens += trainer.count_tokens([batch.labels_BL])
    return right / num_tokens, wrong / num_tokens


def test_learns_to_say_what_a_picture_shows():
    vision = VisionConfig(
        dim=48, num_layers=2, num_heads=2, hidden_dim=96, positions_per_side=6, deepstack_layers=(0, 1)
    )
    size = {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 24, "dense_hidden_dim": 128}
    config = RunConfig(
        model=Qwen3VLConfig(**size, mrope_section=(4, 4, 4), tied_embeddings=True, vision=vision),
        training=Training(steps=200, seq_len=32, local_batch_size=8, threads=1),
        optimizer=Optimizer(lr=4e-3),
        lr_scheduler=LRScheduler(warmup_steps=5, decay_ratio=0.3),
        data=Data(kind="pictures"),
    )
    trainer = make_trainer(config)
    losses = [trainer.step(step).read()["loss"] for step in range(1, 201)]
    assert losses[0] > 5
    assert sum(losses[-10:]) / 10 < 0.2
    right, wrong = caption_losses(trainer)
    assert right < 0.2
    assert wrong > 2 * right

    captions = list(write_captions(trainer.model, trainer.data, torch.device("cpu"), most=12))
    assert len(captions) == 12
    # By chance, one of six colours would be right.
    assert sum(caption.written.split()[1] == caption.true.split()[1] for caption in captions) >= 7
