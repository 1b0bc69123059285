"""The fenced blocks of a page of documentation, and the comments in front of them that say what becomes of each.

A block of commands (`bash`) or of code (`python`) is run by tests/test_docs.py, one by one, and what a block of
`console` shows is compared, unless a comment in front of it says `not run: WHY`, `run by TEST` or `file: NAME` (written
to a file, for a command to run). With `all blocks: ` before that, at the top of a page, it is for all of them.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])
BLOCK = re.compile(r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S)
WHOLE_PAGE = re.compile(r"^<!-- all blocks: (.*) -->$", re.M)
PROGRAMS = r"spurline(?= [a-z-])(?! \w+: )|make|pip|python|torchrun|sbatch|kubectl|docker"
COMMAND = re.compile(rf"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:(?:{PROGRAMS})\b(?= )|\./\w)", re.M)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    mark: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}, line {self.line}"

    @property
    def has_commands(self) -> bool:
        """Whether it shows something to type; other blocks show output, files or code."""
        return self.language == "bash" or (
            self.language in ("", "text", "console", "sh") and bool(COMMAND.search(self.text))
        )

    @property
    def kind(self) -> str:
        """What becomes of it: `run` here, `not run`, `run by` another test, or written to a `file`."""
        return next((kind for kind in ("not run", "run by", "file") if self.mark.startswith(kind)), "run")

    @property
    def reason(self) -> str:
        return self.mark.removeprefix(self.kind).lstrip(":").strip()

    def commands(self) -> list[list[str]]:
        """The words of each command."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    whole = WHOLE_PAGE.search(text)
    return [
        Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            found["language"],
            found["text"],
            found["mark"] or (whole[1] if whole else ""),
        )
        for found in BLOCK.finditer(text)
    ]
