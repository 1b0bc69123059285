"""Checkpoints behind a URL: written, verified, resumed from, with the same care as local ones."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from spurline.cli import main
from spurline.config import Job
from spurline.remote import RemotePath, is_remote
from spurline.testing import RankPool
from spurline.testing.run_result import REPEATABLE
from spurline.testing.tiny import tiny_run, write_words
from spurline.train.checkpoint.folder import CheckpointFolder
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.run import train

fsspec = pytest.importorskip("fsspec")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    write_words(tmp_path / "text")
    yield
    fsspec.filesystem("memory").store.clear()


def config_of(folder, where="memory://bucket/run", stop_after=0):
    return tiny_run(
        "text",
        job=Job(folder),
        checkpoint={"enable": True, "interval": 2, "folder": where},
        metrics={"validation_batches": 0, "sample_tokens": 0, "tensorboard": False},
        debug={"stop_after": stop_after},
    )


def start(config):
    return train("deepseek_v3", "deepseek_v3_debugmodel", config)


def repeatable(folder):
    lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in REPEATABLE if key in line} for line in lines]


def test_run_resumes_from_a_url_as_from_a_disk(capsys):
    start(config_of("local", ""))
    assert "are lost" not in capsys.readouterr().out
    start(config_of("run", stop_after=5))
    lost = "warning: checkpoints in memory://bucket/run are lost when this process ends"
    assert capsys.readouterr().out.count(lost) == 1
    assert sorted(RemotePath("memory://bucket/run").names()) == ["step-00000002", "step-00000004", "step-00000005"]
    start(config_of("run"))
    assert "resuming from the checkpoint of step 5" in capsys.readouterr().out
    assert repeatable("run") == repeatable("local")
    assert sorted(os.listdir()) == ["local", "run", "text"], "no folder with the name of a scheme"
    assert not Path("run/checkpoints").exists()
    assert sorted(RemotePath("memory://bucket/run").names()) == ["step-00000005", "step-00000006", "step-00000008"]

    names = {file.name for file in CheckpointFolder("run").record(8).files}
    here = CheckpointFolder("local")
    assert names == {file.name for file in here.record(8).files}
    for name in names:
        remote = RemotePath(f"memory://bucket/run/step-00000008/{name}")
        assert remote.read_range(0, remote.size()) == (Path("local/checkpoints/step-00000008") / name).read_bytes()
    assert main(["checkpoint", "verify", "run"]) == 0
    assert main(["generate", "run", "--prompt", "a", "--max_tokens", "3"]) == 0


def test_folder_that_does_not_exist_yet_is_created(tmp_path):
    start(config_of("run", f"file://{tmp_path}/new/folder"))
    assert (tmp_path / "new" / "folder" / "step-00000008" / "checkpoint.json").is_file()


def test_damaged_and_half_written_checkpoints_are_passed_over(capsys):
    start(config_of("run", stop_after=6))
    memory = fsspec.filesystem("memory")
    memory.rm_file("/bucket/run/step-00000006/checkpoint.json")  # as if the run was killed while it wrote
    (damaged,) = [path for path in memory.ls("/bucket/run/step-00000004", detail=False) if path.endswith(".tensors")]
    content = bytearray(memory.cat_file(damaged))
    content[len(content) // 2] ^= 1
    memory.pipe_file(damaged, bytes(content))
    assert CheckpointFolder("run").steps() == [2, 4]
    assert main(["checkpoint", "verify", "run"]) == 1
    assert "its checksum differs" in capsys.readouterr().out
    start(config_of("run"))
    out = capsys.readouterr().out
    assert "falling back to the checkpoint of step 2: that of step 4 is damaged" in out
    assert [line["step"] for line in repeatable("run")] == list(range(1, 9))


def test_what_was_passed_over_is_marked_until_the_run_writes_that_step_again(capsys):
    start(config_of("run", stop_after=6))
    memory = fsspec.filesystem("memory")
    metadata = "/bucket/run/step-00000006/metadata.json"
    memory.pipe_file(metadata, memory.cat_file(metadata)[:-1])
    start(config_of("run", stop_after=5))
    mark = "memory://bucket/run/.step-00000006.passed"
    assert f"set aside, as the run goes on without it: {mark}" in capsys.readouterr().out
    assert CheckpointFolder("run").named_steps() == [2, 4, 5]
    assert memory.exists(metadata), "kept, also when other checkpoints are written"
    start(config_of("run"))
    assert "resuming from the checkpoint of step 5" in capsys.readouterr().out
    assert CheckpointFolder("run").steps() == [5, 6, 8]
    assert not RemotePath(mark).exists()
    assert [line["step"] for line in repeatable("run")] == list(range(1, 9))

    RemotePath(mark).write_text("")
    start(replace(config_of("run", stop_after=3), job=Job("run", overwrite=True)))
    assert sorted(RemotePath("memory://bucket/run").names()) == ["step-00000002", "step-00000003"]


def test_overwrite_and_other_options_treat_it_like_a_local_one(capsys):
    start(config_of("run"))
    other = config_of("other")
    with pytest.raises(ValueError, match=r"of a run with other options or data:\n  training\.seed: 0 -> 1"):
        start(replace(other, training=replace(other.training, seed=1)))
    start(replace(config_of("run", stop_after=3), job=Job("run", overwrite=True)))
    assert CheckpointFolder("run").steps() == [2, 3]


def check_probes(rank: int) -> str:
    try:
        CheckpointManager("run", 1, 0, elsewhere="memory://bucket/run").refuse_unless_writable()
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_that_do_not_share_the_store_are_refused(ranks: RankPool):
    assert set(ranks.run(check_probes, 2)) == {"memory://bucket/run: rank 1 does not see there what rank 0 writes"}


@pytest.mark.parametrize(("text", "expected"), [("s3://a/b", True), ("a:/b", False), ("a/b://c", False)])
def test_urls_are_told_from_paths(text, expected):
    assert is_remote(text) == expected


def test_what_can_not_be_remote_is_refused_by_name(capsys):
    preset = ["train", "--config", "deepseek_v3_debugmodel"]
    for option in ("--job.dump_folder", "--job.runs_folder"):
        assert main([*preset, option, "s3://bucket/run"]) == 2
        assert "checkpoints can be remote: --checkpoint.folder" in capsys.readouterr().err
    for option in ("--data.path", "--checkpoint.initial_load_path", "--debug.record_routing"):
        assert main([*preset, option, "s3://bucket/thing"]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"spurline train: {option[2:]} s3://bucket/thing: only --checkpoint.folder can be remote")
    assert main([*preset, "--checkpoint.folder", "nosuch://bucket/run"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("spurline train: nosuch://bucket/run: Protocol not known: nosuch")
    assert len(err.splitlines()) == 1
    assert os.listdir() == ["text"]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("data prepare text --out s3://bucket/thing", "--out"),
        ("convert from-hf somewhere s3://bucket/thing", "OUT"),
        ("convert to-hf s3://bucket/thing here", "RUN"),
        ("data prepare s3://bucket/thing --out here", "data prepare:"),
        ("generate s3://bucket/thing --prompt a", "run folder"),
        ("report s3://bucket/thing", "run folder"),
        ("runs s3://bucket/thing", "run folder"),
        ("runs compare s3://bucket/thing here", "run folder"),
        ("checkpoint ls s3://bucket/thing", "run folder"),
        ("train --job.resume s3://bucket/thing", "run folder"),
        ("routing s3://bucket/thing", "run folder"),
    ],
)
def test_other_commands_take_no_url_for_a_folder(capsys, command, name):
    assert main(command.split()) == 2
    err = capsys.readouterr().err
    assert f"{name} s3://bucket/thing: only --checkpoint.folder of a run can be remote: give a path" in err
    assert len(err.splitlines()) == 1
    assert os.listdir() == ["text"], "no folder named s3:"


@pytest.fixture
def s3(tmp_path, monkeypatch):
    """Starts an S3-compatible server with a bucket."""
    for package in ("moto", "s3fs", "flask_cors"):
        pytest.importorskip(package)
    started = []

    def serve(**variables):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        quiet = subprocess.DEVNULL
        started.append(subprocess.Popen(command, env={**os.environ, **variables}, stdout=quiet, stderr=quiet))
        url = f"http://127.0.0.1:{port}"
        while True:
            assert started[-1].poll() is None, "the server has ended"
            try:
                urllib.request.urlopen(f"{url}/moto-api/").close()
                break
            except OSError:
                continue
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.filesystem("s3").clear_instance_cache()

    yield serve
    for server in started:
        server.kill()
        server.wait()


SCRIPT = """
import sys
from spurline.testing.faults import install
from spurline.train.run import train
from tests.train.test_remote_checkpoints import config_of
install("kill@backward:step=6")
train("deepseek_v3", "deepseek_v3_debugmodel", config_of("run", "s3://bucket/run"))
"""


def test_killed_run_goes_on_from_an_s3_server(s3, capsys):
    s3()
    killed = subprocess.run([sys.executable, "-c", SCRIPT], env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert killed.returncode == -signal.SIGKILL
    start(config_of("run", "s3://bucket/run"))
    assert "resuming from the checkpoint of step 4" in capsys.readouterr().out
    start(config_of("local", ""))
    assert repeatable("run") == repeatable("local")
    assert CheckpointFolder("run").steps() == [4, 6, 8]
    assert main(["checkpoint", "verify", "run"]) == 0


def test_misspelled_bucket_is_refused_and_not_created(s3):
    s3()
    with pytest.raises(ValueError, match=r"^s3://bukcet/run: .*no such file or bucket"):
        start(config_of("run", "s3://bukcet/run"))
    assert fsspec.filesystem("s3").ls("") == ["bucket"]


def test_bucket_without_permission_is_one_line_before_the_first_step(s3, capsys):
    s3(INITIAL_NO_AUTH_ACTION_COUNT="1")  # all but making the bucket needs a key that the server knows
    with pytest.raises(ValueError, match=r"^s3://bucket/run: .*(Forbidden|not exist in our records)") as refused:
        start(config_of("run", "s3://bucket/run"))
    assert "\n" not in str(refused.value)
    assert not Path("run/metrics.jsonl").exists()
