import json

import pytest

from spurline.report.read import read_runs


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": null}\n')
    return run


def test_a_run_is_its_lines_config_and_samples(folder):
    (folder / "config.json").write_text('{"training": {"steps": 9}}')
    (folder / "samples.jsonl").write_text('{"step": 2, "text": "def"}\n')
    (run,) = read_runs([str(folder)])
    assert run.name == "run"
    assert run.records == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}]
    assert run.total_steps == 9
    assert run.samples == [{"step": 2, "text": "def"}]


def test_config_and_samples_may_be_missing(folder):
    (run,) = read_runs([str(folder)])
    assert (run.config, run.samples, run.total_steps) == ({}, [], None)


def test_a_last_line_that_was_cut_short_does_not_count(folder):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')
    assert [record["step"] for record in read_runs([str(folder)])[0].records] == [1, 2]


def test_lines_are_in_the_order_of_steps_and_the_later_of_two_counts(folder):
    (folder / "metrics.jsonl").write_text('{"step": 3}\n\n{"step": 1, "loss": 1}\n{"step": 1, "loss": 2}\n')
    assert read_runs([str(folder)])[0].records == [{"step": 1, "loss": 2}, {"step": 3}]


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"st\n{"step": 3}\n', r"metrics.jsonl, line 2: not JSON: "),
        ("metrics.jsonl", "[1]\n", "metrics.jsonl, line 1: not a JSON object"),
        ("metrics.jsonl", '{"step": 1}\n{"loss": 1}\n', "metrics.jsonl, line 2: a line of metrics needs its step"),
        ("metrics.jsonl", "", "metrics.jsonl: no step was written yet"),
        ("config.json", '{\n"a": ,}', "config.json: not JSON: Expecting value at line 2, column 6"),
        ("config.json", "[]", "config.json: not a JSON object"),
        ("samples.jsonl", '{"step": 1}\n', "samples.jsonl, line 1: a sample needs its step and text"),
    ],
)
def test_what_can_not_be_read_is_told_with_its_place(folder, file, text, problem):
    (folder / file).write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_runs([str(folder)])


def test_missing_folders_and_folders_of_something_else_are_told(tmp_path):
    with pytest.raises(ValueError, match="nowhere: there is no such run folder"):
        read_runs([str(tmp_path / "nowhere")])
    with pytest.raises(ValueError, match=r"not the folder of a run, as there is no metrics\.jsonl in it"):
        read_runs([str(tmp_path)])


def test_runs_of_the_same_name_are_told_apart_by_their_path(tmp_path):
    folders = [tmp_path / place / "run" for place in "ab"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    assert [run.name for run in read_runs(list(map(str, folders)))] == list(map(str, folders))
    with pytest.raises(ValueError, match="the same run is given twice"):
        read_runs([str(folders[0]), str(folders[0])])


def test_numbered_runs_are_named_with_the_folder_that_counts_them(tmp_path):
    folders = [tmp_path / "debug" / number for number in ("0001", "0002")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    assert [run.name for run in read_runs(list(map(str, folders)))] == ["debug/0001", "debug/0002"]
