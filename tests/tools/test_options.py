import json
import os
from dataclasses import replace

import pytest

from spurline.config import Profile, RunConfig
from spurline.config_io import ConfigError, save
from spurline.models import family_configs, family_names
from spurline.models.deepseek_v3.configs import deepseek_v3_debugmodel
from spurline.tools.options import folder_problems, resolve

PRESET = ["--module", "deepseek_v3", "--config", "deepseek_v3_debugmodel"]
FOLDER = "outputs/deepseek_v3_debugmodel"


@pytest.fixture(autouse=True)
def _alone_in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def resolved(*options: str) -> RunConfig:
    return resolve([*PRESET, *options]).run_config


def test_preset_is_taken_as_it_is_but_for_the_folder():
    command = resolve(PRESET)
    assert (command.module, command.config, command.dry_run) == ("deepseek_v3", "deepseek_v3_debugmodel", False)
    preset = deepseek_v3_debugmodel()
    assert command.run_config == replace(preset, job=replace(preset.job, runs_folder=FOLDER))


def test_options_change_the_preset():
    config = resolved("--training.seq_len", "64", "--model.moe.top-k=3", "--lr-scheduler.warmup-steps", "2")
    assert (config.training.seq_len, config.model.moe.top_k, config.lr_scheduler.warmup_steps) == (64, 3, 2)
    assert config.training.steps == deepseek_v3_debugmodel().training.steps


def test_flags_switch_on_and_off():
    assert resolved("--compile.enable").compile.enable
    assert resolved("--model.moe.route_norm").model.moe.route_norm
    assert not resolved("--model.moe.no_route_norm").model.moe.route_norm
    assert not resolved("--model.moe.no-route-norm").model.moe.route_norm


def test_name_of_a_section_switches_it_on():
    assert resolved("--profile", "--profile.steps", "2").profile == Profile(enable=True, steps=2)
    config = resolved("--compile", "--checkpoint")
    assert config.compile.enable
    assert config.checkpoint.enable
    assert not config.profile.enable


def test_family_follows_from_the_preset():
    assert resolve(["--config", "qwen3_debugmodel_moe"]).module == "qwen3"
    with pytest.raises(
        ConfigError, match=r"there is no preset 'qwen3_debugmodel_mo'\. Did you mean qwen3_debugmodel_moe"
    ):
        resolve(["--config", "qwen3_debugmodel_mo"])


