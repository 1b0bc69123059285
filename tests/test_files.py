"""Files and folders that are complete or not there, whatever happens while they are written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spurline.files import new_folder, publish, write_file


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_file_is_written_and_replaced_without_leftovers(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for content in ("first\nline\r\n", "zweite Fassung: ä\n"):
        write_file(path, content)
        assert path.read_bytes() == content.encode()
    assert names(tmp_path) == ["a.txt"]


def test_file_that_can_not_be_written_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    write_file(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(path, "new")
    assert (path.read_text(), names(tmp_path)) == ("old", ["a.txt"])


# Ends the process at the n-th operation on the folder, as a kill would.
KILLED = """
import os, sys
from spurline.files import new_folder, write_file
folder, number, count = sys.argv[1], int(sys.argv[2]), 0

def hook(event, args):
    global count
    if event in ("open", "os.rename", "os.mkdir") and folder in str(args[0]):
        count += 1
        if count == number:
            os._exit(9)

sys.addaudithook(hook)
write_file(f"{folder}/file", "new" * 100)
with new_folder(f"{folder}/made") as made:
    (made / "a").write_text("a")
    (made / "b").write_text("b")
"""


def test_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    seen = set()
    for number in range(1, 40):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "file").write_text("old")
        code = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(number)]).returncode
        made = names(folder / "made") if (folder / "made").exists() else None
        seen.add(((folder / "file").read_text()[:3], made and tuple(made)))
        if code == 0:
            break
    assert code == 0, "there were more operations than expected"
    assert seen == {("old", None), ("new", None), ("new", ("a", "b"))}


def test_names_and_content_reach_the_disk_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []
    fsync, replace = os.fsync, os.replace
    # What a descriptor is open for is read from /proc.
    monkeypatch.setattr(
        os, "fsync", lambda fd: (events.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), fsync(fd))
    )
    monkeypatch.setattr(os, "replace", lambda *paths: (events.append("rename"), replace(*paths)))
    (tmp_path / "temporary").write_text("content")
    publish(tmp_path / "temporary", tmp_path / "final")
    assert events == ["temporary", "rename", tmp_path.name]


def test_folder_takes_the_place_of_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    with new_folder(tmp_path / "made") as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "a").write_text("a")
        assert names(tmp_path / "made") == []
    assert (tmp_path / "made" / "deep" / "a").read_text() == "a"
    assert names(tmp_path) == ["made"]


def test_failure_inside_a_folder_leaves_nothing_not_even_its_parents(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()

    def fail() -> None:
        with new_folder(tmp_path / "kept" / "x" / "y" / "made") as folder:
            (folder / "a").write_text("a")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert names(tmp_path) == ["kept"]
    assert names(tmp_path / "kept") == []
