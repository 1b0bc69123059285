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

DEBUG = "train --module deepseek_v3 --config deepseek_v3_debugmodel"
QWEN = "train --module qwen3 --config qwen3_debugmodel"
# What a reader of a page has already, by the commands that make it.
HAS = {
    "docs/finetuning.md": [f"{QWEN}_moe --checkpoint.enable --job.dump_folder made", "convert to-hf made Qwen3-0.6B"],
    "docs/lora.md": [f"{QWEN}_moe --checkpoint.enable --job.dump_folder made", "convert to-hf made Qwen3-30B-A3B"],
    "docs/models.md": [f"{QWEN} --checkpoint.enable --job.dump_folder outputs/dense"],
    "docs/optimizers.md": [f"{QWEN}_moe --checkpoint.enable --job.dump_folder outputs/qwen"],
    "docs/report.md": [f"{DEBUG} --job.dump_folder outputs/{name}" for name in ("my_run", "a", "b")],
    "docs/routing.md": [f"{DEBUG} --checkpoint.enable --job.dump_folder outputs/my_run"],
}


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

    def lines(self) -> list[str]:
        """Each command as it is typed; what a `console` shows of its output is left out."""
        lines = re.sub(r"\s*\\\n\s*", " ", self.text).splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [line for line in lines if shlex.split(line, comments=True)]

    def commands(self) -> list[list[str]]:
        """The words of each command."""
        return [shlex.split(line, comments=True) for line in self.lines()]


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
