"""What can't be converted faithfully is refused by name, and nothing is written."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from their_models import make, save

from spurline.hf.exporting import export_run
from spurline.hf.folder import INDEX
from spurline.hf.importing import import_folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders that transformers wrote, which a test may copy and spoil."""
    folder = tmp_path_factory.mktemp("models")
    save(make("qwen3_moe"), folder / "qwen3_moe")
    save(make("llama"), folder / "llama")
    save(make("deepseek_v3"), folder / "deepseek_v3")
    save(make("llama"), folder / "sharded", max_shard_size="40KB")
    return folder


@pytest.fixture
def spoiled(models, tmp_path):
    """A copy of one of them."""

    def copy(name):
        return shutil.copytree(models / name, tmp_path / "theirs")

    return copy


@pytest.fixture
def refused(tmp_path):
    """Asserts that the import is refused with this message, and leaves nothing behind; returns all that was said."""

    def check(source, message):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ValueError, match=message) as caught:
            import_folder(source, tmp_path / "deep" / "run")
        assert sorted(tmp_path.rglob("*")) == before
        return str(caught.value)

    return check


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def change_json(path, **changes):
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


def test_missing_and_left_over_tensors_are_all_named(spoiled, refused):
    source = spoiled("qwen3_moe")

    def change(tensors):
        del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
        tensors["model.layers.2.mlp.experts.8.up_proj.weight"] = torch.zeros(24, 32)
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)

    change_tensors(source, change)
    said = refused(source, r"tensor model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight is missing")
    assert "tensor model.layers.2.mlp.experts.8.up_proj.weight (24, 32) is unexpected" in said
    assert "tensor model.layers.0.self_attn.q_proj.bias (48,) is unexpected" in said


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"]
)
def test_a_transposed_tensor_is_refused(spoiled, refused, name):
    source = spoiled("qwen3_moe")
    change_tensors(source, lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))
    refused(source, rf"tensor {re.escape(name)} has shape \(32, 24\), not \(24, 32\): it is transposed")


def test_weights_of_other_types_are_refused(spoiled, refused):
    source = spoiled("qwen3_moe")
    first, other = "model.layers.0.mlp.gate.weight", "model.layers.1.mlp.experts.2.down_proj.weight"

    def change(tensors):
        tensors[first] = tensors[first].to(torch.float8_e4m3fn)
        tensors[other] = tensors[other].bfloat16()

    change_tensors(source, change)
    said = refused(source, rf"tensor {re.escape(first)} has dtype F8_E4M3")
    assert f"tensor {other} is BF16: dtypes must be equal" in said


@pytest.mark.parametrize(
    ("num_layers", "message"), [(2, r"tensor model\.layers\.2\..* is unexpected"), (4, "is missing")]
)
def test_another_number_of_layers_than_the_file_has_is_refused(spoiled, refused, num_layers, message):
    source = spoiled("deepseek_v3")
    change_json(source / "config.json", num_hidden_layers=num_layers)
    refused(source, message)


def test_a_long_list_of_problems_is_cut(spoiled, refused):
    source = spoiled("qwen3_moe")
    change_json(source / "config.json", num_hidden_layers=1)
    said = refused(source, "is unexpected").splitlines()
    assert len(said) == 11
    assert re.fullmatch(r"and \d+ more", said[-1])


