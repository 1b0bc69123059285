import os
import re
import sysconfig
from pathlib import Path

import pytest

from spurline.config import Data
from spurline.data import check_data
from spurline.data.sources import read_documents, stable_hash


def names(data: Data) -> list[str]:
    return [document.name for document in read_documents(data)]


def texts(data: Data) -> dict[str, str]:
    """Name -> text of all documents, with the pieces of one joined."""
    found: dict[str, str] = {}
    for document in read_documents(data):
        found[document.name] = found.get(document.name, "") + document.text
    return found


def test_order_is_that_of_the_hash_of_the_name_and_never_changes(make_files):
    folder = make_files(dict.fromkeys(("a.txt", "b.txt", "c.txt", "sub/a.txt", "sub/deep/d.txt"), "text"))
    # Written down, since a different order is a different run: this list must survive every refactoring.
    assert names(Data(str(folder))) == ["a.txt", "c.txt", "sub/deep/d.txt", "b.txt", "sub/a.txt"]


def test_order_does_not_depend_on_the_order_of_the_file_system(make_files, monkeypatch):
    data = Data(str(make_files({f"{i % 3}/{i}.txt": str(i) for i in range(20)})))
    expected = names(data)
    real_walk = os.walk

    def walk_backwards(*args, **kwargs):
        for folder, folder_names, file_names in real_walk(*args, **kwargs):
            folder_names.sort(reverse=True)
            file_names.sort(reverse=True)
            yield folder, folder_names, file_names

    def walk_forwards(*args, **kwargs):
        for folder, folder_names, file_names in real_walk(*args, **kwargs):
            folder_names.sort()
            file_names.sort()
            yield folder, folder_names, file_names

    for walk in (walk_backwards, walk_forwards):
        monkeypatch.setattr(os, "walk", walk)
        assert names(data) == expected


def test_order_does_not_depend_on_where_the_folder_is(make_files):
    files = {f"{i}.txt": "text" for i in range(10)}
    folder = make_files({f"{place}/{name}": text for place in ("here", "there") for name, text in files.items()})
    assert names(Data(str(folder / "here"))) == names(Data(f"{folder}/there/")) != sorted(files)


def test_hashes_for_two_purposes_differ():
    assert stable_hash("order", "a") != stable_hash("split", "a")


def test_a_file_is_one_document_with_its_bytes_unchanged(make_files):
    content = "first\r\nsecond\n\n\tgrün 🚂\ufeff"
    path = make_files({"notes.txt": content}) / "notes.txt"
    assert texts(Data(str(path))) == {"notes.txt": content}


def test_a_path_may_begin_with_a_tilde(make_files, monkeypatch):
    monkeypatch.setenv("HOME", str(make_files({"notes.txt": "text"})))
    assert texts(Data("~/notes.txt")) == {"notes.txt": "text"}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*", {"a.md", "b.txt", "docs/c.md", "docs/deep/d.md", "other/docs/e.md"}),
        ("*.md", {"a.md", "docs/c.md", "docs/deep/d.md", "other/docs/e.md"}),
        ("**/*.md", {"a.md", "docs/c.md", "docs/deep/d.md", "other/docs/e.md"}),
        ("docs/*.md", {"docs/c.md", "other/docs/e.md"}),
        ("docs/**/*.md", {"docs/c.md", "docs/deep/d.md", "other/docs/e.md"}),
        ("docs/**", {"docs/c.md", "docs/deep/d.md", "other/docs/e.md"}),
        ("[ab].*", {"a.md", "b.txt"}),
    ],
)
def test_pattern_chooses_files_at_any_depth(make_files, pattern, expected):
    folder = make_files(dict.fromkeys(("a.md", "b.txt", "docs/c.md", "docs/deep/d.md", "other/docs/e.md"), "text"))
    assert set(names(Data(str(folder), pattern))) == expected


