"""Metrics of large models and of full disks."""

import errno
import json
import os
import tracemalloc

import pytest

from spurline.report.charts import draw_heat
from spurline.report.read import read_run
from spurline.train.metrics.expert_load_file import EXPERT_LOAD_FILE, LARGE, ExpertLoads
from spurline.train.metrics.jsonl import JsonlWriter, drop_lines_after
from spurline.train.metrics.writers import AllWriters
from spurline.untrusted import MAX_LINE_BYTES


def loads_of(step, num_layers=30, num_experts=200):
    return {f"layers.{i}.moe": [(step + i + e) % 7 for e in range(num_experts)] for i in range(num_layers)}


def write(folder, steps, resume_from_step=None, **size):
    with JsonlWriter(folder, resume_from_step) as writer:
        for step in steps:
            writer.write({"step": step, "loss": 1.0, "expert_load": loads_of(step, **size)})


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_load_of_few_experts_is_in_the_line(tmp_path):
    write(tmp_path, [1], num_layers=LARGE // 64, num_experts=64)
    assert lines_of(tmp_path)[0]["expert_load"] == loads_of(1, LARGE // 64, 64)
    assert not (tmp_path / EXPERT_LOAD_FILE).exists()


def test_the_load_of_many_experts_is_in_a_file_of_its_own(tmp_path):
    write(tmp_path, [1, 2])
    assert [line["expert_load"] for line in lines_of(tmp_path)] == [EXPERT_LOAD_FILE] * 2
    stored = ExpertLoads(tmp_path / EXPERT_LOAD_FILE)
    assert stored.step_N.tolist() == [1, 2]
    for place, step in enumerate((1, 2)):
        assert {layer: rows.tolist() for layer, rows in stored.of_record(place).items()} == loads_of(step)


def test_the_report_draws_the_same_from_both(tmp_path):
    large, inline = tmp_path / "large", tmp_path / "inline"
    for folder in (large, inline):
        folder.mkdir()
    write(large, range(1, 6))
    records = [{"step": step, "loss": 1.0, "expert_load": loads_of(step)} for step in range(1, 6)]
    (inline / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert draw_heat([read_run(large, "a")]) == draw_heat([read_run(inline, "a")])


def test_a_resumed_run_drops_later_steps_from_both(tmp_path):
    write(tmp_path, range(1, 6))
    with open(tmp_path / EXPERT_LOAD_FILE, "ab") as file:
        file.write(b"half a record")
    write(tmp_path, [4, 5, 6], resume_from_step=3)
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3, 4, 5, 6]
    stored = ExpertLoads(tmp_path / EXPERT_LOAD_FILE)
    assert stored.step_N.tolist() == [1, 2, 3, 4, 5, 6]
    assert stored.of_record(5)["layers.0.moe"].tolist() == loads_of(6)["layers.0.moe"]


@pytest.mark.parametrize("order", [[1, 2, 3, 4], [3, 1, 4, 2]])
def test_trimming_keeps_the_lines_up_to_the_step(tmp_path, order):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"loss": 1, "step": {step}}}\n' for step in order) + '{"step": 1, "lo')
    drop_lines_after(path, 2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [s for s in order if s <= 2]


def test_a_line_without_end_is_refused_with_the_name_of_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n')
    os.truncate(path, MAX_LINE_BYTES + 100)  # zeros, as after a power failure
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged: line 2 is longer than .* Remove that line"):
        drop_lines_after(path, 1)
    os.truncate(path, 5000)
    drop_lines_after(path, 1)
    assert path.read_bytes() == b'{"step": 1}\n'


def test_trimming_and_reading_hold_one_line_at_a_time(tmp_path):
    """400 lines of 25 KB are 10 MB of text, and several times that as Python objects."""
    line = json.dumps({"step": 0, "expert_load": {"a": [100] * 5000}})[len('{"step": 0') :]
    with open(tmp_path / "metrics.jsonl", "w") as file:
        file.writelines(f'{{"step": {step}{line}\n' for step in range(1, 401))
    tracemalloc.start()
    drop_lines_after(tmp_path / "metrics.jsonl", 300)
    assert tracemalloc.get_traced_memory()[1] < 2e6
    read_run(tmp_path, "run")
    assert tracemalloc.get_traced_memory()[1] < 10e6  # 300 lines of 5,000 numbers, 4 bytes each
    tracemalloc.stop()


def test_a_full_disk_costs_the_metrics_and_not_the_run(tmp_path, monkeypatch):
    said = []
    jsonl = JsonlWriter(tmp_path)
    full = False
    write_some = type(jsonl._file).write

    class FullNowAndThen:
        def __init__(self, file):
            self._file = file

        def __getattr__(self, name):
            return getattr(self._file, name)

        def write(self, data):
            if full:
                write_some(self._file, bytes(data)[:5])
                raise OSError(errno.ENOSPC, "No space left on device")
            return write_some(self._file, data)

    jsonl._file = FullNowAndThen(jsonl._file)
    with AllWriters([jsonl], said.append) as writers:
        for step in range(1, 6):
            full = step in (2, 3)
            writers.write({"step": step})
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 4, 5]
    assert said == [
        "warning: the Jsonl metrics of step 2 were not written: No space left on device. Training continues without"
        " them",
        "the Jsonl metrics are written again; those of 2 logged steps are missing",
    ]
