import os
import subprocess
from pathlib import Path

import numpy

from spurline.parallel.compile_cache import broken_library, is_complete, remove_broken_libraries

LIBRARY = min(Path(numpy.__file__).parent.rglob("*.so"), key=lambda path: path.stat().st_size)


def put(folder, name, content, age=1000):
    path = folder / "ab" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (path.stat().st_mtime - age,) * 2)
    return path


def test_libraries_that_a_killed_process_left_incomplete_are_removed(tmp_path):
    whole = LIBRARY.read_bytes()
    kept = [put(tmp_path, "whole.so", whole), put(tmp_path, "code.cpp", b""), put(tmp_path, "new.so", b"", age=0)]
    broken = [put(tmp_path, "empty.so", b""), put(tmp_path, "cut.so", whole[:-100]), put(tmp_path, "cut.o", b"\x7fELF")]
    kept[2].write_bytes(whole)
    assert remove_broken_libraries(tmp_path, patience=0) == sorted(broken)
    assert [path.exists() for path in (*kept, *broken)] == [True] * 3 + [False] * 3


def test_a_library_in_the_making_is_left_alone(tmp_path):
    """One that changes while it is looked at."""
    path = put(tmp_path, "made.so", b"", age=0)
    maker = subprocess.Popen(["sh", "-c", f"sleep 0.3; printf 'more' >> {path}"])
    assert remove_broken_libraries(tmp_path, patience=2.0) == []
    assert maker.wait() == 0
    assert not is_complete(path)


def test_the_message_of_the_loader_names_the_library():
    message = "InductorError: ImportError: /tmp/torchinductor_me/ab/cabc.so: file too short"
    assert broken_library(message) == "/tmp/torchinductor_me/ab/cabc.so"
    assert broken_library("ImportError: no module named spurline") == ""
