"""Every preset of every family: published sizes, soundness, and that the small ones learn."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from spurline.config import Data
from spurline.config_io import load, save
from spurline.models import family_configs, family_names
from spurline.moe.config import MoEConfig
from spurline.testing.params import slow_but
from spurline.tools.options import resolve
from spurline.train.trainer import make_trainer

PRESETS = {name: (family, preset) for family in family_names() for name, preset in family_configs(family).items()}

# In total, exactly as in the released weights (DeepSeek-V3's without its selection bias and its multi-token head), and
# active: with embedding and output head, which publishers of active counts sometimes leave out.
PUBLISHED = {
    "deepseek_v3_16b": (15_706_484_224, 2.66e9),
    "deepseek_v3_236b": (235_741_434_880, 21.4e9),
    "deepseek_v3_671b": (671_026_404_352, 37.6e9),
    "glm4_5_air": (106_852_245_504, 13.4e9),
    "glm4_5": (352_797_814_784, 33.6e9),
    "gpt_oss_20b": (20_914_757_184, 4.19e9),
    "gpt_oss_120b": (116_829_156_672, 5.71e9),
    "qwen2_0_5b": (494_032_768, 494e6),
    "qwen2_1_5b": (1_543_714_304, 1.54e9),
    "qwen2_7b": (7_615_616_512, 7.62e9),
    "qwen1_5_moe_a2_7b": (14_315_784_192, 2.69e9),
    "qwen2_57b_a14b": (57_408_658_944, 14.2e9),
    "mistral_7b": (7_241_732_096, 7.24e9),
    "mixtral_8x7b": (46_702_792_704, 12.9e9),
    "mixtral_8x22b": (140_620_634_112, 39.2e9),
    "olmoe_7b_a1b": (6_919_161_856, 1.28e9),
    "qwen3_0_6b": (596_049_920, 596e6),
    "qwen3_1_7b": (1_720_574_976, 1.72e9),
    "qwen3_4b": (4_022_468_096, 4.02e9),
    "qwen3_8b": (8_190_735_360, 8.19e9),
    "qwen3_14b": (14_768_307_200, 14.8e9),
    "qwen3_32b": (32_762_123_264, 32.8e9),
    "qwen3_30b_a3b": (30_532_122_624, 3.35e9),
    "qwen3_235b_a22b": (235_093_634_560, 22.2e9),
    "qwen3_vl_2b": (2_127_532_032, 2.13e9),
    "qwen3_vl_4b": (4_437_815_808, 4.44e9),
    "qwen3_vl_8b": (8_767_123_696, 8.77e9),
    "qwen3_vl_32b": (33_357_390_064, 33.4e9),
    "qwen3_vl_30b_a3b": (31_070_754_032, 3.89e9),
    "qwen3_vl_235b_a22b": (235_670_022_896, 22.8e9),
}
# To three digits, as their publishers and users give them.
ROUNDED = {
    "kimi_k2": (1.03e12, 32.9e9),
    "moe_10b_2b": (9.41e9, 1.98e9),
    "moe_10b_2b_sdpa": (10.0e9, 2.61e9),
    "agpt_2b": (1.99e9, 1.99e9),
    "agpt_20b": (20.7e9, 20.7e9),
    "agpt_50b": (52.1e9, 52.1e9),
    "agpt_80b": (80.8e9, 80.8e9),
    "agpt_80b_wide": (80.0e9, 80.0e9),
    "agpt_80b_deep": (80.9e9, 80.9e9),
}
DEBUG_PRESETS = [name for name in PRESETS if "debugmodel" in name]
FIRST = "deepseek_v3_first"
SIZES_BETWEEN = {f"qwen3_{size}" for size in ("0_6b", "1_7b", "4b", "8b", "14b", "vl_2b", "vl_4b", "vl_8b")}
"""Presets between the smallest and the largest of their kind, with the same code."""


def three_digits(number: float) -> float:
    return float(f"{number:.3g}")


def meta_build(name):
    with torch.device("meta"):
        return PRESETS[name][1]().model.build()


@pytest.mark.parametrize("name", slow_but(PRESETS.keys() - SIZES_BETWEEN, PRESETS))
def test_preset_is_sound_and_counts_the_parameters_of_its_model(name):
    config = PRESETS[name][1]()
    assert config.problems() == []
    model = meta_build(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.model.num_params()
    # Nothing is allocated, however large the model.
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("name", PUBLISHED)
def test_released_models_have_their_published_size(name):
    model = PRESETS[name][1]().model
    total, active = PUBLISHED[name]
    assert model.num_params() == total
    assert three_digits(model.num_active_params()) == active


@pytest.mark.parametrize("name", ROUNDED)
def test_other_models_have_the_size_in_their_name(name):
    model = PRESETS[name][1]().model
    assert (three_digits(model.num_params()), three_digits(model.num_active_params())) == ROUNDED[name]


def test_every_preset_is_of_a_known_size_or_for_debugging():
    assert PRESETS.keys() == PUBLISHED.keys() | ROUNDED.keys() | {FIRST, *DEBUG_PRESETS}
    for family in family_names():
        assert any(PRESETS[name][0] == family for name in DEBUG_PRESETS), family


def test_the_10b_2b_model_is_built_as_described():
    model = PRESETS["moe_10b_2b"][1]().model
    assert (model.dim, model.num_layers, model.num_dense_layers, model.dense_hidden_dim) == (2048, 27, 1, 10_944)
    assert (model.num_heads, model.kv_lora_rank, model.q_lora_rank) == (16, 512, 0)
    assert replace(model.moe, bias_update_rate=0.0) == MoEConfig(
        hidden_dim=1408,
        num_experts=36,
        top_k=3,
        num_shared_experts=2,
        score_func="softmax",
        route_norm=False,
        score_before_experts=False,
    )
    assert model.vocab_size == 102_400
    assert PRESETS["moe_10b_2b_sdpa"][1]().model == replace(model, vocab_size=256_128)


@pytest.mark.parametrize(
    ("name", "sizes"),
    {
        "agpt_2b": (2048, 12, 16, 4, 11_008, 5e4),
        "agpt_20b": (5120, 64, 40, 8, 14_336, 5e5),
        "agpt_50b": (8192, 56, 64, 8, 28_672, 5e5),
        "agpt_80b": (9216, 84, 72, 12, 25_600, 5e5),
        "agpt_80b_wide": (10_752, 48, 84, 12, 39_936, 5e5),
        "agpt_80b_deep": (7680, 96, 60, 12, 28_672, 5e5),
    }.items(),
)
def test_agpt_models_are_built_as_their_users_run_them(name, sizes):
    m = PRESETS[name][1]().model
    assert (m.dim, m.num_layers, m.num_heads, m.num_kv_heads, m.dense_hidden_dim, m.rope_theta) == sizes
    assert (m.vocab_size, m.num_heads * m.head_dim) == (256_128, m.dim)


def test_the_debug_model_keeps_its_shape():
    """Commands, documents and tests rely on it; `make train` has a preset of its own."""
    model, training = (getattr(PRESETS["deepseek_v3_debugmodel"][1](), name) for name in ("model", "training"))
    assert (model.vocab_size, model.dim, model.num_layers, model.num_dense_layers) == (264, 256, 4, 1)
    assert (model.moe.num_experts, model.moe.top_k, model.moe.hidden_dim, model.moe.num_shared_experts) == (
        8,
        2,
        128,
        1,
    )
    assert (training.steps, training.seq_len, training.local_batch_size) == (600, 256, 4)


def test_the_first_preset_has_a_tokenizer_that_comes_along_and_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # its name is no path
    config = PRESETS[FIRST][1]()
    small = replace(config.training, steps=6, seq_len=32, local_batch_size=4, threads=1)
    text = tmp_path / "text.py"
    text.write_text("def main():\n    return [number for number in range(10) if number % 2]\n" * 60)
    trainer = make_trainer(replace(config, training=small, data=replace(config.data, path=str(text))))
    assert trainer.data.tokenizer.vocab_size == config.model.vocab_size
    losses = [trainer.step(step).read()["loss"] for step in range(1, 7)]
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("name", DEBUG_PRESETS)
def test_debug_preset_learns_from_the_byte_tokenizer(name, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a spur line is a side track that carries some of the traffic\n" * 60)
    config = PRESETS[name][1]()
    small = replace(config.training, steps=12, seq_len=32, local_batch_size=4, threads=1)
    trainer = make_trainer(replace(config, training=small, data=Data(path=str(text))))
    losses = [trainer.step(step).read()["loss"] for step in range(1, 13)]
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize(
    "name", ["agpt_2b", "deepseek_v3_671b", "moe_10b_2b", "qwen3_0_6b", "qwen3_30b_a3b", "qwen3_vl_8b"]
)
def test_config_file_holds_all_of_a_preset(name, tmp_path):
    family, preset = PRESETS[name]
    save(tmp_path / "config.json", family, name, preset())
    assert load(tmp_path / "config.json") == (family, name, preset())


def test_inherited_and_nested_fields_are_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--model.num_kv_heads", "4", "--model.yarn.factor", "2", "--model.moe.top_k", "1"]
    model = resolve(["--module", "qwen3", "--config", "qwen3_debugmodel_moe", *options]).run_config.model
    assert (model.num_kv_heads, model.yarn.factor, model.moe.top_k) == (4, 2.0, 1)


def test_presets_load_without_torch():
    code = (
        "import sys; from spurline.models import family_configs, family_names\n"
        "for family in family_names(): [preset().problems() for preset in family_configs(family).values()]\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
