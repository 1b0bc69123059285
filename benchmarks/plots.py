"""Draw the plots of docs/performance.md from the output of `spurline bench --json FILE`.

pip install matplotlib
python benchmarks/plots.py FILE [FILE ...] docs/images
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

Figures = list[dict[str, Any]]

COLORS = {
    "spurline": "#1f6feb",
    "torchtitan": "#d29922",
    "transformers grouped_mm": "#8b949e",
    "transformers eager": "#c9d1d9",
}
KINDS = ("forward", "forward+backward")
HIGHEST = 1.6
"""Bars are clipped at this ratio and labeled with their value."""


def draw_layers(figures: Figures, path: Path) -> None:
    """Time of each layer relative to the floor, by thread count and pass."""
    found = {(f["threads"], f["what"], f["case"], f["candidate"]): f["to_floor"] for f in figures}
    threads = sorted({key[0] for key in found})
    cases = list(dict.fromkeys(f["case"] for f in figures if f["case"] != "medium_uniform"))
    grid, axes = plt.subplots(len(threads), 2, figsize=(11, 3.2 * len(threads)), sharey=True, squeeze=False)
    for row, num_threads in enumerate(threads):
        for axis, kind in zip(axes[row], KINDS, strict=True):
            for number, (name, color) in enumerate(COLORS.items()):
                ratios = [found.get((num_threads, kind, case, name)) for case in cases]
                places = [place + 0.2 * (number - 1.5) for place in range(len(cases))]
                bars = axis.bar(
                    places, [min(ratio or 0, HIGHEST) for ratio in ratios], width=0.19, color=color, label=name
                )
                for bar, ratio in zip(bars, ratios, strict=True):
                    if ratio and ratio > HIGHEST:
                        place = (bar.get_x() + bar.get_width() / 2, HIGHEST)
                        axis.annotate(f"{ratio:.2g}", place, ha="center", va="bottom", fontsize=7)
            axis.axhline(1.0, color="black", linewidth=0.8)
            axis.set_xticks(range(len(cases)), [case.replace("_", "\n") for case in cases])
            axis.set_ylim(0, HIGHEST + 0.15)
            axis.set_title(f"{kind}, {num_threads} thread{'s' if num_threads > 1 else ''}", fontsize=10)
        axes[row][0].set_ylabel("times the floor")
    axes[0][1].legend(fontsize=8, loc="upper left", ncols=2)
    save(grid, path)


def draw_sweep(figures: Figures, path: Path) -> None:
    """Time of our layer and of the floor as one size grows."""
    fields = list(dict.fromkeys(f["case"].split()[0] for f in figures))
    grid, axes = plt.subplots(1, len(fields), figsize=(11, 3.2), squeeze=False)
    for axis, field in zip(axes[0], fields, strict=True):
        for name, color in (("floor", "#8b949e"), ("spurline", COLORS["spurline"])):
            points = [
                (int(f["case"].split()[1]), f["value"])
                for f in figures
                if f["case"].startswith(f"{field} ") and f["candidate"] == name and f["threads"] == 1
            ]
            axis.loglog(*zip(*points, strict=True), marker="o", color=color, label=name)
            axis.set_xticks([size for size, _ in points], [f"{size:,}" for size, _ in points])
        axis.set_yticks([30, 60, 120, 240], ["30", "60", "120", "240"])
        axis.minorticks_off()
        axis.set_xlabel(field.replace("num_", "").replace("top_k", "experts per token"))
    axes[0][0].set_ylabel("ms, forward+backward")
    axes[0][0].legend(fontsize=8)
    save(grid, path)


def save(grid: Any, path: Path) -> None:
    grid.tight_layout()
    grid.savefig(path, metadata={"Date": None})
    print(path)


def main() -> None:
    *sources, folder = sys.argv[1:]
    mpl.rcParams["svg.fonttype"] = "none"  # keep text as text
    mpl.rcParams["svg.hashsalt"] = "spurline"  # reproducible output
    figures = [figure for source in sources for figure in json.loads(Path(source).read_text())]
    Path(folder).mkdir(parents=True, exist_ok=True)
    for part, draw in (("layers", draw_layers), ("sweep", draw_sweep)):
        if chosen := [figure for figure in figures if figure["part"] == part]:
            draw(chosen, Path(folder) / f"{part}.svg")


if __name__ == "__main__":
    main()