def test_hidden_and_empty_files_are_left_out(make_files):
    folder = make_files({"a.txt": "text", "empty.txt": "", ".hidden": b"\xff", ".git/config": b"\xff"})
    assert names(Data(str(folder))) == ["a.txt"]


def test_standard_library_is_the_default_and_reads_back_byte_for_byte():
    root = Path(sysconfig.get_path("stdlib"))
    documents = texts(Data())
    assert sum(map(len, documents.values())) > 1_000_000
    assert {"argparse.py", "asyncio/runners.py", "json/decoder.py"} <= documents.keys()
    for name, text in documents.items():
        assert (root / name).read_bytes() == text.encode()


def test_standard_library_leaves_out_tests_packages_and_what_depends_on_the_build():
    unwanted = re.compile(
        r"(^|/)(tests?|site-packages|dist-packages|idlelib|lib2to3|__pycache__)/|_sysconfigdata|config-"
    )
    found = names(Data())
    assert [name for name in found if unwanted.search(name)] == []
    assert all(name.endswith(".py") for name in found)


def assert_refused(data: Data, *words: str) -> None:
    """Both the early check and the reading refuse, in one line that has these words."""
    (problem,) = check_data(data)
    with pytest.raises(ValueError, match=re.escape(problem)):
        list(read_documents(data))
    assert problem.startswith("data.")
    assert "\n" not in problem
    for word in words:
        assert word in problem


def test_missing_path_is_refused(tmp_path):
    assert_refused(Data(str(tmp_path / "nowhere")), "data.path", "nowhere", "does not exist")


def test_path_that_is_neither_file_nor_folder_is_refused():
    assert_refused(Data(os.devnull), "data.path", os.devnull, "neither a file nor a folder")


@pytest.mark.parametrize("pattern", ["*.md", "", "sub", ".hidden"])
def test_folder_without_matching_files_is_refused(make_files, pattern):
    folder = make_files({"a.txt": "text", "sub/b.txt": "text", ".hidden": "text"})
    assert_refused(Data(str(folder), pattern), "data.pattern", repr(pattern), str(folder))


def test_missing_standard_library_asks_for_a_path(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert_refused(Data(), "data.path is required", str(tmp_path))


def test_unreadable_file_is_refused(tmp_path):
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    assert_refused(Data(str(tmp_path)), "data.path", "dangling.txt", "No such file")


def test_unreadable_folder_is_refused_instead_of_skipped(make_files, monkeypatch):
    folder = make_files({"locked/b.txt": "text"})
    real_scandir = os.scandir

    def scandir(path):
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return real_scandir(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert_refused(Data(str(folder)), "data.path", "locked", "Permission denied")


def test_data_set_of_empty_files_is_refused(make_files):
    folder = make_files({"a.txt": "", "b.txt": ""})
    for data in (Data(str(folder)), Data(str(folder / "a.txt"))):
        with pytest.raises(ValueError, match=r"^data\.path .* has no text"):
            list(read_documents(data))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"plain\xff", "byte 0xff at offset 5"),
        (b"\x89PNG\r\n\x1a\n\0\0", "byte 0x89 at offset 0"),
        (b"cut \xe2\x82", "byte 0xe2 at offset 4"),
        (b"NUL\0byte", "a NUL byte at offset 3"),
        ("utf-16".encode("utf-16-le"), "a NUL byte at offset 1"),
    ],
)
def test_file_that_is_not_text_is_refused_with_name_and_offset(make_files, content, what):
    folder = make_files({"good.txt": "text", "bad.bin": content})
    for path in (folder, folder / "bad.bin"):
        with pytest.raises(ValueError, match=rf"^data\.path: '.*bad\.bin' is not UTF-8 text \({what}\).*data\.pattern"):
            list(read_documents(Data(str(path))))
    assert names(Data(str(folder), "*.txt")) == ["good.txt"]


def test_sound_data_have_no_problems(make_files):
    folder = make_files({"a.txt": "text"})
    assert check_data(Data()) == check_data(Data(str(folder))) == check_data(Data(str(folder / "a.txt"))) == []
