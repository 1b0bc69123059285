"""`spurline convert`: what users type and read. That conversions are right is tested in tests/hf."""

import json
from dataclasses import replace

import pytest
import torch
import transformers

from spurline.hf import verify

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "theirs"
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=32,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
    )
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_model_comes_is_trained_and_goes(spurline, theirs, tmp_path):
    code, out, err = spurline("convert", "from-hf", str(theirs), "run", "--verify")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("DeepseekV3ForCausalLM as deepseek_v3, training settings of deepseek_v3_debugmodel: ")
    assert lines[1].startswith("verified: the logits differ from those of transformers by at most ")
    assert lines[2] == "run folder: run, tokenizer files: generation_config.json"

    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["job"]["dump_folder"] == "run"
    assert config["training"]["seq_len"] == 32  # no more than the model has learned
    assert config["checkpoint"]["enable"]

    text = tmp_path / "text.txt"
    text.write_text("a spur line is a side track that carries some of the traffic\n" * 60)
    options = ["--training.steps", "2", "--training.threads", "1", "--metrics.sample_tokens", "0"]
    train = ("train", "--config-file", "run/config.json", "--data.path", str(text), "--job.dump_folder", "tuned")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert spurline(*train, *options).code == 0
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    metrics = [json.loads(line) for line in (tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in metrics] == [1, 2]

    code, out, err = spurline("convert", "to-hf", "tuned", "back", "--verify", "--dtype", "bfloat16")
    assert (code, err) == (0, "")
    assert out.splitlines()[0].startswith("DeepseekV3ForCausalLM, step 2: ")
    assert out.splitlines()[1].startswith("verified: ")
    code, out, _ = spurline("convert", "to-hf", "run", "first", "--step", "0", "--max-shard-size", "20KB")
    assert (code, out.splitlines()[0].partition(":")[0]) == (0, "DeepseekV3ForCausalLM, step 0")
    assert len(list((tmp_path / "first").glob("model-*.safetensors"))) > 2


@pytest.mark.parametrize(
    "moe",
    [{"dispatcher": "capacity", "capacity_factor": 0.25}, {"dispatcher": "deep_ep", "experts_backend": "triton"}],
    ids=lambda moe: moe["dispatcher"],
)
def test_a_run_with_any_dispatcher_and_kernel_goes_on_any_machine(spurline, theirs, tmp_path, moe):
    assert spurline("convert", "from-hf", str(theirs), "run").code == 0
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    config["model"]["moe"].update(moe)
    path.write_text(json.dumps(config))
    code, out, err = spurline("convert", "to-hf", "run", "back", "--verify")
    assert (code, err) == (0, "")
    assert out.splitlines()[1].startswith("verified: ")


def test_training_starts_from_the_imported_weights(spurline, theirs, tmp_path):
    from spurline import config_io
    from spurline.config import Data
    from spurline.train.checkpoint.manager import CheckpointManager
    from spurline.train.position import Position
    from spurline.train.run import resume
    from spurline.train.trainer import make_trainer

    assert spurline("convert", "from-hf", str(theirs), "run", "--dtype", "float32").code == 0
    config = config_io.load(tmp_path / "run" / "config.json")[2]
    (tmp_path / "text.txt").write_text("side track " * 100)
    trainer = make_trainer(replace(config, data=Data(path="text.txt"), training=replace(config.training, threads=1)))
    assert resume(trainer, CheckpointManager("run", 1, 0)) == Position(step=0, tokens_seen=0)
    tokens_BL = torch.arange(32).view(2, 16)
    with torch.no_grad():
        expected_BLV = transformers.AutoModelForCausalLM.from_pretrained(theirs)(tokens_BL).logits
        torch.testing.assert_close(trainer.model.eval()(tokens_BL), expected_BLV, rtol=0, atol=1e-5)


def test_modules_that_predict_further_tokens_come_and_go(spurline, theirs, tmp_path):
    model = [
        "--model.num_mtp_layers",
        "1",
        "--model.num_layers",
        "2",
        "--model.dim",
        "32",
        "--model.moe.hidden_dim",
        "16",
    ]
    small = [
        "--training.steps",
        "1",
        "--training.seq_len",
        "16",
        "--training.threads",
        "1",
        "--metrics.sample_tokens",
        "0",
    ]
    options = ["--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel", "--checkpoint.enable", *model, *small]
    assert spurline("train", *options, "--job.dump_folder", "run").code == 0
    assert spurline("convert", "to-hf", "run", "theirs").code == 0
    assert spurline("convert", "from-hf", "theirs", "again", "--mtp").code == 0
    assert spurline("convert", "to-hf", "again", "back").code == 0
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("theirs", "back")]
    assert weights[0] == weights[1]
    assert b"model.layers.2.eh_proj.weight" in weights[0]

    code, out, _ = spurline("convert", "from-hf", "theirs", "without")
    assert code == 0
    assert "a head that predicts further tokens" in out
    assert json.loads((tmp_path / "without" / "config.json").read_text())["model"]["num_mtp_layers"] == 0
    code, out, err = spurline("convert", "from-hf", str(theirs), "none", "--mtp")
    assert (code, out) == (2, "")
    assert "eh_proj" in err or "num_nextn_predict_layers" in err