def complaints(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        resolve([*argv])
    return raised.value.problems


def test_preset_without_its_option_is_taken_for_it_in_what_else_is_reported():
    preset = "deepseek_v3_debugmodel"
    typed = f"unexpected argument {preset!r}: did you mean --config {preset}?"
    assert complaints(preset) == [typed]
    assert complaints(preset, "--model.moe.topk", "3") == [
        typed,
        "--model.moe.topk: no such option. Did you mean --model.moe.top_k?",
    ]
    assert complaints(preset, "--config", preset) == [
        f"unexpected argument {preset!r}: options have the form --section.option value"
    ]


@pytest.mark.parametrize("option", ["--config", "--config-file"])
def test_option_without_its_preset_is_not_also_missing(option):
    assert complaints(option) == [f"{option}: needs a value, text"]
    assert complaints("--module", "deepseek_v4", option)[0].startswith("--module: there is no 'deepseek_v4'.")


def test_rules_of_a_preset_can_be_dropped_but_not_by_accident():
    preset = ["--config", "deepseek_v3_first", "--optimizer.groups"]
    assert family_configs("deepseek_v3")["deepseek_v3_first"]().optimizer.groups
    assert resolve([*preset, ""]).run_config.optimizer.groups == ()
    assert complaints(*preset) == ['--optimizer.groups: needs a value, a list ("" for none)']


def test_short_names_of_dtypes():
    assert resolved("--training.dtype", "bf16").training.dtype == "bfloat16"
    assert resolved("--optimizer.ns_dtype=fp32").optimizer.ns_dtype == "float32"
    assert resolved("--metrics.sample_prompt", "bf16").metrics.sample_prompt == "bf16"
    with pytest.raises(ConfigError, match="'fp16' is not one of float32, bfloat16"):
        resolved("--training.dtype", "fp16")


def test_option_without_its_section_is_looked_for_in_the_common_ones_first():
    with pytest.raises(ConfigError, match=r"--steps: no such option. Did you mean --training\.steps\?"):
        resolved("--steps", "3")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.yaml", "config: deepseek_v3_debugmodel\ntraining:\n  steps: 7\nmodel:\n  moe: {top_k: 2}\n"),
        ("run.json", '{"config": "deepseek_v3_debugmodel", "training": {"steps": 7}, "model": {"moe": {"top_k": 2}}}'),
    ],
)
def test_config_file_of_ones_own_changes_the_preset(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    command = resolve(["--config-file", str(tmp_path / name), "--training.seq_len", "32"])
    expected = resolved("--training.steps", "7", "--model.moe.top_k", "2", "--training.seq_len", "32")
    assert (command.module, command.run_config) == ("deepseek_v3", expected)


@pytest.mark.parametrize(("content", "given"), [("", PRESET), ("", PRESET[2:]), (f"config: {PRESET[3]}", PRESET[:2])])
def test_config_file_may_leave_the_preset_to_the_command_line(tmp_path, content, given):
    (tmp_path / "run.yaml").write_text(f"training: {{steps: 7}}\n{content}\n")
    command = resolve([*given, "--config-file", "run.yaml"])
    assert (command.module, command.config, command.run_config.training.steps) == (PRESET[1], PRESET[3], 7)
    assert command.run_config == resolved("--training.steps", "7")


def test_numbers_and_dtypes_of_a_config_file_are_written_as_on_the_command_line(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "training: {dtype: bf16, max_grad_norm: 1E+0}\noptimizer: {lr: 1e-3, eps: .1e-7}\njob: {dump_folder: 1e-3run}\n"
    )
    config = resolve([*PRESET, "--config-file", "run.yaml"]).run_config
    assert (config.optimizer.lr, config.optimizer.eps, config.training.max_grad_norm) == (1e-3, 1e-8, 1.0)
    assert (config.training.dtype, config.job.dump_folder) == ("bfloat16", "1e-3run")
    (tmp_path / "run.json").write_text('{"training": {"dtype": "bf16"}}')
    assert resolve([*PRESET, "--config-file", "run.json"]).run_config.training.dtype == "bfloat16"


def test_preset_for_a_config_file_is_checked_and_not_another_one(tmp_path):
    (tmp_path / "run.yaml").write_text("training: {steps: 7}\n")
    told = "--config: there is no preset 'deepseek_v3_debugmode'. Did you mean deepseek_v3_debugmodel?"
    assert complaints("--config", "deepseek_v3_debugmode", "--config-file", "run.yaml")[0].startswith(told)
    assert complaints("--config-file", "run.yaml")[0].startswith("run.yaml: config is missing: `spurline configs`")
    (tmp_path / "run.yaml").write_text("config: qwen3_debugmodel_moe\n")
    has = "run.yaml has config qwen3_debugmodel_moe; omit --config"
    assert f"--config deepseek_v3_debugmodel: {has}" in complaints(*PRESET[2:], "--config-file", "run.yaml")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("a: [1", "not YAML: expected ',' or ']', but got '<stream end>' at line 1, column 6"),
        ("a: &x [1]\nb: *x", "it has aliases"),
        ("!!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("- 1", "must be an object of sections, got [1]"),
        ("config: 2020-01-01", "values must be those of JSON"),
        ("a: " + "[" * 100 + "]" * 100, "values must be those of JSON"),
        ("\x00", "not YAML: the file is not text"),
        ("config: [1]", "config: there is no preset [1]"),
        (
            "config: deepseek_v3_debugmodel\ntraining: {stepz: 7}",
            "training.stepz: no such option. Did you mean training.st",
        ),
        ("config: deepseek_v3_debugmodel\ntraining: 7", "training: 7 is not a section"),
    ],
)
def test_config_file_that_is_wrong_is_one_line(tmp_path, content, problem):
    (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(ConfigError) as raised:
        resolve(["--config-file", str(tmp_path / "run.yaml")])
    assert len(raised.value.problems) == 1
    assert problem in raised.value.problems[0]


@pytest.mark.parametrize("dry_run", ["--dry-run", "--dry_run"])
def test_dry_run_with_hyphen_or_underscore(dry_run):
    assert resolve([*PRESET, dry_run]).dry_run


@pytest.mark.parametrize("folder", ["here", "a/b/c"])
def test_folder_that_was_asked_for_is_kept(folder):
    assert resolved("--job.dump_folder", folder).job.dump_folder == folder


def test_empty_folder_means_the_default_one():
    assert resolved("--job.dump_folder=").job == resolved().job
    assert resolved().job.runs_folder == FOLDER
    assert resolved("--job.runs_folder", "mine").job.runs_folder == "mine"


@pytest.fixture
def earlier_run(tmp_path):
    """outputs/deepseek_v3_debugmodel/0001: a run with seed 7 and a checkpoint."""
    run = tmp_path / FOLDER / "0001"
    (run / "checkpoints" / "step-00000004").mkdir(parents=True)
    (run / "checkpoints" / "step-00000004" / "checkpoint.json").write_text("{}")
    config = resolved("--training.seed", "7", "--checkpoint.enable")
    job = replace(config.job, dump_folder=f"{FOLDER}/0001", overwrite=True)
    save(run / "config.json", "deepseek_v3", "deepseek_v3_debugmodel", replace(config, job=job))
    return run


@pytest.mark.parametrize("name", ["0001/config.json", "0001", "latest/config.json", "config.json", ""])
def test_config_file_of_a_run_begins_one_with_a_folder_of_its_own(earlier_run, name):
    os.symlink("0001", earlier_run.with_name("latest"))
    config = resolve(["--config-file", f"{FOLDER}/{name}"]).run_config
    assert config.training.seed == 7
    assert (config.job.dump_folder, config.job.runs_folder, config.job.overwrite) == ("", FOLDER, False)


def test_config_file_of_ones_own_may_name_the_folder(tmp_path):
    (tmp_path / "mine.yaml").write_text("config: deepseek_v3_debugmodel\njob: {dump_folder: my_run}\n")
    assert resolve(["--config-file", "mine.yaml"]).run_config.job.dump_folder == "my_run"


def test_run_is_resumed_with_its_own_options_or_with_those_of_the_command(earlier_run):
    for name in (FOLDER, f"{FOLDER}/0001"):
        config = resolve(["--job.resume", name, "--training.steps", "9"]).run_config
        assert (config.training.seed, config.training.steps) == (7, 9)
        assert (config.job.dump_folder, config.job.overwrite) == (f"{FOLDER}/0001", False)
    config = resolved("--job.resume", "latest", "--checkpoint.enable")
    assert (config.training.seed, config.job.dump_folder) == (0, f"{FOLDER}/0001")


def test_run_that_can_not_be_resumed_is_one_line(problems, earlier_run):
    on = "--checkpoint.enable"
    assert problems("--job.resume", "latest", on, "--job.runs_folder", "none") == [
        "job.resume latest: there is no run in none"
    ]
    assert problems("--job.resume", FOLDER, on, "--job.dump_folder", "other") == [
        f"job.resume {FOLDER} and job.dump_folder other are two folders: give one of the two"
    ]
    (earlier_run / "checkpoints" / "step-00000004" / "checkpoint.json").unlink()
    assert problems("--job.resume", FOLDER, on) == [f"job.resume {FOLDER}: {FOLDER}/0001 has no complete checkpoint"]
    assert problems("--job.resume", FOLDER, "--checkpoint.no_enable") == ["job.resume needs checkpoint.enable"]


def test_all_problems_are_told_together(problems):
    assert problems(
        *("--training.stepz", "10", "--training.seq_len", "abc", "--training.dtype", "int8", "--seed", "1"),
        *("--model.moe.top_k", "9", "--optimizer.lr", "nan", "--training.local_batch_size", "0"),
        *("--data.path", "/does/not/exist", "--training.max_grad_norm"),
    ) == [
        "--training.stepz: no such option. Did you mean --training.steps?",
        "--training.seq_len: 'abc' is not an integer",
        "--training.dtype: 'int8' is not one of float32, bfloat16",
        "--seed: no such option. Did you mean --training.seed?",
        "--training.max_grad_norm: needs a value, a number",
        "training.local_batch_size must be at least 1, got 0",
        "optimizer.lr must be a finite number, got nan",
        *resolve_problems("--model.moe.top_k", "9"),
        *resolve_problems("--data.path", "/does/not/exist"),
    ]


def resolve_problems(*options: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        resolve([*PRESET, *options])
    return error.value.problems


def test_too_many_experts_a_token(problems):
    (problem,) = problems("--model.moe.top_k", "9")
    assert problem.startswith("model.moe.top_k 9 is larger than num_experts 8")


def test_groups_that_do_not_divide_the_experts(problems):
    assert problems("--model.moe.num_groups", "3") == ["model.moe.num_groups 3 does not divide num_experts 8"]


def test_missing_data_path(problems):
    (problem,) = problems("--data.path", "/does/not/exist")
    assert problem.startswith("data.path")
    assert "/does/not/exist" in problem


def test_data_folder_without_a_file(problems, tmp_path):
    (tmp_path / "nothing").mkdir()
    (problem,) = problems("--data.path", "nothing")
    assert problem.startswith("data.")


def test_run_folder_below_a_file(problems, tmp_path):
    (tmp_path / "file").write_text("")
    below = f"job.dump_folder file/run: {tmp_path / 'file'} is a file, not a folder"
    assert problems("--job.dump_folder", "file/run") == [below]
    assert problems("--job.dump_folder", "file") == [below.replace("file/run", "file")]


def test_run_folder_without_permission(problems, monkeypatch, tmp_path):
    monkeypatch.setattr(
        os, "access", lambda path, mode: str(path) != str(tmp_path / "locked")
    )  # root may write anywhere
    (tmp_path / "locked").mkdir()
    expected = f"job.dump_folder locked/run: no permission to write to {tmp_path / 'locked'}"
    assert problems("--job.dump_folder", "locked/run") == [expected]


def test_checkpoints_without_permission_are_known_before_the_run_starts(problems, monkeypatch, tmp_path):
    locked = tmp_path / "run" / "checkpoints"
    locked.mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(locked))
    expected = f"job.dump_folder run/checkpoints: no permission to write to {locked}"
    assert problems("--job.dump_folder", "run", "--checkpoint.enable") == [expected]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder_is_seen(tmp_path):
    tmp_path.chmod(0o555)
    assert len(folder_problems(str(tmp_path / "run"))) == 1


def test_nothing_given_says_what_is_missing(spurline):
    code, out, err = spurline("train")
    assert (code, out) == (2, "")
    assert err == "spurline train: --config is missing: `spurline configs` lists the presets\n"


def test_missing_config_lists_the_familys(spurline):
    listed = ", ".join(sorted(family_configs("deepseek_v3")))
    expected = f"spurline train: --config is missing. Choose from: {listed}\n"
    assert spurline("train", "--module", "deepseek_v3") == (2, "", expected)


def test_unknown_module_suggests_and_other_problems_are_told_too(spurline):
    code, _, err = spurline(
        "train", "--module", "deepsek_v3", "--config", "c", "--training.steps", "x", "--model.dim", "4"
    )
    assert code == 2
    assert err.splitlines() == [
        "spurline train: 2 problems",
        f"  --module: there is no 'deepsek_v3'. Did you mean deepseek_v3? Choose from: {', '.join(family_names())}",
        "  --training.steps: 'x' is not an integer",
    ]


def test_unknown_config_suggests(spurline):
    code, _, err = spurline("train", "--module", "deepseek_v3", "--config", "deepseek_v3_debug")
    assert code == 2
    assert "--config: there is no 'deepseek_v3_debug'. Did you mean deepseek_v3_debugmodel?" in err


def test_general_help_needs_no_preset(spurline):
    code, out, err = spurline("train", "--help")
    assert (code, err) == (0, "")
    assert "spurline train --module M --config C --help" in out
    assert "--training.seq_len INT" in out
    assert "outputs/<config>" in out
    assert "--model.dim" not in out
    order = [out.index(f"{name} options") for name in ("training", "parallelism", "debug")]
    assert order == sorted(order)


def test_help_of_a_preset_shows_its_values(train, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = train("--help")
    assert code == 0
    assert "Defaults below are those of the preset deepseek_v3_debugmodel" in out
    assert f"(default: {deepseek_v3_debugmodel().training.steps})" in out
    assert "--model.moe.top_k INT" in out
    assert out.index("training options") < out.index("model options")
    assert max(map(len, out.splitlines())) <= 80


def test_help_of_an_unknown_preset_is_an_error(spurline):
    code, out, err = spurline("train", "--module", "deepseek_v3", "--config", "nope", "--help")
    assert (code, out) == (2, "")
    assert "--config: there is no 'nope'" in err


@pytest.fixture
def file():
    save("run.json", "deepseek_v3", "deepseek_v3_debugmodel", resolved("--training.steps", "7", "--compile.enable"))
    return "run.json"


def test_file_gives_the_run_back(file):
    command = resolve(["--config-file", file])
    assert (command.module, command.config) == ("deepseek_v3", "deepseek_v3_debugmodel")
    assert command.run_config == resolved("--training.steps", "7", "--compile.enable")


def test_options_apply_on_top_of_a_file(file):
    config = resolve(["--config-file", file, "--training.seed", "5", "--compile.no_enable"]).run_config
    assert (config.training.steps, config.training.seed, config.compile.enable) == (7, 5, False)


def test_file_may_be_named_with_its_own_module_and_config(file):
    assert resolve([*PRESET, "--config-file", file]).run_config.training.steps == 7


def test_file_of_another_preset_is_refused(file, spurline):
    code, _, err = spurline("train", "--config-file", file, "--module", "llama", "--config", "c")
    assert code == 2
    assert err.splitlines()[1:] == [
        "  --module llama: run.json has module deepseek_v3; omit --module",
        "  --config c: run.json has config deepseek_v3_debugmodel; omit --config",
    ]


def test_problems_of_the_file_and_of_the_options_are_told_together(file, spurline, tmp_path):
    content = json.loads((tmp_path / file).read_text())
    content["training"]["steps"] = "many"
    (tmp_path / file).write_text(json.dumps(content))
    code, _, err = spurline("train", "--config-file", file, "--training.seed", "x")
    assert code == 2
    assert err.splitlines()[1:] == [
        '  run.json: training.steps: "many" is not an integer',
        "  --training.seed: 'x' is not an integer",
    ]


def test_help_on_a_file_shows_its_values(file, spurline):
    code, out, _ = spurline("train", "--config-file", file, "--help")
    assert code == 0
    assert "those of run.json" in out
    assert "(default: 7)" in out


def test_world_size_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert resolved("--parallelism.expert_parallel_degree", "4").parallelism.expert_parallel_degree == 4
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(resolve_problems("--parallelism.expert_parallel_degree", "4")) == 1


def test_degrees_that_one_rank_can_not_have_name_what_can(problems):
    assert problems("--parallelism.tensor_parallel_degree", "2") == [
        "parallelism: data_parallel_replicate_degree 1 x tensor_parallel_degree 2 = 2 must divide the number of ranks,"
        " but there is 1 rank; nearest that works: --parallelism.tensor_parallel_degree 1, or the same degrees on 2"
        " ranks (torchrun starts them)"
    ]


def test_degrees_are_held_against_the_model_its_sequences_and_its_batch(problems, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    told = problems(
        *("--parallelism.tensor_parallel_degree", "8", "--parallelism.expert_parallel_degree", "16"),
        *("--parallelism.expert_tensor_parallel_degree", "3", "--model.moe.top_k", "9"),
        *("--training.seq_len", "4", "--training.global_batch_size", "4"),
    )
    assert [line.split(" ")[0] for line in told] == [
        "model.moe.top_k",
        "parallelism:",
        "training.seq_len",
        "parallelism.tensor_parallel_degree",
        "parallelism.expert_parallel_degree",
        "parallelism.expert_tensor_parallel_degree",
        "training.global_batch_size",
    ]


def test_degrees_are_checked_for_a_model_that_is_not_known(spurline, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, _, err = spurline("train", "--parallelism.tensor_parallel_degree", "3")
    assert code == 2
    assert "tensor_parallel_degree 3 = 3 must divide the number of ranks, but there are 4 ranks" in err


def test_invalid_degree_is_told_without_arithmetic(problems):
    assert problems("--parallelism.tensor_parallel_degree", "0") == [
        "parallelism.tensor_parallel_degree must be positive, got 0"
    ]
