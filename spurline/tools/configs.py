"""`spurline configs`: list the model families and their presets, with parameter counts. Torch-free."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from spurline.config_io import not_among
from spurline.models import family_configs, family_names
from spurline.tools.console import complain, human
from spurline.tools.parsing import UserPackage, described, load_user_code, parse

PROG = "spurline configs"
DESCRIPTION = """\
List the model families and their presets, with total parameters and active
parameters (those used for one token)."""
COLUMNS = ("module", "config", "total", "active", "summary")


@dataclass(frozen=True)
class Listing:
    module: Annotated[str, described("NAME")] = ""
    """List this model family only."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff, described()] = False
    """Print JSON, with exact parameter counts."""
    import_: UserPackage = ""


def main(argv: list[str]) -> int:
    problems = load_user_code(argv)
    listing, not_understood = parse(Listing, Listing(), argv, PROG, DESCRIPTION)
    problems += not_understood
    if listing.module:
        problems += not_among("--module", listing.module, family_names())
    if problems:
        return complain(PROG, problems)
    presets = describe_presets([listing.module] if listing.module else family_names())
    if listing.json:
        print(json.dumps(presets, indent=2))
    else:
        _print_table([[p["module"], p["config"], human(p["total"]), human(p["active"]), p["summary"]] for p in presets])
    return 0


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
