"""Qwen3-VL in the form of Hugging Face: read from what `transformers` saves, and written so that it reads it."""

from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from spurline import config_io
from spurline.config import Lora
from spurline.config_io import ConfigError, load
from spurline.data.batch import Images, Spot
from spurline.data.patches import PATCH_DIM
from spurline.hf.exporting import export_run
from spurline.hf.families import architecture_for, find_architecture, read_model_config
from spurline.hf.importing import import_folder
from spurline.hf.peft import export_adapters
from spurline.hf.settings import run_config_for
from spurline.lora.adapters import is_adapter
from spurline.lora.attach import attach_adapters
from spurline.models import family_configs
from spurline.train.base_model import load_base
from spurline.train.checkpoint.manager import CheckpointManager

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

PICTURE_TOKEN = 150
TEXT = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "intermediate_size": 48,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e3, "mrope_section": [2, 2, 2]},
}
VISION = {
    "hidden_size": 24,
    "depth": 3,
    "num_heads": 2,
    "intermediate_size": 40,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 2],
}
SPOTS = (Spot(0, 2, 4, 6), Spot(1, 9, 2, 4))


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]}


def make_theirs(tied: bool, experts: dict[str, object] | None = None):
    torch.manual_seed(0)
    kind = "Qwen3VL" if experts is None else "Qwen3VLMoe"
    config = getattr(transformers, f"{kind}Config")(
        text_config=TEXT | (experts or {}),
        vision_config=VISION,
        image_token_id=PICTURE_TOKEN,
        tie_word_embeddings=tied,
    )
    theirs = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return theirs


def make_inputs() -> tuple[Tensor, Images]:
    generator = torch.Generator().manual_seed(1)
    tokens_BL = torch.randint(PICTURE_TOKEN, (2, 20), generator=generator)
    for spot in SPOTS:
        tokens_BL[spot.row, spot.start : spot.start + spot.num_features] = PICTURE_TOKEN
    num_patches = sum(spot.num_patches for spot in SPOTS)
    return tokens_BL, Images(torch.randn(num_patches, PATCH_DIM, generator=generator), SPOTS)


def their_logits(theirs) -> Tensor:
    tokens_BL, images = make_inputs()
    theirs.config.image_token_id = theirs.model.config.image_token_id = PICTURE_TOKEN
    return theirs(
        tokens_BL,
        pixel_values=images.patches_NC,
        image_grid_thw=torch.tensor([(1, spot.height, spot.width) for spot in SPOTS]),
        mm_token_type_ids=(tokens_BL == PICTURE_TOKEN).int(),
    ).logits


@torch.no_grad()
@pytest.mark.parametrize(
    ("tied", "experts"),
    [
        (False, None),
        (True, None),
        (False, EXPERTS),
        # With F = D or 2F = D, a transposed weight would keep its shape.
        (True, EXPERTS | {"moe_intermediate_size": 32}),
        (False, EXPERTS | {"moe_intermediate_size": 16, "mlp_only_layers": []}),
    ],
)
def test_model_of_transformers_is_read_and_written_back(tmp_path: Path, tied: bool, experts) -> None:
    theirs = make_theirs(tied, experts)
    expected_BLV = their_logits(theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "run")
    family, _, config = load(tmp_path / "run" / "config.json")
    assert family == "qwen3_vl"
    ours = config.model.build().eval()
    CheckpointManager(tmp_path / "run", interval=1, keep_latest_k=0).load(0, ours, None)
    tokens_BL, images = make_inputs()
    torch.testing.assert_close(ours(tokens_BL, images=images), expected_BLV, rtol=0, atol=1e-4)

    export_run(tmp_path / "run", tmp_path / "again")
    again = type(theirs).from_pretrained(tmp_path / "again").eval()
    assert torch.equal(their_logits(again), expected_BLV)
    saved, written = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "again"))
    assert saved.keys() == written.keys()
    for name, tensor in saved.items():
        is_transposed = tensor.shape != written[name].shape
        assert is_transposed <= (".experts." in name)
        assert torch.equal(written[name].mT if is_transposed else written[name], tensor), name

    # What we write is what is published: experts transposed. It comes and goes without a changed bit.
    import_folder(tmp_path / "again", tmp_path / "second")
    export_run(tmp_path / "second", tmp_path / "last")
    first, last = (load_file(tmp_path / folder / "model.safetensors") for folder in ("again", "last"))
    assert first.keys() == last.keys()
    assert all(torch.equal(first[name], last[name]) for name in first)
    if experts is not None:
        fused = first["model.language_model.layers.1.mlp.experts.gate_up_proj"]
        assert fused.shape == (6, 32, 2 * experts["moe_intermediate_size"])


