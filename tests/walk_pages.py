"""Run the commands of the README and of docs/ as they are written, at their full size, the way a reader types them.

    python tests/walk_pages.py [docs/runs.md ...]     # `make walk`, by default all pages: more than an hour

tests/test_docs.py runs the same commands with fewer steps and less text. Here each page gets a clone of the committed
tree, and a shell runs its commands in it, one after the other. A line is printed for each: seconds, exit code, command.
It fails if an exit code is not the documented one, or if a command changes a file of an earlier run. Blocks that are
marked `not run`, and programs that only installations or schedulers have, are listed and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from doc_blocks import HAS, PAGES, ROOT, blocks_of
from earlier_runs import changes, files_of_runs, run_to_resume

sys.path.insert(0, str(ROOT / "tests/data"))
from chats import CHATS, make_model

LEFT_OUT = ("make", "pip", "docker", "sbatch", "kubectl")
FOLLOWS_A_RUN = "--serve"
SECONDS_TO_FOLLOW = 10
EXIT_CODES = {"--optimizer.lr 1e18": 3, "*.expert.* lr_factor": 2}  # pages show how these fail
TEXT_FOLDERS = ("books", "my_text")
MODELS_OF_OTHERS = ("Qwen3-0.6B", "Qwen3-30B-A3B")
QUESTION = b"hello there\n"
"""On standard input: what `spurline generate --chat` answers."""


def prepare(page: str) -> None:
    """In a clone: what the page says that its reader has."""
    for folder in TEXT_FOLDERS:
        shutil.copytree("docs", folder, ignore=shutil.ignore_patterns("images", "*.ipynb"))
    Path("code.jsonl").write_text(
        "".join(json.dumps({"content": path.read_text()}) + "\n" for path in Path("spurline").rglob("*.py"))
    )
    talks = [chat for chat in CHATS if "messages" in chat and "tools" not in chat]
    Path("chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in talks * 50))
    for name in MODELS_OF_OTHERS:
        if name in Path(page).read_text():
            make_model(Path(name), longest=4096)
    for line in HAS.get(page, []):
        if "outputs" in line:  # others make a model of the same names
            run(f"spurline {line} --training.steps 20")
    for block in blocks_of(Path(page)):
        if block.kind == "file":
            Path(block.reason).write_text(block.text)


def run(line: str) -> tuple[int, float, str]:
    """Exit code, seconds, and the end of what it printed."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path("examples/my_moe_pack").resolve()),  # as if it were installed
    }
    start = time.monotonic()
    if FOLLOWS_A_RUN in line:
        line = f"exec {line}"  # Ctrl-C is for the program, not for the shell around it
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile() as typed:
        typed.write(QUESTION)
        typed.seek(0)
        process = subprocess.Popen(
            line, shell=True, env=environment, stdin=typed, stdout=output, stderr=output, process_group=0
        )
        if FOLLOWS_A_RUN in line:
            time.sleep(SECONDS_TO_FOLLOW)
            os.killpg(process.pid, signal.SIGINT)
        code = process.wait()
        output.seek(0)
        printed = output.read()
    return code, time.monotonic() - start, printed[-2000:]


def walk(page: str) -> bool:
    """Whether all commands of a page did what it says."""
    as_written, before = True, files_of_runs()
    for block in blocks_of(Path(page)):
        for line in block.lines() if block.language in ("bash", "console") else []:
            if block.kind == "not run" or shlex.split(line)[0] in LEFT_OUT:
                print(f"      left out  {line}", flush=True)
                continue
            words = shlex.split(line, comments=True)
            arguments = words[words.index("spurline") + 1 :] if "spurline" in words else ["train", *words]
            resumed = run_to_resume(arguments)
            code, seconds, printed = run(line)
            expected = next((code for option, code in EXIT_CODES.items() if option in line), 0)
            changed = changes(arguments, resumed, before)[1]
            print(f"{seconds:6.1f} s  exit code {code}  {line}", flush=True)
            if code != expected or changed:
                as_written = False
                print(f"    expected exit code {expected}; earlier files changed: {sorted(changed)}\n{printed}")
            before = files_of_runs()
    print(f"{page}: {len(before)} files of runs, none changed by a later command" if as_written else f"{page}: FAILED")
    return as_written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [str(page.relative_to(ROOT)) for page in PAGES if any(b.has_commands for b in blocks_of(page))]
    parser.add_argument("pages", nargs="*", help="pages to walk (default: all)")
    pages = parser.parse_args().pages or names
    unknown = set(pages) - set(names)
    if unknown:
        parser.error(f"no page with commands: {', '.join(sorted(unknown))}")
    failed = []
    for page in pages:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["git", "clone", "--quiet", str(ROOT), f"{folder}/spurline"], check=True)
            os.chdir(f"{folder}/spurline")
            prepare(page)
            if not walk(page):
                failed.append(page)
            os.chdir(ROOT)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
