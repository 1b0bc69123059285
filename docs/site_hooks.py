"""What mkdocs can't do by itself: pages made of files that lie elsewhere, and links that only a checkout can follow."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md"}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the project's own pages, and the tutorial, which is a notebook."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    notebook = json.loads((ROOT / "docs/tutorial.ipynb").read_text(encoding="utf-8"))
    files.append(File.generated(config, "tutorial.md", content="\n\n".join(map(_cell, notebook["cells"]))))
    return files


def _cell(cell: dict[str, Any]) -> str:
    """A cell of a notebook as Markdown, with what it printed."""
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    printed = "".join(line for output in cell["outputs"] for line in output.get("text", []))
    return f"```python\n{source}\n```" + (f"\n\n```text\n{printed.rstrip()}\n```" if printed.strip() else "")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to pages of the site lead there; those to other files of the project become their plain text."""
    return LINK.sub(lambda link: _link(*link.groups()), markdown)


def _link(text: str, target: str) -> str:
    path, _, anchor = target.partition("#")
    of_page = {source: page for page, source in PAGES.items()}
    page = of_page.get(path.removeprefix("../"), path.removeprefix("docs/"))
    if page.startswith("../"):
        return text
    return f"[{text}]({page}{'#' if anchor else ''}{anchor})"
