import json
import re

import pytest
from made_up_runs import make_run, record_of_step

DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def page_of(folder):
    return (folder / "report.html").read_text()


def data_of(page):
    return json.loads(DATA.search(page)[1])


def test_the_page_is_written_into_the_run_folder(spurline, tmp_path):
    run = make_run(tmp_path / "my_run", steps=40)
    assert spurline("report", "my_run") == (0, "report: my_run/report.html\n", "")
    page = page_of(run)
    data = data_of(page)
    assert data["runs"] == ["my_run"]
    keys = [chart["key"] for chart in data["charts"]]
    assert keys == ["loss", "lr", "grad_norm", "throughput", "memory", "load", "dead", "entropy", "balance_loss"]
    # The script finds a chart's data by its place.
    assert re.findall(r'data-chart="(\w+)"', page) == [*keys, "time", *["heat"] * 3]
    assert len(data["times"]) == 1
    assert [map_["layer"] for map_ in data["heat"]] == [f"layers.{layer}.moe" for layer in (1, 2, 3)]


def test_the_page_needs_nothing_from_elsewhere(spurline, tmp_path):
    run = make_run(tmp_path / "run", steps=5)
    assert spurline("report", "run").code == 0
    addresses = re.findall(r"""(?:https?:)?//[\w.]+\.\w+[^"'\s]*|url\(|@import|src=""", page_of(run))
    assert addresses == ["http://www.w3.org/2000/svg"]  # a name, which nothing is loaded from


def test_texts_of_a_run_are_shown_as_they_are(spurline, tmp_path):
    run = make_run(tmp_path / "a<i>b", steps=10)
    assert spurline("report", "a<i>b").code == 0
    page = page_of(run)
    assert "Raise &lt;b&gt;the rate&lt;/b&gt;" in page
    assert "<h1>a&lt;i&gt;b</h1>" in page
    assert "&lt;/script&gt;&lt;b&gt;&amp;</pre>" in page
    assert page.count("</script>") == 2


def test_several_runs_share_charts_and_show_what_differs(spurline, tmp_path):
    make_run(tmp_path / "a", steps=20)
    make_run(tmp_path / "b", steps=10, total_steps=20, lr=1e-3)
    assert spurline("report", "a", "b", "--out", "both.html") == (0, "report: both.html\n", "")
    page = (tmp_path / "both.html").read_text()
    loss = data_of(page)["charts"][0]
    assert {(one["run"], one["label"]) for one in loss["series"]} == {
        (run, label) for run in (0, 1) for label in ("training", "validation")
    }
    diff = re.search(r'<table class="config" id="diff">.*?</table>', page, re.DOTALL)[0]
    assert re.findall(r"<td>(.*?)</td>", diff) == ["optimizer.lr", "0.004", "0.001"]
    assert "step 10 of 20" in page
    assert not (tmp_path / "a/report.html").exists()


def test_options_may_stand_anywhere(spurline, tmp_path):
    make_run(tmp_path / "a", steps=3)
    make_run(tmp_path / "b", steps=3)
    assert spurline("report", "--out=x.html", "a", "b").code == 0
    assert spurline("report", "a", "--out", "y.html", "b").code == 0
    assert "The runs have the same options." in (tmp_path / "x.html").read_text()
    assert (tmp_path / "x.html").read_text() == (tmp_path / "y.html").read_text()


def test_one_step_without_experts_config_or_samples_is_a_page_too(spurline, tmp_path):
    run = make_run(tmp_path / "run", steps=1, layers=0, warnings=False, samples=0)
    (run / "config.json").unlink()
    assert spurline("report", "run").code == 0
    page = page_of(run)
    for absent in ("Load of experts", "Samples", "Configuration", 'class="warnings"'):
        assert absent not in page


def test_lines_that_have_little_in_them_are_enough(spurline, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n{"step": 2, "lo')
    assert spurline("report", "run").code == 0
    assert data_of(page_of(run))["charts"] == []


def test_a_long_run_makes_a_page_below_two_megabytes(spurline, tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    line = record_of_step(1, 100_000, layers=4, experts=64)
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(1, 100_001):
            file.write(json.dumps(line) + "\n" if step < 3 else f'{{"step": {step}, "loss": {step % 977 / 1000}}}\n')
            line["step"] = step + 1
    assert spurline("report", "run").code == 0
    assert len(page_of(run)) < 2_000_000
    assert max(data_of(page_of(run))["charts"][0]["series"][0]["y"]) > 5  # the spike of the first steps


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "RUN is missing: give a run folder, as in spurline report outputs/my_run"),
        (["nowhere"], "nowhere: there is no such run folder"),
        (["."], ".: not the folder of a run, as there is no metrics.jsonl in it"),
        (["broken"], "broken/metrics.jsonl, line 1: not JSON: Expecting value at column 1"),
        (["run", "--out", "."], "--out . is a folder: give a file name"),
        (["run", "--out", "no/such/page.html"], "no/such/page.html: there is no folder no/such"),
        (["run", "--outt", "x"], "--outt: no such option. Did you mean --out?"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(spurline, tmp_path, argv, message):
    make_run(tmp_path / "run", steps=2)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/metrics.jsonl").write_text("hello\n")
    before = sorted(tmp_path.rglob("*"))
    assert spurline("report", *argv) == (2, "", f"spurline report: {message}\n")
    assert sorted(tmp_path.rglob("*")) == before


def test_help_names_the_runs_and_the_file(spurline):
    code, out, _ = spurline("report", "--help")
    assert code == 0
    assert "spurline report RUN [RUN2 ...]" in out
    assert "--out FILE" in out
