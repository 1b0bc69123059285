"""`spurline launch`: which options are whose, and what is said of bad ones before any rank starts."""

import math
import os
from pathlib import Path

import pytest

from spurline.launch.options import seconds_of
from spurline.tools import launch
from spurline.tools.launch import split_command

CONFIG = ["--config", "deepseek_v3_debugmodel"]


@pytest.fixture
def started(monkeypatch):
    """What would be started, in the place of starting it."""
    calls = []
    monkeypatch.setattr(launch, "run", lambda options, command, train: calls.append((options, train)) or 0)
    return calls


def test_options_after_the_dashes_are_those_of_train(spurline, started):
    assert spurline("launch", "--ranks", "2", "--", *CONFIG, "--training.steps", "3") == (0, "", "")
    ((options, train),) = started
    assert (options.ranks, options.nodes, train) == (2, range(1, 2), [*CONFIG, "--training.steps", "3"])
    assert "WORLD_SIZE" not in os.environ


def test_options_of_train_are_known_without_dashes():
    own, train = split_command(["--ranks=2", *CONFIG, "--training.steps", "3", "--nnodes", "1"])
    assert own == ["--ranks=2", "--nnodes", "1"]
    assert train == [*CONFIG, "--training.steps", "3"]


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--partitions gpu", "--partition"),
        ("--rank 2", "--ranks"),
        ("--rdzv-endpoints a:1", "--rdzv_endpoint"),
        ("--slrum", "--slurm"),
    ],
)
def test_misspelled_option_is_that_of_the_launcher_without_dashes_too(spurline, started, option, told):
    line = f"spurline launch: {option.split()[0]}: no such option. Did you mean {told}?\n"
    assert spurline("launch", *CONFIG, *option.split(), "--training.steps", "3") == (2, "", line)
    assert not started


def test_misspelled_option_of_train_is_not_taken_for_one_of_the_launcher():
    train = ["--conifg", "a", "--interval", "3", "--compile", "--dry-run", "--traning.ranks", "2"]
    assert split_command([*train]) == ([], train)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--ranks -1", "--ranks must be a number of ranks, got -1"),
        ("--ranks two", "--ranks: 'two' is not an integer"),
        ("--rank 2", "--rank: no such option. Did you mean --ranks?"),
        ("--nnodes 0", "--nnodes must be a number, or a range such as 62:64, got '0'"),
        ("--nnodes 4:2", "--nnodes 4:2: the smaller number comes first"),
        ("--nnodes 2", "--nnodes 2 needs --rdzv_endpoint HOST:PORT, where HOST is one of the nodes"),
        ("--nnodes 2 --rdzv_endpoint a:b:c", "--rdzv_endpoint must be HOST:PORT, got 'a:b:c'"),
        ("--nnodes 2 --rdzv_endpoint node-0:70000", "--rdzv_endpoint must be HOST:PORT, got 'node-0:70000'"),
        ("--restarts -1", "--restarts must not be negative, got -1"),
        ("--join_timeout 0", "--join_timeout must be positive, got 0"),
        ("--log_rank all", "--log_rank must be numbers of ranks such as 0,1, got 'all'"),
        ("--slurm", "--slurm needs --ranks, the number of ranks on each node"),
        ("--slurm --torchrun --ranks 2", "--slurm and --torchrun: choose one"),
        ("--print", "--print and --out are for --slurm, --kubernetes and --torchrun"),
        ("--ranks 2 --time 1:00", "--time is for --slurm"),
        ("--slurm --ranks 2 --image a", "--image is for --kubernetes"),
        ("--slurm --ranks 2 --name a/b", "--name 'a/b': letters, digits, and - _ . between them"),
        ("--slurm --ranks 2 --sbatch=--qos=\"high", '--sbatch --qos="high: no closing quotation'),
        ("--slurm --ranks 2 --time banana",
         "--time must be a time limit of Slurm, such as 24:00:00 or 2-12:00:00, got 'banana'"),
        ("--slurm --ranks 2 --time 2", "--notice 120 is not shorter than --time 2: nothing would be trained"),
        ("--kubernetes --ranks 2 --image a", "--kubernetes needs --volume"),
        ("--kubernetes --ranks 2 --image a --volume b", "--volume must be CLAIM:/PATH, got 'b'"),
        ("--kubernetes --ranks 2 --image a --volume b:/c --name 8b",
         "--name 8b: pods would be named 8b-node-0-0, which must begin with a letter and have 63 letters at most"),
        ("--env A", "--env: 'A' is not NAME=VALUE"),
        ("--env A,B=c", "--env: 'A' is not NAME=VALUE"),
    ],
)  # fmt: skip
def test_bad_options_are_one_line(spurline, started, options, told):
    assert spurline("launch", *options.split(), "--", *CONFIG) == (2, "", f"spurline launch: {told}\n")
    assert not started


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 5400), ("1:30", 90), ("24:00:00", 86400), ("2-12", 216000), ("1-0:30", 88200), ("1-0:0:5", 86405),
        ("UNLIMITED", math.inf), ("0", math.inf), ("1:2:3:4", None), ("-1", None), ("1d", None), ("", None),
    ],
)  # fmt: skip
def test_time_limits_are_those_of_slurm(limit, seconds):
    assert seconds_of(limit) == seconds


