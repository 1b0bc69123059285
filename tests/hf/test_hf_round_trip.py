"""Models made by `transformers` become ours and theirs again: logits, and every tensor to the bit."""

import json

import pytest
import torch
from safetensors import safe_open
from their_models import MODELS, load, logits, make, save
from torch import nn

from spurline import config_io
from spurline.hf.exporting import export_run
from spurline.hf.folder import INDEX
from spurline.hf.importing import import_folder
from spurline.train.checkpoint.manager import CheckpointManager


def stored(folder):
    """Every tensor of a folder by name: its dtype, its shape and its bytes, as the safetensors package reads them."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                assert name not in found
                found[name] = tensor.dtype, tensor.shape, tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return found


def our_model(run) -> nn.Module:
    model = config_io.load(run / "config.json")[2].model.build().eval()
    CheckpointManager(run, interval=1, keep_latest_k=0).load(0, model, None)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_and_goes_without_a_changed_bit(name, tmp_path):
    theirs = make(name)
    source = save(theirs, tmp_path / "theirs")
    told = import_folder(source, tmp_path / "run")
    assert not any("left out" in line for line in told)
    expected_BLV = logits(theirs)
    assert expected_BLV.std() > 0.5
    assert (logits(our_model(tmp_path / "run")) - expected_BLV).abs().max() < 1e-4

    export_run(tmp_path / "run", tmp_path / "back")
    assert stored(tmp_path / "back") == stored(source)
    assert torch.equal(logits(load(tmp_path / "back")), expected_BLV)


@pytest.mark.parametrize("name", ["llama-tied-square", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_bfloat16_files_in_shards_come_and_go_without_a_changed_bit(name, tmp_path):
    source = save(make(name).bfloat16(), tmp_path / "theirs", max_shard_size="30KB")
    assert (source / INDEX).exists()
    import_folder(source, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back", max_shard_bytes=30_000)
    assert stored(tmp_path / "back") == stored(source)

    shards = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
    assert all(shard.stat().st_size < 60_000 for shard in shards)
    index = json.loads((tmp_path / "back" / INDEX).read_text())
    assert index["weight_map"].keys() == stored(source).keys()
    assert index["metadata"]["total_size"] == sum(len(content) for _, _, content in stored(source).values())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert torch.equal(logits(load(tmp_path / "back")), logits(load(source)))


@pytest.mark.parametrize("name", ["qwen3_moe-square-dense-first", "deepseek_v3"])
def test_experts_that_are_fused_in_the_file_are_read_too(name, tmp_path):
    theirs = make(name)
    fused = save(theirs, tmp_path / "fused", save_original_format=False)
    assert any(tensor.endswith("experts.gate_up_proj") for tensor in stored(fused))
    import_folder(fused, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")
    assert stored(tmp_path / "back") == stored(save(theirs, tmp_path / "separate"))


def test_weights_are_rounded_when_asked_for_and_the_selection_bias_never_is(tmp_path):
    theirs = make("deepseek_v3")
    import_folder(save(theirs, tmp_path / "theirs"), tmp_path / "run", dtype=torch.bfloat16)
    export_run(tmp_path / "run", tmp_path / "kept")
    import_folder(tmp_path / "theirs", tmp_path / "whole")
    export_run(tmp_path / "whole", tmp_path / "rounded", dtype=torch.bfloat16)
    assert stored(tmp_path / "kept") == stored(tmp_path / "rounded")
    with safe_open(tmp_path / "rounded" / "model.safetensors", "pt") as file:
        bias = file.get_tensor("model.layers.1.mlp.gate.e_score_correction_bias")
        assert torch.equal(bias, theirs.model.layers[1].mlp.gate.e_score_correction_bias)
        norm = file.get_tensor("model.norm.weight")
        assert torch.equal(norm, theirs.model.norm.weight.bfloat16())


def test_an_output_head_stored_beside_a_tied_embedding_must_be_the_same(tmp_path):
    from safetensors.torch import load_file, save_file

    source = save(make("qwen3-tied"), tmp_path / "theirs")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors")
    told = import_folder(source, tmp_path / "run")
    assert any("left out: lm_head.weight" in line for line in told)

    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        import_folder(source, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_tokenizer_files_and_token_ids_come_along_both_ways(tmp_path):
    source = save(make("llama", bos_token_id=7, eos_token_id=[8, 9]), tmp_path / "theirs")
    files = {"tokenizer.json": '{"a": 1}', "tokenizer_config.json": "{}", "chat_template.jinja": "hello"}
    files["additional_chat_templates/tool_use.jinja"] = "hello tools"
    (source / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (source / name).write_text(text)
    (source / "README.md").write_text("not a tokenizer")
    import_folder(source, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")
    for name, text in files.items():
        assert (tmp_path / "run" / "tokenizer" / name).read_text() == text
        assert (tmp_path / "back" / name).read_text() == text
    assert not (tmp_path / "back" / "README.md").exists()
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (back["bos_token_id"], back["eos_token_id"], back["max_position_embeddings"]) == (7, [8, 9], 256)
    run_config = config_io.load(tmp_path / "run" / "config.json")[2]
    assert run_config.data.tokenizer == str(tmp_path / "run" / "tokenizer")
    generation = (source / "generation_config.json").read_text()
    assert (tmp_path / "back" / "generation_config.json").read_text() == generation