def test_a_wrong_conversion_is_found_and_nothing_stays(spurline, theirs, tmp_path, monkeypatch):
    ours = verify._our_model

    def spoiled(*args):
        model = ours(*args)
        w1_EFD = model.layers["1"].moe.experts.w1_EFD
        w1_EFD.copy_(w1_EFD.flip(0))
        return model

    monkeypatch.setattr(verify, "_our_model", spoiled)
    code, out, err = spurline("convert", "from-hf", str(theirs), "run", "--verify")
    assert (code, out) == (2, "")
    assert err.startswith("spurline convert from-hf: the logits differ from those of transformers by up to ")
    assert list(tmp_path.iterdir()) == []


def test_problems_are_told_a_line_each(spurline, theirs, tmp_path):
    code, out, err = spurline("convert", "from-hf", str(theirs), "--dtype", "int8", "--verfy")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "spurline convert from-hf: 3 problems",
        "  --dtype: 'int8' is not one of keep, float32, bfloat16",
        "  --verfy: no such option. Did you mean --verify?",
        f"  expected two folders, PATH and OUT, got {theirs}",
    ]
    assert spurline("convert", "to-hf", "a", "b", "--max_shard_size", "big").err == (
        "spurline convert to-hf: --max_shard_size: 'big' is not a size such as 5GB or 500MB\n"
    )
    assert "a/config.json: can't read the config file" in spurline("convert", "to-hf", "a", "b").err
    assert spurline("convert", "form-hf").err.startswith(
        "spurline convert: there is no 'form-hf'. Did you mean from-hf?"
    )


def test_folders_may_stand_anywhere(spurline, theirs, tmp_path):
    assert spurline("convert", "from-hf", "--verify", str(theirs), "run").code == 0
    assert spurline("convert", "to-hf", "run", "--dtype", "float32", "back").code == 0
    assert (tmp_path / "back" / "config.json").exists()


def test_an_interrupted_command_says_so(spurline, theirs, tmp_path, monkeypatch):
    from spurline.hf.safetensors_file import Stored

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Stored, "read_into", interrupt)
    code, _, err = spurline("convert", "from-hf", str(theirs), "run")
    assert (code, err) == (130, "spurline convert from-hf: interrupted, nothing was written\n")
    assert list(tmp_path.iterdir()) == []


def test_help_explains_both_directions(spurline):
    assert "from-hf PATH OUT" in spurline("convert", "--help").out
    out = spurline("convert", "from-hf", "--help").out
    assert "spurline convert from-hf PATH OUT" in out
    assert "--step" not in out
    assert "--max_shard_size SIZE" in spurline("convert", "to-hf", "--help").out
