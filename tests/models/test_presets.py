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
from spurline.tools.options import resolve
from spurline.train.trainer import make_trainer

PRESETS = {name: (family, preset) for family in family_names() for name, preset in family_configs(family).items()}

# In total, exactly as in the released weights (DeepSeek-V3's without its selection bias and its multi-token head), and
# active: with embedding and output head, which publishers of active counts sometimes leave out.
PUBLISHED = {
    "deepseek_v3_16b": (15_706_484_224, 2.66e9),
    "deepseek_v3_236b": (235_741_434_880, 21.4e9),
    "deepseek_v3_671b": (671_026_404_352, 37.6e9),
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
# To three digits: those of our own choice are in their class, and the 10B-A2B with a vocabulary of 102,400 is as given.
ROUNDED = {
    "moe_10b_2b": (9.41e9, 1.98e9),
    "moe_10b_2b_sdpa": (9.41e9, 1.98e9),
    "moe_10b_2b_vocab_256k": (10.0e9, 2.61e9),
    "agpt_2b": (1.99e9, 1.99e9),
    "agpt_20b": (20.2e9, 20.2e9),
    "agpt_80b": (79.5e9, 79.5e9),
}
DEBUG_PRESETS = [name for name in PRESETS if "debugmodel" in name]


def three_digits(number: float) -> float:
    return float(f"{number:.3g}")


def meta_build(name):
    with torch.device("meta"):
        return PRESETS[name][1]().model.build()


@pytest.mark.parametrize("name", PRESETS)
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
    assert PRESETS.keys() == PUBLISHED.keys() | ROUNDED.keys() | set(DEBUG_PRESETS)
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
    assert PRESETS["moe_10b_2b_sdpa"][1]() == PRESETS["moe_10b_2b"][1]()
    assert PRESETS["moe_10b_2b_vocab_256k"][1]().model == replace(model, vocab_size=256_128)


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