def test_a_head_that_predicts_further_tokens_is_left_out_and_told(spoiled, tmp_path):
    source = spoiled("deepseek_v3")
    further = {
        "model.layers.3.eh_proj.weight": torch.zeros(32, 64),
        "model.layers.3.mlp.gate.weight": torch.zeros(8, 32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    change_tensors(source, lambda tensors: tensors.update(further))
    told = "\n".join(import_folder(source, tmp_path / "run"))
    assert "left out: 2 tensors like model.layers.3.eh_proj.weight (a head that predicts further tokens)" in told
    assert "left out: model.layers.0.self_attn.rotary_emb.inv_freq (rotary frequencies" in told

    change_json(source / "config.json", num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match=r"model\.layers\.3\.eh_proj\.weight .* is unexpected"):
        import_folder(source, tmp_path / "other")


def test_a_missing_shard_and_one_that_is_cut_off_are_refused(spoiled, refused):
    source = spoiled("sharded")
    shard = sorted(source.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-7])
    refused(source, rf"{re.escape(str(shard))} is truncated")
    shard.unlink()
    refused(source, rf"{re.escape(str(shard))} is missing")


def test_an_index_that_lies_is_refused(spoiled, refused):
    source = spoiled("sharded")
    truth = json.loads((source / INDEX).read_text())
    weight_map = truth["weight_map"]
    files = sorted(set(weight_map.values()))[1:]
    here = next(name for name, file in weight_map.items() if file == files[0])

    def lie(changed):
        (source / INDEX).write_text(json.dumps(truth | {"weight_map": changed}))

    lie(weight_map | {"model.more.weight": files[1]})
    refused(source, rf"{re.escape(files[1])} has no tensor model\.more\.weight")
    lie({name: file for name, file in weight_map.items() if name != here})
    refused(source, rf"{re.escape(files[0])} has tensor {re.escape(here)}, but .* does not list it")
    lie(weight_map | {here: files[1]})
    refused(source, rf"{re.escape(files[0])} has tensor {re.escape(here)}, but .* lists it in {re.escape(files[1])}")
    lie(weight_map | {here: "../secret.safetensors"})
    refused(source, r"'\.\./secret\.safetensors', which is not a file of the same folder")
    lie([])
    refused(source, "has no weight_map")
    (source / INDEX).write_text("{")
    refused(source, f"{INDEX} is not JSON")


def test_two_sets_of_weights_are_refused(spoiled, refused):
    source = spoiled("sharded")
    save_file({"x": torch.zeros(1)}, source / "model.safetensors")
    refused(source, rf"has model\.safetensors in addition to the weights of {re.escape(INDEX)}")


def test_weights_beside_the_models_are_refused(spoiled, refused):
    source = spoiled("llama")
    save_file({"x": torch.zeros(1)}, source / "adapter_model.safetensors")
    refused(source, r"has adapter_model\.safetensors in addition to the weights of model\.safetensors")


def test_folders_without_what_is_needed_are_refused(spoiled, refused, tmp_path):
    refused(tmp_path / "nowhere", "is not a folder")
    source = spoiled("llama")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    refused(source, r"pytorch_model\.bin has an unsupported format")
    (source / "config.json").unlink()
    refused(source, r"config\.json: can't read the file")


def test_an_architecture_that_no_family_knows_is_refused(spoiled, refused):
    source = spoiled("llama")
    change_json(source / "config.json", architectures=["GPT2LMHeadModel"])
    said = refused(source, "architecture GPT2LMHeadModel is not supported")
    assert "DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, Glm4MoeForCausalLM, GptOssForCausalLM" in said
    change_json(source / "config.json", architectures=None)
    refused(source, r"architecture \(none\) is not supported")


def test_a_folder_that_is_not_empty_is_not_touched(models, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    import_folder(models / "llama", out)
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        import_folder(models / "llama", out)
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        export_run(out, out)
    assert sorted(path.name for path in out.iterdir()) == ["checkpoints", "config.json", "tokenizer"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_is_refused_without_a_checkpoint_or_with_another_models(models, tmp_path):
    run = tmp_path / "run"
    import_folder(models / "llama", run)
    with pytest.raises(ValueError, match=r"no complete checkpoint .*step-00000007"):
        export_run(run, tmp_path / "out", step=7)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"model": config["model"] | {"num_layers": 2}}))
    with pytest.raises(ValueError, match=r"does not match the model in config\.json: layers\.2\."):
        export_run(run, tmp_path / "out")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(ValueError, match="has no complete checkpoint: the run has not saved one yet"):
        export_run(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
