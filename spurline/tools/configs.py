"""`spurline configs`: list the model families and their presets, with parameter counts, or show one preset.

Torch-free, except that the memory of a rank, which is shown with one preset, is simulated.
"""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from spurline.config_io import family_of, not_among, preset_problems, to_json
from spurline.models import family_configs, family_names
from spurline.tools.console import complain, human
from spurline.tools.parsing import UserPackage, described, load_user_code, parse, take_arguments, wants_help

PROG = "spurline configs"
DESCRIPTION = """\
List the model families and their presets, with total parameters and active
parameters (those used for one token). With the NAME of a preset: show its config,
size, and memory per rank, as `spurline train --config NAME --dry-run` does.

examples
  spurline configs
  spurline configs deepseek_v3_debugmodel
  spurline configs deepseek_v3_debugmodel --json > mine.json
  spurline train --config-file mine.json"""
COLUMNS = ("module", "config", "total", "active", "summary")


@dataclass(frozen=True)
class Listing:
    module: Annotated[str, described("NAME")] = ""
    """List this model family only."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Print JSON: exact parameter counts, or with NAME a file for `spurline train --config-file`."""
    import_: UserPackage = ""


def main(argv: list[str]) -> int:
    names, options = take_arguments(argv, Listing())
    names = names[1:] if names[:1] == ["show"] else names  # `configs show NAME` is what other tools have
    problems = load_user_code(options)
    prog = f"{PROG} [NAME]" if wants_help(options) else PROG
    listing, not_understood = parse(Listing, Listing(), options, prog, DESCRIPTION)
    problems += not_understood
    module = listing.module or family_of(names[0] if names else "")
    if len(names) > 1:
        problems.append(f"expected one preset, got {' '.join(names)}")
    elif names:
        problems += [problem.removeprefix("config: ") for problem in preset_problems(module, names[0])]
    elif module:
        problems += not_among("--module", module, family_names())
    if problems:
        return complain(PROG, problems)
    if names:
        return _show(module, names[0], listing.json)
    presets = describe_presets([listing.module] if listing.module else family_names())
    if listing.json:
        print(json.dumps(presets, indent=2))
    else:
        _print_table([[p["module"], p["config"], human(p["total"]), human(p["active"]), p["summary"]] for p in presets])
    return 0


def _show(module: str, name: str, as_json: bool) -> int:
    if as_json:
        print(to_json(module, name, family_configs(module)[name]()), end="")
        return 0
    from spurline.tools.train import main as train

    return train(["--module", module, "--config", name, "--dry-run"])


def describe_presets(modules: list[str]) -> list[dict[str, Any]]:
    """One entry per preset, with the keys of COLUMNS."""
    presets = [(module, name, preset) for module in modules for name, preset in family_configs(module).items()]
    return [
        {
            "module": module,
            "config": name,
            "total": preset().model.num_params(),
            "active": preset().model.num_active_params(),
            "summary": (inspect.getdoc(preset) or "").partition("\n")[0],
        }
        for module, name, preset in presets
    ]


def _print_table(rows: list[list[str]]) -> None:
    """Print a formatted table on a terminal; plain, untruncated lines to a file or pipe."""
    if not sys.stdout.isatty():
        widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
        for row in [COLUMNS, *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in ("total", "active") else "left", no_wrap=name != "summary")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
