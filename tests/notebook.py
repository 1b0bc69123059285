"""Run a notebook's cells in this process, one after the other: `python tests/notebook.py FILE` fills in its outputs."""

from __future__ import annotations

import ast
import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any


def run_cells(notebook: dict[str, Any]) -> None:
    """Execute all code cells in one namespace, and put what each prints into its outputs."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        source = "".join(cell["source"])
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile(ast.parse(source), f"cell {number}", "exec"), namespace)
        text = printed.getvalue().splitlines(keepends=True)
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
        cell["execution_count"] = number


if __name__ == "__main__":
    path = Path(sys.argv[1]).resolve()
    notebook = json.loads(path.read_text(encoding="utf-8"))
    run_cells(notebook)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