def test_options_of_the_run_are_checked_for_all_ranks_of_all_nodes(spurline, started):
    nodes = ["--ranks", "2", "--nnodes", "2", "--rdzv_endpoint", "node-0:29500"]
    tp = "--parallelism.tensor_parallel_degree"
    code, out, err = spurline("launch", *nodes, "--", *CONFIG, tp, "3")
    assert (code, out) == (2, "")
    assert "must divide the number of ranks, but there are 4 ranks" in err
    assert spurline("launch", *nodes, "--", *CONFIG, tp, "4").code == 0


def test_each_number_of_nodes_of_a_range_must_do(spurline, started):
    nodes = ["--ranks", "2", "--nnodes", "1:4", "--rdzv_endpoint", "node-0:29500"]
    few = ["--parallelism.data_parallel_replicate_degree", "4"]
    code, out, err = spurline("launch", *nodes, "--", *CONFIG, *few)
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert lines[0] == "spurline launch: 2 problems"
    assert lines[1].startswith("  --nnodes 1:4, with 1 nodes: ")
    assert lines[2].startswith("  --nnodes 1:4, with 3 nodes: ")
    assert not started


def test_script_is_written_once_and_says_how_to_submit_it(spurline, started, tmp_path):
    command = ["launch", "--slurm", "--ranks", "2", "--", *CONFIG]
    name = "deepseek_v3_debugmodel.sbatch"
    assert spurline(*command) == (0, f"wrote {name}; start it with: sbatch {name}\n", "")
    (tmp_path / name).write_text("mine")
    line = f"spurline launch: {name} exists: choose another file with --out, or remove it\n"
    assert spurline(*command) == (2, "", line)
    assert (tmp_path / name).read_text() == "mine"
    assert not started


def test_job_for_a_cluster_needs_checkpoints(spurline, tmp_path):
    command = ["launch", "--slurm", "--ranks", "2", "--"]
    line = "spurline launch: --slurm needs checkpoints, to continue after a restart: "
    off = spurline(*command, *CONFIG, "--checkpoint.no_enable")
    assert off == (2, "", f"{line}leave out --checkpoint.no_enable\n")
    assert list(tmp_path.iterdir()) == []
    file = tmp_path / "config.yaml"
    file.write_text("module: deepseek_v3\nconfig: deepseek_v3_debugmodel\ncheckpoint:\n  enable: false\n")
    assert spurline(*command, "--config-file", str(file)) == (2, "", f"{line}add --checkpoint.enable\n")


@pytest.mark.parametrize("target", ["--slurm", "--torchrun", "--kubernetes --image a --volume b:/c"])
def test_job_that_is_started_again_does_not_overwrite_its_own_run(spurline, tmp_path, target):
    code, out, err = spurline("launch", *target.split(), "--ranks", "1", "--", *CONFIG, "--job.overwrite")
    assert (code, out) == (2, "")
    told = f"spurline launch: {target.split()[0]}: each restart would remove the progress: leave out --job."
    assert err.startswith(told)
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", ["--slurm", "--torchrun", "--kubernetes --image a --volume b:/c"])
def test_job_that_resumes_a_run_has_its_folder(spurline, monkeypatch, target):
    texts = []
    for module, name in (("slurm", "sbatch_script"), ("kubernetes", "manifest"), ("torchrun", "torchrun_script")):
        monkeypatch.setattr(f"spurline.launch.{module}.{name}", lambda job, file: texts.append(job) or "")
    monkeypatch.setattr("spurline.tools.options.resume_problems", lambda config: [])
    command = ["launch", *target.split(), "--print", "--ranks", "1", "--", *CONFIG, "--job.resume"]
    assert spurline(*command, "outputs/a/0001") == (0, "", "")
    assert (texts[0].run_folder, texts[0].train) == ("outputs/a/0001", [*CONFIG, "--job.resume", "outputs/a/0001"])
    Path("outputs/a/0001").mkdir(parents=True)
    line = "spurline launch: --job.resume outputs/a may be another run at a restart: use --job.resume outputs/a/0001\n"
    assert spurline(*command, "outputs/a") == (2, "", line)


def test_job_for_a_cluster_is_checked_like_a_run(spurline, tmp_path):
    """Slurm's nodes have the disks of this machine, pods don't."""
    bad = ["--data.path", "/nowhere", "--parallelism.tensor_parallel_degree", "3"]
    slurm = spurline("launch", "--slurm", "--ranks", "2", "--", *CONFIG, *bad)
    pods = ["--kubernetes", "--image", "a", "--volume", "b:/c"]
    kubernetes = spurline("launch", *pods, "--ranks", "2", "--", *CONFIG, *bad)
    assert slurm.code == kubernetes.code == 2
    assert "/nowhere" in slurm.err
    assert "/nowhere" not in kubernetes.err
    for found in (slurm, kubernetes):
        assert "must divide the number of ranks, but there are 2 ranks" in found.err
    assert list(tmp_path.iterdir()) == []


def test_help_of_either_command_starts_nothing(spurline, started):
    own = spurline("launch", "--help")
    assert own.code == 0
    assert "usage: spurline launch" in own.out
    assert "--rdzv_endpoint" in own.out
    train = spurline("launch", "--", "--help")
    assert (train.code, "usage: spurline train" in train.out) == (0, True)
    assert not started
