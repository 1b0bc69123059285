"""`spurline generate`: from a run folder to text, and what it refuses."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import version1_checkpoints as version1

from spurline import config_io
from spurline.config import Data, Parallelism, RunConfig, Training
from spurline.data.tokenizer import ByteTokenizer
from spurline.models.common import generate as generation
from spurline.models.common.generate import generate
from spurline.models.common.init import initialize
from spurline.models.common.sampling import GREEDY, Sampling
from spurline.parallel.world import joined_world
from spurline.testing import RankPool
from spurline.testing.tiny import tiny_model
from spurline.tools.generate import load_model
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.trainer import make_trainer

CONFIG = RunConfig(
    model=tiny_model(
        dim=32, num_layers=2, num_heads=2, v_head_dim=6, moe={"num_experts": 4}, vocab_size=264, q_lora_rank=0
    ),
    training=Training(seq_len=24, dtype="float32"),
)
BOUNDARY = ByteTokenizer.boundary_id


def built(seed: int, config: RunConfig[Any] = CONFIG) -> torch.nn.Module:
    model = config.model.build()
    initialize(model, seed)
    with torch.no_grad():
        model.output.weight.mul_(20)
        model.output.weight[BOUNDARY] *= 1.6  # a text ends now and then
    return model.eval()


def save_run(folder: Path, *steps: int, config: RunConfig[Any] = CONFIG) -> None:
    """A run whose weights at each step are those of that seed."""
    folder.mkdir()
    config_io.save(folder / "config.json", "deepseek_v3", "deepseek_v3_debugmodel", config)
    for step in steps:
        model = built(step, config)
        CheckpointManager(folder, 1, 0).save(step, model, torch.optim.AdamW(model.parameters()), {})


@pytest.fixture
def run(tmp_path: Path) -> str:
    save_run(tmp_path / "run", 3, 12)
    return str(tmp_path / "run")


def ids(prompt: str) -> list[int]:
    return [BOUNDARY, *prompt.encode()]


def continued(model: torch.nn.Module, prompt: str, num_tokens: int, sampling: Sampling = GREEDY, seed: int = 0) -> str:
    options = {"sampling": sampling, "seed": seed, "max_context": 24, "stop_id": BOUNDARY, "cached": False}
    return ByteTokenizer().decode(generate(model, [ids(prompt)], num_tokens, **options)[0])


def test_text_is_that_of_the_newest_checkpoint_or_of_the_step_asked_for(spurline, run):
    for step, options in ((12, []), (3, ["--step", "3"])):
        expected = continued(built(step), "def ", 12)
        assert expected
        code, out, err = spurline(
            "generate", run, "--prompt", "def ", "--temperature", "0", "--max-tokens", "12", *options
        )
        assert (code, out) == (0, generation.printable(f"def {expected}\n"))
        assert err.startswith("spurline generate: ")
        assert err.endswith(" tokens/s\n")


def test_every_prompt_of_a_file_is_answered_in_order_whatever_the_batches(spurline, run, tmp_path):
    prompts = ["def ", "x", "class A:", "i", "# naïve", "return x", "0"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n\n", encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    drawn = ["--top-k", "20", "--top-p", "0.9", "--temperature", "0.7", "--seed", "5", "--max-tokens", "40", "--json"]
    code, out, _ = spurline("generate", run, "--prompts-file", "prompts.txt", *drawn)
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [answer["prompt"] for answer in answers] == prompts
    sampling = Sampling(temperature=0.7, top_k=20, top_p=0.9)
    expected = [continued(built(12), prompt, 40, sampling, 5 + i) for i, prompt in enumerate(prompts)]
    assert [answer["text"] for answer in answers] == expected
    assert {answer["finish"] for answer in answers} == {"boundary", "max_tokens"}
    for answer in answers:
        assert (answer["tokens"] == 40) == (answer["finish"] == "max_tokens")
    for options in (["--batch-size", "1"], ["--batch-size", "3"], ["--no-cache"]):
        assert spurline("generate", run, "--prompts-file", "prompts.jsonl", *drawn, *options).out == out


def test_several_prompts_are_numbered(spurline, run):
    code, out, err = spurline("generate", run, "--prompt", "one", "--prompt", "two", "--max_tokens", "1", "--seed", "1")
    assert code == 0
    assert out.startswith("--- 1 of 2\none")
    assert "\n--- 2 of 2\ntwo" in out
    assert "2 tokens in" in err


def test_a_single_text_is_shown_as_it_comes_in_whole_characters_and_without_controls(spurline, run, monkeypatch):
    shown = []
    tokens = [*"né€\x1b[2J".encode(), 0xF0, 0x9F]
    monkeypatch.setattr(generation, "stream", lambda *args, **options: ([token] for token in tokens))
    monkeypatch.setattr("builtins.print", lambda *args, **options: shown.append((*args, options.get("flush"))))
    assert spurline("generate", run, "--prompt", "ü").code == 0
    *pieces, _ = [text for text, *_ in shown]
    assert pieces == ["ü", "n", "", "é", "", "", "€", "\ufffd", "[", "2", "J", "", "", "\ufffd\n"]
    assert all(flush for *_, flush in shown[:-1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loaded_model_computes_what_the_run_computed(tmp_path, dtype):
    config = replace(CONFIG, training=replace(CONFIG.training, dtype=dtype))
    save_run(tmp_path / "run", 1, config=config)
    model, expected = load_model(tmp_path / "run", config, step=None), built(1)
    expected.compute_dtype = getattr(torch, dtype)
    tokens_BL = torch.tensor([ids("while True:")])
    with torch.no_grad():
        assert model(tokens_BL).dtype == expected.compute_dtype
        assert torch.equal(model(tokens_BL), expected(tokens_BL))


def save_on_rank(rank: int, config: RunConfig[Any], folder: str) -> None:
    with (
        mock.patch.dict(os.environ, {"WORLD_SIZE": str(dist.get_world_size())}),
        joined_world(config.parallelism) as world,
    ):
        trainer = make_trainer(config, world)
        CheckpointManager(folder, 1, 0).save(1, trainer.model, trainer.optimizer, {})


@pytest.mark.parametrize("degrees", [{"tensor_parallel_degree": 2}, {"expert_parallel_degree": 2}], ids=str)
def test_checkpoint_of_a_sharded_run_is_loaded_on_one_process(ranks: RankPool, tmp_path, degrees):
    (tmp_path / "text.txt").write_text("a spur line is a side track that carries some of the traffic\n" * 40)
    config = replace(CONFIG, data=Data(path=str(tmp_path / "text.txt")), parallelism=Parallelism(**degrees))
    ranks.run(save_on_rank, 2, config, str(tmp_path / "run"))
    model, expected = load_model(tmp_path / "run", config, step=None), config.model.build()
    initialize(expected, config.training.seed)
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    "moe",
    [
        {"dispatcher": "capacity", "capacity_factor": 0.25},
        {"dispatcher": "deep_ep"},
        {"dispatcher": "hybrid_ep", "experts_backend": "triton"},
    ],
    ids=lambda moe: moe["dispatcher"],
)
def test_a_run_with_any_dispatcher_and_kernel_is_read_on_any_machine_and_in_any_batch(spurline, tmp_path, moe):
    save_run(tmp_path / "run", 3)
    config = replace(CONFIG, model=replace(CONFIG.model, moe=replace(CONFIG.model.moe, **moe)))
    config_io.save(tmp_path / "run" / "config.json", "deepseek_v3", "deepseek_v3_debugmodel", config)
    tokens_BL = torch.randint(264, (2, 24))
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "run", config, 3)(tokens_BL), built(3)(tokens_BL))
    prompts = ["--prompt", "def ", "--prompt", "x"]
    code, out, _ = spurline("generate", "run", *prompts, "--temperature", "0", "--max-tokens", "12", "--json")
    assert code == 0
    answers = {answer["prompt"]: answer["text"] for answer in map(json.loads, out.splitlines())}
    assert answers == {prompt: continued(built(3), prompt, 12) for prompt in ("def ", "x")}


X = ["--prompt", "x"]


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["nowhere", *X], "nowhere: no such folder"),
        (["empty", *X], "empty/config.json: can't read the config file: No such file or directory"),
        (
            ["untrained", *X],
            "untrained/checkpoints has no complete checkpoint: the run has not .*, or .* --checkpoint.no_enable",
        ),
        (["run", *X, "--step", "4"], "there is no complete checkpoint run/checkpoints/step-00000004; .*: 3, 12"),
        (["run"], "give either --prompt or --prompts_file"),
        (["run", *X, "--prompts-file", "a.txt"], "give either --prompt or --prompts_file"),
        (X, "expected one run folder first, as in spurline generate outputs/my_run --prompt TEXT"),
        (["run", "more", *X], "expected one run folder first, .*, got 'run' 'more'"),
        (["run", "--prompt", ""], "--prompt: the prompt is empty"),
        (
            ["run", "--prompt", "x" * 24],
            r"prompt 1 has 25 tokens .* context length of 24 \(training.seq_len\): shorten it",
        ),
        (["run", *X, "--top-p", "1.5"], "--top_p must be above 0 and at most 1, got 1.5"),
        (["run", *X, "--top-p", "nan"], "--top_p must be above 0 and at most 1, got nan"),
        (["run", *X, "--temperature", "-1"], "--temperature must be a number from 0 on, got -1.0"),
        (["run", *X, "--seed", f"{10**20}"], f"--seed must be between .* - 1, got {10**20}"),
        (["run", *X, "--max-tokens", "0"], "--max_tokens must be at least 1, got 0"),
        (["run", *X, "--batch-size", "0"], "--batch_size must be at least 1, got 0"),
        (["run", *X, "--top-k", "few"], "--top-k: 'few' is not an integer"),
        (["run", *X, "--import", "no_such_package"], "--import no_such_package: No module named 'no_such_package'"),
        (
            ["run", "--prompts-file", "missing.txt"],
            "--prompts_file missing.txt: can't read the file: No such file or directory",
        ),
        (["run", "--prompts-file", "empty"], "--prompts_file empty: can't read the file: Is a directory"),
        (["run", "--prompts-file", "blank.txt"], "--prompts_file blank.txt: the file has no prompts"),
        (["run", "--prompts-file", "bytes.txt"], "--prompts_file bytes.txt: not UTF-8 text"),
        (["run", "--prompts-file", "bad.jsonl"], "--prompts_file bad.jsonl, line 2: not JSON: Expecting .*"),
        (
            ["run", "--prompts-file", "other.jsonl"],
            '--prompts_file other.jsonl, line 1: not a JSON object with a "prompt" string',
        ),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_bad_input_is_one_clear_line(spurline, tmp_path, run, argv, complaint):
    (tmp_path / "empty").mkdir()
    save_run(tmp_path / "untrained")
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n{"prompt"\n')
    (tmp_path / "other.jsonl").write_text('{"text": "x"}\n')
    code, out, err = spurline("generate", *argv)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert re.fullmatch(f"spurline generate: {complaint}", line), line


@pytest.mark.parametrize(
    ("argv", "complaints"),
    [
        (["nowhere"], ["nowhere: no such folder", "give either --prompt or --prompts_file"]),
        (["nowhere", "--prompt"], ["--prompt: needs a value, text", "nowhere: no such folder"]),
        (
            ["nowhere", "--top-p", "2", "--prompts-file", "missing"],
            [
                "--top_p must be above 0 and at most 1, got 2.0",
                "nowhere: no such folder",
                "--prompts_file missing: can't read the file: No such file or directory",
            ],
        ),
    ],
)
def test_all_that_is_wrong_is_reported_together(spurline, argv, complaints):
    heading = f"spurline generate: {len(complaints)} problems"
    assert spurline("generate", *argv) == (2, "", "\n  ".join([heading, *complaints]) + "\n")


def test_tokenizer_that_the_model_has_no_room_for_is_refused(spurline, tmp_path):
    save_run(tmp_path / "run", config=replace(CONFIG, model=replace(CONFIG.model, vocab_size=256)))
    code, _, err = spurline("generate", "run", *X)
    assert (code, err) == (2, "spurline generate: the run's tokenizer has 257 tokens, but its model only 256\n")


def test_a_diverged_model_is_one_clear_line(spurline, tmp_path):
    save_run(tmp_path / "run")
    model = built(1)
    torch.nn.init.constant_(model.norm.weight, float("nan"))
    version1.save(tmp_path / "run", 1, model, torch.optim.AdamW(model.parameters()), {})
    code, _, err = spurline("generate", "run", *X)
    assert code == 2
    assert "step 1 is of a run that has diverged: model.norm.weight is not finite" in err
