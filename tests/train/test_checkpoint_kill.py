"""A process that ends at any moment of a save leaves a run that goes on from a whole checkpoint."""

import json
import subprocess
import sys

# Forks a process for every event of a save that the file system could see, ends it there, and loads what is left.
SCRIPT = """
import json, os, shutil, sys
from pathlib import Path

import torch
import torch.distributed.checkpoint

from spurline.train.checkpoint import writer as checkpoint_writer
from spurline.train.checkpoint.manager import CheckpointManager

os.fsync = lambda descriptor: None  # what is slow, and makes a difference only when the power fails
base, saved_step = Path(sys.argv[1]), int(sys.argv[2])


def make(value):
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model, torch.optim.AdamW(model.parameters())


def end_at(number, report):
    num_events = 0

    def event(name, before=lambda: None):
        nonlocal num_events
        num_events += 1
        if num_events == number:
            before()
            os.write(report, name.encode())
            os._exit(9)

    def hook(name, args):
        if name in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"):
            place = str(args[0])
            if "checkpoints" in place or name in ("os.remove", "os.rmdir"):  # those of a removal have no folder
                event(name + " " + Path(place).name)

    sys.addaudithook(hook)
    write = checkpoint_writer.ChecksummedStream.write

    def watched(self, data):
        def half():
            self._file.write(bytes(data)[: len(bytes(data)) // 2])

        event("write", half)
        return write(self, data)

    checkpoint_writer.ChecksummedStream.write = watched


CheckpointManager(base / "start", 1, 1).save(1, *make(1.0), {})
outcomes = []
while True:
    run = base / f"run{len(outcomes)}"
    shutil.copytree(base / "start", run)
    reader, report = os.pipe()
    child = os.fork()
    if child == 0:
        end_at(len(outcomes) + 1, report)
        CheckpointManager(run, 1, 1).save(saved_step, *make(2.0), {})
        os._exit(0)
    os.close(report)
    name = os.read(reader, 1000).decode()
    os.close(reader)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    model, optimizer = make(0.0)
    said = []
    checkpoints = CheckpointManager(run, 1, 1, say=said.append)
    step, _ = checkpoints.load_newest(model, optimizer)
    values = {value for parameter in model.parameters() for value in parameter.flatten().tolist()}
    left = sorted(path.name for path in checkpoints.folder.iterdir())
    checkpoints.save(3, model, optimizer, {})
    outcomes.append([name, code, step, sorted(values), left, said, checkpoints.latest()])
    shutil.rmtree(run)
    if code != 9:
        break
print(json.dumps(outcomes))
"""


def outcomes_of(tmp_path, saved_step):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(saved_step)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert [code for _, code, *_ in outcomes] == [9] * (len(outcomes) - 1) + [0]
    for _, _, _, _, left, said, latest in outcomes:
        assert all(name.startswith("step-") for name in left), "nothing half-written stays"
        assert said == [], "nothing that was found is damaged"
        assert latest == 3, "and the run goes on"
    return [(name, step, values) for name, _, step, values, *_ in outcomes]


def test_a_kill_at_any_moment_of_a_save_leaves_the_old_checkpoint_or_the_new_one(tmp_path):
    outcomes = outcomes_of(tmp_path, saved_step=2)
    assert {(step, *values) for _, step, values in outcomes} == {(1, 1.0), (2, 2.0)}
    names = [name for name, _, _ in outcomes]
    steps = [step for _, step, _ in outcomes]
    published = names.index("os.rename .step-00000002.tmp")
    assert steps == [1] * (published + 1) + [2] * (len(steps) - published - 1), "the rename is what counts"
    writing = ["open rank-00000-00000.tensors", "write", "open metadata.json", "open checkpoint.json"]
    phases = ["os.mkdir .step-00000002.tmp", *writing]
    assert [names.index(phase) for phase in phases] == sorted(names.index(phase) for phase in phases)
    assert names.count("write") >= 3
    removal = names[published + 1 :]
    assert "os.rename step-00000001" in removal
    assert {"os.remove rank-00000-00000.tensors", "os.remove metadata.json", "os.remove checkpoint.json"} <= set(
        removal
    )


def test_a_kill_while_a_step_is_saved_again_leaves_one_of_the_two(tmp_path):
    outcomes = outcomes_of(tmp_path, saved_step=1)
    assert {(step, *values) for _, step, values in outcomes} == {(1, 1.0), (1, 2.0)}
    assert "os.rename step-00000001" in [name for name, _, _ in outcomes]
