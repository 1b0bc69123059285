import json
import math
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

from spurline.device import process_peak_memory_bytes
from spurline.train.metrics.jsonl import JsonlWriter
from spurline.train.metrics.throughput import Throughput


def read_lines(folder):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write_steps(folder, steps, **options):
    with JsonlWriter(folder, **options) as writer:
        for step in steps:
            writer.write({"step": step, "loss": 1.0})


def test_a_line_can_be_read_as_soon_as_it_is_written(tmp_path):
    writer = JsonlWriter(tmp_path)
    writer.write({"step": 1, "loss": 2.5})
    assert read_lines(tmp_path) == [{"step": 1, "loss": 2.5}]
    writer.write({"step": 2, "loss": 2.25, "expert_load": {"layers.1": [1.0, 2.0]}})
    assert read_lines(tmp_path)[1] == {"step": 2, "loss": 2.25, "expert_load": {"layers.1": [1.0, 2.0]}}
    writer.close()


def test_numbers_that_are_not_finite_become_null_at_any_depth(tmp_path):
    with JsonlWriter(tmp_path) as writer:
        writer.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "load": {"a": [1.0, -math.inf]}})
    assert read_lines(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "load": {"a": [1.0, None]}}]


def test_arrays_and_tensors_are_written_as_numbers(tmp_path):
    with JsonlWriter(tmp_path) as writer:
        writer.write({"step": 1, "loss": np.float32(0.5), "load": np.array([1.0, np.nan])})
    assert read_lines(tmp_path) == [{"step": 1, "loss": 0.5, "load": [1.0, None]}]


def test_a_new_writer_starts_a_new_file(tmp_path):
    write_steps(tmp_path, [1, 2])
    write_steps(tmp_path, [1])
    assert [line["step"] for line in read_lines(tmp_path)] == [1]


def test_resuming_drops_later_lines_and_one_that_was_cut_short(tmp_path):
    write_steps(tmp_path, [1, 2, 3, 4])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    write_steps(tmp_path, [3, 4, 5], resume_from_step=2)
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2, 3, 4, 5]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resuming_after_a_kept_line_without_its_newline_starts_a_line_of_its_own(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}')
    write_steps(tmp_path, [2], resume_from_step=1)
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 2]


def test_resuming_without_a_file_starts_one(tmp_path):
    write_steps(tmp_path, [8], resume_from_step=7)
    assert [line["step"] for line in read_lines(tmp_path)] == [8]


def test_a_kill_while_resuming_leaves_the_old_file(tmp_path, monkeypatch):
    """Where the lines to drop are not the last ones, so that the file is written anew."""
    write_steps(tmp_path, [2, 1, 3])

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        JsonlWriter(tmp_path, resume_from_step=1)
    assert [line["step"] for line in read_lines(tmp_path)] == [2, 1, 3]


def test_a_line_without_a_step_is_a_mistake(tmp_path):
    with JsonlWriter(tmp_path) as writer, pytest.raises(AssertionError, match="step"):
        writer.write({"loss": 1.0})


@pytest.mark.skipif(sys.platform == "win32", reason="Windows doesn't say")
def test_peak_memory_is_in_bytes_and_keeps_the_peak_of_this_process_only():
    held_by_the_parent = np.ones(400_000_000, dtype=np.uint8)
    code = (
        "from spurline.device import process_peak_memory_bytes as peak\n"
        "before = peak(); block = bytearray(b'x' * 100_000_000); del block; print(before, peak())"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    before, after = map(int, output.split())
    assert 2e6 < before < held_by_the_parent.nbytes
    assert 100e6 <= after - before <= 250e6


def test_peak_memory_without_proc_comes_from_getrusage(monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr("pathlib.Path.read_text", lambda _: "no such line")
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=7))
    monkeypatch.setattr(sys, "platform", "linux")
    assert process_peak_memory_bytes() == 7 * 1024
    monkeypatch.setattr(sys, "platform", "darwin")
    assert process_peak_memory_bytes() == 7


def test_peak_memory_is_unknown_without_proc_and_the_resource_module(monkeypatch):
    def missing(_):
        raise FileNotFoundError

    monkeypatch.setattr("pathlib.Path.read_text", missing)
    monkeypatch.setitem(sys.modules, "resource", None)
    assert process_peak_memory_bytes() is None


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_throughput_is_of_the_interval_since_the_last_reading():
    clock = Clock()
    throughput = Throughput(clock)
    throughput.add(30)
    throughput.add(10)
    clock.now += 4
    assert throughput.read() == 10.0
    throughput.add(10)
    clock.now += 2
    assert throughput.read() == 5.0


def test_throughput_leaves_out_pauses_also_one_that_ends_in_an_error():
    clock = Clock()
    throughput = Throughput(clock)
    clock.now += 1
    with throughput.paused():
        clock.now += 50
    clock.now += 1
    with suppress(RuntimeError), throughput.paused():
        clock.now += 50
        raise RuntimeError
    clock.now += 2
    throughput.add(40)
    assert throughput.read() == 10.0


def test_throughput_can_be_read_inside_a_pause():
    clock = Clock()
    throughput = Throughput(clock)
    throughput.add(8)
    clock.now += 2
    with throughput.paused():
        clock.now += 50
        assert throughput.read() == 4.0
    clock.now += 1
    throughput.add(3)
    assert throughput.read() == 3.0


def test_throughput_without_elapsed_time_is_zero():
    assert Throughput(Clock()).read() == 0.0
