"""The page of `spurline report` in a real Chromium: what its script has drawn, and what it does when used."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from browser import CHROMIUM, QUIET
from made_up_runs import make_run

from spurline.tools.report import write_report

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

# Puts what `act` returns, or the error it ends in, into the page for the test to read.
DRIVER = """<script>
const found = document.createElement("script");
found.id = "found";
found.type = "application/json";
try {{ found.textContent = JSON.stringify((() => {{ {act} }})()); }}
catch (error) {{ found.textContent = JSON.stringify(String(error)); }}
document.body.append(found);
</script></body>"""
PLOT = """const plotOf = (key) => document.querySelector(`[data-chart=${key}] .plot`);
const told = (plot) => [...plot.querySelectorAll(".tip:not([hidden]) > div")].map((line) => line.textContent);
const press = (plot, key) => plot.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
"""


def open_page(path, tmp_path, act="", width=1400, options=()):
    """The page after its script ran: its HTML, and what `act` returned."""
    page = path.read_text().replace("</body>", DRIVER.format(act=PLOT + (act or "return null")))
    driven = tmp_path / "driven.html"
    driven.write_text(page)
    profile = tmp_path / "profile"
    how = ["--virtual-time-budget=5000", "--dump-dom", *options]
    command = [CHROMIUM, *QUIET, *how, f"--user-data-dir={profile}", f"--window-size={width},900", driven.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(profile, ignore_errors=True)
    found = re.search(r'<script id="found" type="application/json">(.*?)</script>', done.stdout, re.DOTALL)
    return done.stdout, json.loads(found[1])


class Figures(HTMLParser):
    """For each figure: its chart, the points of its curves, its bands and dots, and its canvas."""

    def __init__(self):
        super().__init__()
        self.figures = []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "figure":
            self.figures.append({"chart": attributes["data-chart"], "curves": [], "bands": [], "dots": 0})
        elif tag == "path":
            kind = "bands" if "band" in attributes["class"] else "curves"
            assert "NaN" not in attributes["d"]
            assert "Infinity" not in attributes["d"]
            self.figures[-1][kind].append(len(re.findall(r"[ML]", attributes["d"])))
        elif tag == "circle":
            self.figures[-1]["dots"] += 1
        elif tag == "canvas":
            self.figures[-1]["canvas"] = attributes


def figures_of(html):
    parser = Figures()
    parser.feed(re.sub(r"<script.*?</script>", "", html, flags=re.DOTALL))
    return parser.figures


def test_every_chart_of_a_run_has_its_data(tmp_path):
    path = write_report([str(make_run(tmp_path / "run", steps=60))])
    html, errors = open_page(path, tmp_path)
    assert errors is None
    figures = figures_of(html)
    curves = [figure for figure in figures if figure["chart"] not in ("time", "heat")]
    assert len(curves) == 9
    for figure in curves:
        assert figure["curves"], figure["chart"]
        assert max(figure["curves"]) == 60, figure["chart"]
    loss = curves[0]
    assert loss["curves"] == [60, 60, 12]  # raw, smoothed, validation
    assert loss["dots"] == 12
    (time,) = [figure for figure in figures if figure["chart"] == "time"]
    assert time["bands"] == [120] * 9  # there and back
    maps = [figure["canvas"] for figure in figures if figure["chart"] == "heat"]
    assert len(maps) == 3
    for canvas in maps:
        assert (canvas["width"], canvas["height"], canvas["data-cells"]) == ("60", "8", "480")
        assert int(canvas["data-colours"]) > 20


def test_several_runs_are_drawn_together(tmp_path):
    runs = [make_run(tmp_path / "a", steps=40), make_run(tmp_path / "b", steps=20, total_steps=40)]
    path = write_report([str(run) for run in runs], str(tmp_path / "both.html"))
    act = """
      const shown = () => [...plotOf("loss").querySelectorAll(".curve:not(.raw)")].map((path) => path.classList[1]);
      const before = shown();
      const box = document.querySelector("input[data-run='0']");
      box.click();
      return [before, shown()];
    """
    html, found = open_page(path, tmp_path, act)
    assert found == [["run0", "run0", "run1", "run1"], ["run1", "run1"]]
    assert [figure["chart"] for figure in figures_of(html)].count("time") == 2


@pytest.mark.parametrize(
    ("options", "charts"),
    [
        ({"steps": 1, "layers": 0}, 6),
        ({"steps": 2, "layers": 1, "experts": 4}, 11),
    ],
)
def test_runs_of_one_or_two_steps_are_drawn_without_errors(tmp_path, options, charts):
    path = write_report([str(make_run(tmp_path / "run", warnings=False, **options))])
    html, _ = open_page(path, tmp_path)
    figures = figures_of(html)
    assert len(figures) == charts
    assert all(f["dots"] or f["bands"] or f["curves"] or f.get("canvas") for f in figures)
    if options["steps"] == 1:
        assert all(figure["dots"] for figure in figures if figure["chart"] != "time")


def test_gaps_of_unknown_losses_stay_gaps(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    losses = [3.0, 2.5, None, 2.0, 1.5]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses, 1))
    )
    _, path = open_page(write_report([str(run)]), tmp_path, "return document.querySelector('.curve').getAttribute('d')")
    assert [letter for letter in path if letter in "ML"] == ["M", "L", "M", "L"]


def test_pointer_and_keys_show_the_values_at_a_step(tmp_path):
    run = make_run(tmp_path / "run", steps=40)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    act = """
      const plot = plotOf("lr");
      const shown = [];
      plot.dispatchEvent(new PointerEvent("pointermove", {clientX: plot.getBoundingClientRect().right}));
      shown.push(told(plot));
      for (const key of ["ArrowLeft", "Home", "ArrowRight", "End"]) { press(plot, key); shown.push(told(plot)); }
      press(plot, "Escape");
      shown.push(told(plot));
      return shown;
    """
    _, shown = open_page(write_report([str(run)]), tmp_path, act)
    assert [lines[0] if lines else None for lines in shown] == [
        "step 40",
        "step 39",
        "step 1",
        "step 2",
        "step 40",
        None,
    ]
    assert float(shown[1][1]) == pytest.approx(records[38]["lr"], rel=1e-3)


def test_keys_walk_over_experts_and_time_in_a_heat_map(tmp_path):
    run = make_run(tmp_path / "run", steps=40)
    act = """
      const plot = plotOf("heat");
      const shown = [];
      for (const key of ["ArrowRight", "ArrowDown", "ArrowLeft", "Home"]) { press(plot, key); shown.push(told(plot)); }
      return shown;
    """
    _, shown = open_page(write_report([str(run)]), tmp_path, act)
    heads = [lines[0] for lines in shown]
    assert heads == ["expert 0, step 40", "expert 1, step 40", "expert 1, step 39", "expert 1, step 1"]
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["expert_load"]["layers.1.moe"]
    ratio = first[1] * 8 / sum(first)
    assert float(shown[3][1].split()[0]) == pytest.approx(ratio, rel=0.15)


def test_the_parts_of_a_step_are_told_with_their_shares(tmp_path):
    act = 'const plot = plotOf("time"); press(plot, "End"); return told(plot)'
    _, shown = open_page(write_report([str(make_run(tmp_path / "run", steps=10))]), tmp_path, act)
    assert shown[0].startswith("step 10: ")
    assert len(shown) == 10
    assert sum(int(re.search(r"(\d+)%$", line)[1]) for line in shown[1:]) == pytest.approx(100, abs=4)


def test_smoothing_and_a_logarithmic_axis_change_the_curve(tmp_path):
    act = """
      const curve = () => plotOf("loss").querySelector(".curve:not(.raw)").getAttribute("d");
      const curves = [curve()];
      document.getElementById("smooth").click(); curves.push(curve());
      document.getElementById("log").click(); curves.push(curve());
      return curves;
    """
    _, curves = open_page(write_report([str(make_run(tmp_path / "run", steps=50))]), tmp_path, act)
    assert len(set(curves)) == 3

    def roughness(path):
        heights = [float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", path)]
        return sum(abs(a - 2 * b + c) for a, b, c in zip(heights, heights[1:], heights[2:], strict=False))

    assert roughness(curves[0]) < 0.7 * roughness(curves[1])


@pytest.mark.parametrize("width", [390, 800, 1400])
def test_nothing_is_wider_than_the_window(tmp_path, width):
    runs = [make_run(tmp_path / name, steps=20) for name in ("a_rather_long_name_of_a_run", "b")]
    path = write_report([str(run) for run in runs], str(tmp_path / "both.html"))
    # Chromium's window has a least width: below it the page is made narrow from within.
    act = f"document.documentElement.style.width = '{width}px'; document.body.style.width = '{width}px'; redraw();"
    act += """
      const wide = [...document.querySelectorAll("body *")].filter((element) => !element.closest(".scroll"));
      return wide.filter((element) => element.getBoundingClientRect().right > WIDTH + 0.5).map((e) => e.outerHTML);
    """.replace("WIDTH", str(width))
    _, too_wide = open_page(path, tmp_path, act, width=width)
    assert too_wide == []


def test_dark_and_light_have_colours_of_their_own(tmp_path):
    path = write_report([str(make_run(tmp_path / "run", steps=10))])
    act = "return getComputedStyle(document.body).backgroundColor"
    light = open_page(path, tmp_path, act, options=["--blink-settings=preferredColorScheme=1"])[1]
    dark = open_page(path, tmp_path, act, options=["--blink-settings=preferredColorScheme=0"])[1]
    assert (light, dark) == ("rgb(255, 255, 255)", "rgb(18, 20, 23)")
