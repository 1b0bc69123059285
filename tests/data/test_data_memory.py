"""How much memory and time data take; memory is measured in processes of their own."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from spurline.config import Data
from spurline.data import open_data
from spurline.data.prepare import prepare
from spurline.data.tokenizer import ByteTokenizer

PREPARE = """
import resource, sys
from spurline.config import Data
from spurline.data.prepare import prepare
from spurline.data.tokenizer import ByteTokenizer
prepare([Data(sys.argv[1])], sys.argv[2], ByteTokenizer())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""
READ = """
import sys
from spurline.config import Data
from spurline.data.text import open_text

def own_memory():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
    return int(line.split()[1]) / 1024

before = own_memory()
text = open_text(Data(sys.argv[1]), seq_len=256, seed=0)
num_windows = len(text.train)
assert num_windows * 256 > 35_000_000
for start in range(0, num_windows, 1000):
    text.train.take(text.order.ids(start, 64))
print(own_memory() - before)
"""


def run(code: str, *arguments: object) -> float:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 40 MB of text as one file."""
    folder = tmp_path_factory.mktemp("large")
    line = "All work and no play makes a dull model.\n"
    (folder / "large.txt").write_text(line * (40_000_000 // len(line)))
    return folder


def test_text_is_prepared_and_read_in_bounded_memory(large):
    (large / "small.txt").write_text("All work and no play makes a dull model.\n" * 50_000)
    small, much = (run(PREPARE, large / f"{name}.txt", large / name) for name in ("small", "large"))
    assert much - small < 10  # MiB; the tokens alone are 76
    assert run(READ, large / "large") < 10


def test_batch_takes_less_than_a_fiftieth_of_a_step(large):
    prepare([Data(str(large / "large.txt"))], str(large / "again"), ByteTokenizer())
    train = open_data(Data(str(large / "again")), seq_len=256, seed=0).train
    train.batch(0, 4)
    begin = time.process_time()
    for step in range(100):
        train.batch(4 * step, 4)
    seconds = (time.process_time() - begin) / 100
    assert seconds < 0.17 / 50  # 0.17 s is a step of the debug model with 4 x 256 tokens on one core