@torch.no_grad()
@pytest.mark.parametrize("experts", [None, EXPERTS], ids=["dense", "moe"])
def test_adapters_answer_the_same_in_peft(tmp_path: Path, experts) -> None:
    """On the text model and on the vision encoder; experts are adapted as `transformers` holds them in memory."""
    folder, run = tmp_path / "theirs", tmp_path / "run"
    theirs = make_theirs(False, experts)
    theirs.save_pretrained(folder)
    family, preset, config = run_config_for(folder, "")
    config = replace(config, lora=Lora(rank=2, alpha=3.3, base=str(folder)))
    model = config.model.build().eval()
    attach_adapters(model, config.lora.rank, config.lora.alpha, config.lora.targets)
    described = load_base(model, config)
    adapters = [parameter for name, parameter in model.named_parameters() if is_adapter(name)]
    assert any(is_adapter(name) for name, _ in model.vision.named_parameters())
    for parameter in adapters:
        parameter.normal_(std=0.2)
    CheckpointManager(run, interval=1, keep_latest_k=0).save(5, model, torch.optim.SGD(adapters), described)
    config_io.save(run / "config.json", family, preset, config)
    export_adapters(run, tmp_path / "adapter")

    plain_BLV = their_logits(theirs)
    peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")  # in place
    tokens_BL, images = make_inputs()
    ours_BLV = model(tokens_BL, images=images)
    assert (ours_BLV - plain_BLV).abs().max() > 0.1 * plain_BLV.abs().max()
    torch.testing.assert_close(their_logits(theirs), ours_BLV, rtol=1e-4, atol=1e-4)


def test_published_config_is_that_of_the_preset() -> None:
    text = {
        "model_type": "qwen3_vl_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2560,
        "initializer_range": 0.02,
        "intermediate_size": 9728,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 151936,
    }
    vision = {
        "model_type": "qwen3_vl",
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2560,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    theirs = {"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text, "vision_config": vision}
    theirs |= {"model_type": "qwen3_vl", "tie_word_embeddings": True, "image_token_id": 151655}
    model = read_model_config(find_architecture(theirs, "here"), theirs, "here")
    assert model == family_configs("qwen3_vl")["qwen3_vl_4b"]().model


def test_what_is_not_as_published_is_refused() -> None:
    their_config = make_theirs(False).config.to_dict()
    their_config["vision_config"] |= {"patch_size": 14, "num_position_embeddings": 17}
    architecture = find_architecture({"architectures": ["Qwen3VLForConditionalGeneration"]}, "here")
    with pytest.raises(ConfigError) as error:
        read_model_config(architecture, their_config, "here")
    assert "vision_config.patch_size is 14" in str(error.value)
    assert "num_position_embeddings is 17, which is not a square" in str(error.value)


def test_routing_that_their_experts_lack_is_refused() -> None:
    model = family_configs("qwen3_vl")["qwen3_vl_debugmodel_moe"]().model
    with pytest.raises(ConfigError, match=r"moe\.route_norm is False"):
        architecture_for("qwen3_vl", replace(model, moe=replace(model.moe, route_norm=False)))


def test_yarn_is_not_written() -> None:
    model = family_configs("qwen3_vl")["qwen3_vl_debugmodel"]().model
    with pytest.raises(ConfigError, match=r"yarn\.factor"):
        architecture_for("qwen3_vl", replace(model, yarn=replace(model.yarn, factor=2.0)))
