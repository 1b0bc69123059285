"""The report page: text and tables; script.js draws the charts from the embedded data. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from importlib.resources import files

from spurline.report.charts import draw_curves, draw_heat, draw_time
from spurline.report.read import Record, Run
from spurline.report.summary import layout, numbers, summary
from spurline.report.thin import stretches
from spurline.typed_json import flattened
from spurline.version import __version__

WARNINGS, SAMPLES, SAMPLE_LETTERS = 30, 12, 2000  # at most this many are shown


def make_page(runs: list[Run], version: str = "") -> str:
    """The report of the runs as one self-contained HTML file.

    A page with a version polls its server for newer versions (`report/serve.py`).
    """
    charts, heat = draw_curves(runs), draw_heat(runs)
    times = [(run, time) for run in runs if (time := draw_time(run))]
    data = {
        "runs": [run.name for run in runs],
        "charts": charts,
        "times": [time for _, time in times],
        "heat": heat,
    }
    title = " and ".join(escape(run.name) for run in runs) if len(runs) <= 2 else f"{len(runs)} runs"
    own = files("spurline.report")
    parts = [
        f"<header><h1>{title}</h1>",
        *_about(runs),
        "</header>",
        _facts(runs[0]) if len(runs) == 1 else _comparison(runs),
        _warnings(runs),
        _tools(runs),
        '<main><div class="charts">',
        *(_figure(chart, runs) for chart in charts),
        *(_time_figure(run, time, runs) for run, time in times),
        "</div>",
        _heat_section(heat, runs),
        _samples(runs),
        _config_section(runs),
        "</main>",
        f"<footer>Written by Spurline {__version__} from metrics.jsonl and config.json of the run"
        f"{'s' if len(runs) > 1 else ''}.</footer>",
    ]
    scripts = ["script.js", *(["follow.js"] if version else [])]
    # In a script element, only its end tag needs escaping.
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            *([f'<meta name="version" content="{escape(version)}">'] if version else []),
            f"<title>{title} · Spurline</title>",
            f"<style>\n{own.joinpath('style.css').read_text(encoding='utf-8')}</style>\n</head>\n<body>",
            *filter(None, parts),
            "<noscript><p>The charts are drawn by a script in this page, and scripts are switched off.</p></noscript>",
            f'<script type="application/json" id="data">{embedded}</script>',
            *(f"<script>\n{own.joinpath(name).read_text(encoding='utf-8')}</script>" for name in scripts),
            "</body>\n</html>\n",
        ]
    )


def _about(runs: list[Run]) -> Iterator[str]:
    """For each run, its name (if there are several), model and layout, and its summary."""
    for run in runs:
        known = ", ".join(str(name) for key in ("module", "config") if (name := run.config.get(key)))
        if about := " · ".join(filter(None, [run.name if len(runs) > 1 else "", known, layout(run)])):
            yield f'<p class="soft">{escape(about)}</p>'
        yield summary(run)


def _facts(run: Run) -> str:
    facts = [
        f"<div><dt>{name}</dt><dd>{number} <small>{about}</small></dd></div>"
        for name, (number, about) in numbers(run).items()
    ]
    return f'<dl class="facts">{"".join(facts)}</dl>'


def _comparison(runs: list[Run]) -> str:
    by_run = [numbers(run) for run in runs]
    about = {name: what.partition(",")[0] for of_run in by_run for name, (_, what) in of_run.items()}
    head = "".join(f'<th class="number">{name}<br>{what}</th>' for name, what in about.items())
    rows = [
        f'<tr><td><span class="run{i % 8}">●</span> {escape(run.name)}</td>'
        + "".join(f'<td class="number">{of_run.get(name, ("–",))[0]}</td>' for name in about)
        + "</tr>"
        for i, (run, of_run) in enumerate(zip(runs, by_run, strict=True))
    ]
    return f'<div class="scroll" style="margin-top: 24px"><table><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'


def _warnings(runs: list[Run]) -> str:
    found = [
        (run, record["step"], line) for run in runs for record in run.records for line in record.get("warnings") or ()
    ]
    if not found:
        return ""
    items = [
        f"<li><b>{escape(f'{run.name}, ') if len(runs) > 1 else ''}step {step:,}</b> {escape(str(line))}</li>"
        for run, step, line in found[:WARNINGS]
    ]
    if len(found) > WARNINGS:
        items.append(f"<li>and {len(found) - WARNINGS} more in metrics.jsonl</li>")
    return f'<section class="warnings" aria-label="Warnings"><ul>{"".join(items)}</ul></section>'


def _tools(runs: list[Run]) -> str:
    shown = [
        f'<label class="run{i % 8}"><input type="checkbox" data-run="{i}" checked><i></i>{escape(run.name)}</label>'
        for i, run in enumerate(runs)
        if len(runs) > 1
    ]
    return (
        f'<div class="tools">{"".join(shown)}'
        '<label class="push"><input type="checkbox" id="smooth" checked>Smooth curves</label>'
        '<label><input type="checkbox" id="log">Logarithmic loss</label></div>'
    )


def _plot(kind: str, label: str) -> str:
    label = f"{escape(label)}; arrow keys show values"
    return f'<div class="plot {kind}" tabindex="0" role="group" aria-label="{label}"></div>'


def _figure(chart: Record, runs: list[Run]) -> str:
    legend = ""
    labels = list(dict.fromkeys((one["label"], one["dashed"]) for one in chart["series"] if one["label"]))
    if len(labels) > 1:
        colour = "" if len(runs) > 1 else " run0"
        items = [f'<li><i class="line{" dashed" * dashed}{colour}"></i>{label}</li>' for label, dashed in labels]
        legend = f'<ul class="legend">{"".join(items)}</ul>'
    wide = ' class="wide"' if chart["key"] == "loss" else ""
    # Names of metrics and layers, and so of charts, may come from user code.
    caption = f"<figcaption>{escape(chart['title'])} <span>{escape(chart['unit'])}</span>{legend}</figcaption>"
    return f'<figure{wide} data-chart="{escape(chart["key"])}">{caption}{_plot("curves", chart["title"])}</figure>'


def _time_figure(run: Run, time: Record, runs: list[Run]) -> str:
    whose = f" of {escape(run.name)}" if len(runs) > 1 else ""
    items = [
        f'<li><i class="part-{escape(part["name"].replace(".", "-"))}"></i>{escape(part["label"])}</li>'
        for part in time["parts"]
    ]
    legend = f'<ul class="legend">{"".join(items)}</ul>'
    caption = f"<figcaption>Time of a step{whose} <span>ms</span></figcaption>"
    wide = ' class="wide"' if len(runs) == 1 else ""
    return f'<figure{wide} data-chart="time">{caption}{_plot("stack", "Time of a step" + whose)}{legend}</figure>'


def _heat_section(heat: list[Record], runs: list[Run]) -> str:
    if not heat:
        return ""
    parts = []
    for index, run in enumerate(runs):
        figures = []
        for map_ in (map_ for map_ in heat if map_["run"] == index):
            label = f"Load of {map_['experts']} experts over time, {map_['layer']}"
            ends = f'<div class="ends"><span>step {map_["x"][0]:,}</span><span>{map_["last"]:,}</span></div>'
            caption = f"<figcaption>{escape(map_['layer'])} <span>{map_['experts']} experts</span></figcaption>"
            figures.append(f'<figure data-chart="heat">{caption}{_plot("heat", label)}{ends}</figure>')
        if figures:
            name = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
            parts.append(f'{name}<div class="maps">{"".join(figures)}</div>')
    return (
        '<section><h2>Load of experts</h2><div class="scale">'
        '<span>¼ of the mean<i class="ramp"></i>4 times</span><span><i class="dead"></i>no token</span>'
        f"<span>A row is an expert, expert 0 on top.</span></div>{''.join(parts)}</section>"
    )


def _samples(runs: list[Run]) -> str:
    parts = []
    for run in runs:
        if not run.samples:
            continue
        # Evenly spaced, including the last.
        kept = [run.samples[stretch[-1]] for stretch in stretches(len(run.samples), SAMPLES)]
        articles = []
        for sample in kept:
            text = sample["text"][:SAMPLE_LETTERS] + ("…" if len(sample["text"]) > SAMPLE_LETTERS else "")
            articles.append(f"<article><h3>step {sample['step']:,}</h3><pre tabindex=0>{escape(text)}</pre></article>")
        name = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        parts.append(f'{name}<div class="samples">{"".join(articles)}</div>')
    return f"<section><h2>Samples</h2>{''.join(parts)}</section>" if parts else ""


def _config_section(runs: list[Run]) -> str:
    configs = [flattened({name: part for name, part in run.config.items() if name != "environment"}) for run in runs]
    if not any(configs):
        return ""
    parts = ["<h2>Configuration</h2>"]
    if len(runs) > 1:
        names = list(dict.fromkeys(name for config in configs for name in config))
        differing = [name for name in names if len({_shown(config, name) for config in configs}) > 1]
        head = "<tr><th>option</th>" + "".join(f"<th>{escape(run.name)}</th>" for run in runs) + "</tr>"
        rows = [
            f"<tr><td>{escape(name)}</td>"
            + "".join(f"<td>{escape(_shown(config, name))}</td>" for config in configs)
            + "</tr>"
            for name in differing
        ]
        diff = f'<div class="scroll"><table class="config" id="diff">{head}{"".join(rows)}</table></div>'
        parts.append(f"<h3>What differs</h3>{diff}" if rows else "<p>The runs have the same options.</p>")
    for run, config in zip(runs, configs, strict=True):
        rows = [f"<tr><td>{escape(name)}</td><td>{escape(_shown(config, name))}</td></tr>" for name in config]
        if rows:
            whose = f" of {escape(run.name)}" if len(runs) > 1 else ""
            table = f'<div class="scroll"><table class="config">{"".join(rows)}</table></div>'
            parts.append(f"<details><summary>All {len(rows)} options{whose}</summary>{table}</details>")
    return f"<section>{''.join(parts)}</section>"


def _shown(config: Record, name: str) -> str:
    return json.dumps(config[name], ensure_ascii=False) if name in config else "–"
