"""Multi-token prediction: the loss against plain loops, and what must not notice it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from spurline import config_io
from spurline.config import RunConfig
from spurline.hf.accounting import account
from spurline.hf.exporting import export_run
from spurline.hf.folder import find_tensors, read_json
from spurline.hf.importing import read_slot
from spurline.models.common.context import BlockContext
from spurline.models.common.init import initialize
from spurline.models.deepseek_v3.configs import DeepSeekV3Config, deepseek_v3_671b
from spurline.models.deepseek_v3.hf import V3, architecture_for
from spurline.models.deepseek_v3.model import DeepSeekV3
from spurline.moe.balance import routers
from spurline.parallel.compile import apply_compile
from spurline.parallel.remat import apply_remat
from spurline.testing.tiny import tiny_model
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.loss import IGNORE_INDEX, cross_entropy_sum

CONFIG = tiny_model(
    vocab_size=24,
    num_layers=2,
    num_heads=2,
    v_head_dim=8,
    num_mtp_layers=2,
    mtp_loss_weight=0.4,
    moe={"hidden_dim": 8, "num_experts": 4},
    q_lora_rank=0,
)


def make(config: DeepSeekV3Config = CONFIG) -> DeepSeekV3:
    model = config.build()
    initialize(model, seed=3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # or it would not matter which of them is where
                parameter.mul_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(len(name))) + 0.5)
    return model


def batch(B: int = 2, L: int = 7) -> tuple[Tensor, Tensor]:
    tokens_BL = torch.randint(24, (B, L + 1), generator=torch.Generator().manual_seed(0))
    labels_BL = tokens_BL[:, 1:].clone()
    labels_BL[0, :3] = IGNORE_INDEX
    return tokens_BL[:, :-1], labels_BL


def loss64(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    return F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)


def rms(x_D: Tensor, weight_D: Tensor) -> Tensor:
    return x_D / (x_D.square().mean() + 1e-6).sqrt() * weight_D


def loss_in_loops(model: DeepSeekV3, tokens_BL: Tensor, labels_BL: Tensor) -> Tensor:
    """The whole loss, one sequence and one position after the other; only blocks and the main model are called."""
    weights = dict(model.named_parameters())
    total = torch.zeros((), dtype=torch.float64)
    for tokens, labels in zip(tokens_BL, labels_BL, strict=True):
        hidden = list(model.last_hidden_state(tokens.unsqueeze(0))[0])
        for i, label in enumerate(labels.tolist()):
            if label != IGNORE_INDEX:
                total = total - (weights["output.weight"] @ hidden[i]).log_softmax(-1)[label]
        for k in (1, 2):
            inputs = []
            for i in range(len(tokens) - k):
                embedded_D = weights["embedding.weight"][tokens[i + k]]
                parts = (
                    rms(embedded_D, weights[f"mtp.{k - 1}.enorm.weight"]),
                    rms(hidden[i], weights[f"mtp.{k - 1}.hnorm.weight"]),
                )
                inputs.append(weights[f"mtp.{k - 1}.eh_proj.weight"] @ torch.cat(parts))
            context = BlockContext(model.rope(torch.arange(len(inputs))))
            out_1LD = model.mtp[str(k - 1)].block(torch.stack(inputs).unsqueeze(0), context)
            hidden = [rms(out_D, weights[f"mtp.{k - 1}.norm.weight"]) for out_D in out_1LD[0]]
            for i, out_D in enumerate(hidden):
                if (label := int(labels[i + k])) != IGNORE_INDEX:
                    total = total - 0.4 / 2 * (weights["output.weight"] @ out_D).log_softmax(-1)[label]
    return total


def test_loss_and_gradients_equal_plain_loops() -> None:
    model = make().double()
    model.compute_dtype = torch.float64
    tokens_BL, labels_BL = batch()
    loss = model(tokens_BL, labels_BL=labels_BL, loss_sum=loss64)
    actual = torch.autograd.grad(loss, list(model.parameters()))
    expected_loss = loss_in_loops(model, tokens_BL, labels_BL)
    expected = torch.autograd.grad(expected_loss, list(model.parameters()))
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    for (name, _), grad, expected_grad in zip(model.named_parameters(), actual, expected, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
        assert expected_grad.any(), name


@pytest.mark.parametrize(
    "change",
    [
        lambda model: apply_remat(model, "full"),
        lambda model: apply_remat(model, "selective"),
        pytest.param(lambda model: apply_compile(model, "aot_eager"), marks=pytest.mark.slow),
    ],
    ids=["remat full", "remat selective", "compile"],
)
def test_modules_are_blocks_like_all_others(change: Callable[[DeepSeekV3], None]) -> None:
    tokens_BL, labels_BL = batch()
    gradients = []
    for changes in (False, True):
        model = make()
        if changes:
            change(model)
            changed = model.mtp["0"].__dict__.get("forward") or model.mtp["0"]._compiled_call_impl
            assert changed is not None
        model(tokens_BL, labels_BL=labels_BL, loss_sum=cross_entropy_sum).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for grad, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6)


def test_positions_without_a_token_ahead_are_not_routed() -> None:
    model = make()
    model(*batch(2, 7)[:1], labels_BL=batch(2, 7)[1], loss_sum=cross_entropy_sum)
    rows = {name: int(router.row_count_E.sum()) for name, router in routers(model).items()}
    assert rows == {"layers.1.moe": 2 * 7 * 2, "mtp.0.block.moe": 2 * 6 * 2, "mtp.1.block.moe": 2 * 5 * 2}


def test_logits_validation_and_other_weights_take_no_notice() -> None:
    model, without = make(), make(replace(CONFIG, num_mtp_layers=0))
    tokens_BL, labels_BL = batch()
    assert {
        k: v for k, v in model.state_dict().items() if not k.startswith("mtp.")
    }.keys() == without.state_dict().keys()
    assert torch.equal(model(tokens_BL), without(tokens_BL))
    losses = [m.eval()(tokens_BL, labels_BL=labels_BL, loss_sum=cross_entropy_sum) for m in (model, without)]
    assert losses[0] == losses[1]
    model.train()
    assert model(tokens_BL, labels_BL=labels_BL, loss_sum=cross_entropy_sum) > losses[0]


@pytest.mark.parametrize("num_dense_layers", [1, 2])
def test_parameters_are_as_many_as_the_config_says(num_dense_layers: int) -> None:
    config = replace(CONFIG, num_dense_layers=num_dense_layers)
    assert sum(p.numel() for p in config.build().parameters()) == config.num_params()


def test_published_number_of_parameters_is_without() -> None:
    model = deepseek_v3_671b().model
    with_mtp = replace(model, num_mtp_layers=1)
    assert round(model.num_params() / 1e9) == 671
    with torch.device("meta"):
        assert sum(p.numel() for p in with_mtp.build().parameters()) == with_mtp.num_params()
    assert with_mtp.flops_per_token(4096) > model.flops_per_token(4096)


def test_sequences_too_short_to_look_ahead_are_refused() -> None:
    model, (tokens_BL, labels_BL) = make(), batch(1, 2)
    with pytest.raises(ValueError, match=r"sequences of 2 tokens are too short for model\.num_mtp_layers 2"):
        model(tokens_BL, labels_BL=labels_BL, loss_sum=cross_entropy_sum)


def test_negative_numbers_are_refused() -> None:
    problems = replace(CONFIG, num_mtp_layers=-1, mtp_loss_weight=-0.1).problems()
    assert problems == ["num_mtp_layers must not be negative, got -1", "mtp_loss_weight must not be negative, got -0.1"]


@pytest.fixture
def exported(tmp_path: Path) -> tuple[DeepSeekV3, Path]:
    """A model whose weights no two are alike, and the Hugging Face folder that is made of its checkpoint."""
    model = make(replace(CONFIG, moe=replace(CONFIG.moe, score_func="sigmoid")))
    for router in routers(model).values():
        router.expert_bias_E.normal_()
    run = tmp_path / "run"
    run.mkdir()
    config_io.save(run / "config.json", "deepseek_v3", "deepseek_v3_debugmodel", RunConfig(model=model.config))
    CheckpointManager(run, 1, 0).save(1, model, torch.optim.AdamW(model.parameters()), {})
    export_run(run, tmp_path / "theirs")
    return model, tmp_path / "theirs"


def test_modules_are_the_layers_behind_the_last_in_hugging_face(exported: tuple[DeepSeekV3, Path]) -> None:
    model, folder = exported
    theirs = load_file(folder / "model.safetensors")
    of_first = {name.removeprefix("model.layers.2.") for name in theirs if name.startswith("model.layers.2.")}
    of_last = {name.removeprefix("model.layers.1.") for name in theirs if name.startswith("model.layers.1.")}
    assert of_first - of_last == {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    assert of_last <= of_first
    assert torch.equal(theirs["model.layers.3.shared_head.norm.weight"], model.mtp["1"].norm.weight)
    assert torch.equal(theirs["model.layers.2.eh_proj.weight"], model.mtp["0"].eh_proj.weight)
    down = theirs["model.layers.3.mlp.experts.2.down_proj.weight"]
    assert torch.equal(down, model.mtp["1"].block.moe.experts.w2_EDF[2])
    assert read_json(folder / "config.json")["num_nextn_predict_layers"] == 2


@pytest.mark.parametrize("spoiled", [None, "embed_tokens.weight", "shared_head.head.weight"])
def test_modules_come_back_to_the_bit_and_copies_must_be_copies(
    exported: tuple[DeepSeekV3, Path], spoiled: str | None
) -> None:
    model, folder = exported
    theirs = load_file(folder / "model.safetensors")
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    for copy, original in copies.items():
        theirs[f"model.layers.2.{copy}"] = theirs[original] + (copy == spoiled)
    save_file(theirs, folder / "model.safetensors")
    stored = find_tensors(folder)
    if spoiled:
        with pytest.raises(ValueError, match=rf"tensor model\.layers\.2\.{spoiled} differs from"):
            account(V3, model.config, read_json(folder / "config.json"), stored, "theirs")
        return
    slots, told = account(V3, model.config, read_json(folder / "config.json"), stored, "theirs")
    assert told == ["left out: 2 tensors like model.layers.2.embed_tokens.weight (a head that predicts further tokens)"]
    ours = model.state_dict()
    assert {slot.name for slot in slots} == ours.keys()
    for slot in slots:
        assert torch.equal(read_slot(slot, stored, torch.float32), ours[slot.name]), slot.name


def test_softmax_scores_have_no_form_with_modules() -> None:
    problem = "model.num_mtp_layers is 2, and DeepseekV2ForCausalLM can only be 0"
    assert problem in architecture_for(CONFIG).obstacles(CONFIG)
