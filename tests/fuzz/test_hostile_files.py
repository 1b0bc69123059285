"""Every parser of ours answers a hostile file with its content or with a ValueError of few lines: thousands of cases.

`make test` takes 1,000, the same each time; `make test-slow` takes 10,000 others.
"""

import contextlib
import hashlib
import io
import json
import pickle
import random
import resource
import shutil
import struct
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
import version1_checkpoints as version1
from mutate import hostile
from torch import nn

from spurline import config_io
from spurline.config import Data
from spurline.data.formats import Document
from spurline.data.parquet_files import parquet_rows
from spurline.data.picture_files import picture_size, read_lines, read_picture
from spurline.data.prepare import prepare
from spurline.data.prepared_index import load_index
from spurline.data.text import open_text
from spurline.data.tokenizer import ByteTokenizer, load_tokenizer
from spurline.data.tokenizer_train import train_bpe
from spurline.hf.folder import find_tensors
from spurline.models.deepseek_v3.configs import deepseek_v3_debugmodel
from spurline.tools.console import raised_by_us
from spurline.tools.report import write_report
from spurline.tools.runs import compare, list_runs
from spurline.train.checkpoint.folder import CheckpointFolder
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.checkpoint.reader import StoredCheckpoint
from spurline.train.crash_loop import CrashLoop
from spurline.train.metrics.jsonl import JsonlWriter
from spurline.train.replay import read_recorded_step

MAX_GROWTH_BYTES = 400 * 2**20


class Parser:
    """A folder of valid files, the names of those to attack, and how they are read."""

    def __init__(self, folder):
        self.folder = folder
        self.names = self.make()

    always_reads = False
    """Whether it goes on without what it can't read."""

    def make(self):
        """Write the valid files; returns the names of those to attack."""
        raise NotImplementedError

    def attack(self, name, data):
        (self.folder / name).write_bytes(data)

    def read(self):
        raise NotImplementedError


class Report(Parser):
    def make(self):
        run = self.folder
        records = [
            {
                "step": step,
                "loss": 5.0 - step / 9,
                "lr": 1e-3,
                "expert_load": {"layers.1.moe": [1, 0, 3], "layers.2.moe": [2, 2, 0]},
                "routing": {"layers.1.moe": {"load": 1.2, "entropy": 0.9}},
                "step_time": 0.2,
                "data_wait": 0.1,
                "step_time_parts": {"forward": 0.1, "backward": 0.1},
                "warnings": ["w"],
                "own": {"layers.1.moe": 2.0, "other": {"x": 1}},
            }
            for step in range(1, 5)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (run / "samples.jsonl").write_text('{"step": 1, "text": "def"}\n{"step": 2, "text": "if"}\n')
        (run / "config.json").write_text('{"module": "a", "training": {"steps": 4}, "model": {"moe": {"k": [1, 2]}}}')
        return ["metrics.jsonl", "samples.jsonl", "config.json"]

    def read(self):
        write_report([str(self.folder)])


class LargeReport(Report):
    """With the load of many experts in a file of its own."""

    def make(self):
        with JsonlWriter(self.folder) as writer:
            for step in (1, 2):
                writer.write({"step": step, "loss": 1.0, "expert_load": {"a": [step] * 3000, "b": [1] * 2000}})
        return ["expert_load.bin", "metrics.jsonl"]


class ResumedMetrics(LargeReport):
    always_reads = True

    def read(self):
        JsonlWriter(self.folder, resume_from_step=1).close()


class Runs(Parser):
    """`spurline runs`: a file that can't be read means an unknown state, and no other run is lost."""

    always_reads = True

    def make(self):
        (self.folder / "metrics.jsonl").write_text('{"step": 1, "loss": 5, "validation_loss": 5, "bits_per_byte": 2}\n')
        (self.folder / "state.json").write_text('{"state": "failed", "why": "the loss is nan"}')
        (self.folder / "config.json").write_text('{"training": {"steps": 4}}')
        return ["metrics.jsonl", "state.json", "config.json"]

    def read(self):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            list_runs(self.folder, as_json=False)
            compare(self.folder, self.folder, as_json=False)
            list_runs(self.folder, as_json=True)
        assert out.getvalue().replace("\n", "").isprintable()


class Record(Parser):
    """checkpoint.json, with a checksum that fits: anybody can compute it."""

    def make(self):
        model = nn.Linear(3, 2)
        CheckpointManager(self.folder, 1, 0).save(1, model, torch.optim.AdamW(model.parameters()), {"tokens_seen": 1})
        return ["checkpoints/step-00000001/checkpoint.json"]

    def attack(self, name, data):
        try:
            stored = json.loads(data)
            digest = hashlib.sha256(json.dumps(stored["checkpoint"], sort_keys=True).encode()).hexdigest()
            data = json.dumps({**stored, "sha256": digest}).encode()
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        super().attack(name, data)

    def read(self):
        folder = CheckpointFolder(self.folder)
        folder.best()
        folder.record(1)
        assert all("\n" not in problem for problem in folder.problems(1))


class Metadata(Record):
    """metadata.json and tensors, with a record that fits them."""

    def make(self):
        super().make()
        return ["checkpoints/step-00000001/metadata.json", "checkpoints/step-00000001/rank-00000-00000.tensors"]

    def attack(self, name, data):
        Parser.attack(self, name, data)

    def read(self):
        model = nn.Linear(3, 2)
        step = self.folder / "checkpoints" / "step-00000001"
        record = CheckpointFolder(self.folder).record(1)
        files = [
            type(stored)(stored.name, (step / stored.name).stat().st_size, stored.sha256) for stored in record.files
        ]
        checkpoint = StoredCheckpoint(step, type(record)(**{**vars(record), "files": files}))
        for name in checkpoint.layout.tensors:
            checkpoint.read_tensor(name)
        manager = CheckpointManager(self.folder, 1, 0)
        manager._load(checkpoint, model, torch.optim.AdamW(model.parameters()), _one_rank())


def _one_rank():
    from spurline.train.checkpoint.ranks import Ranks

    return Ranks()


class Version1(Parser):
    """The pickles of earlier checkpoints, with a record that fits them."""

    def make(self):
        model = nn.Linear(3, 2)
        version1.save(self.folder, 1, model, torch.optim.AdamW(model.parameters()), {"tokens_seen": 1})
        metadata = pickle.loads((self.folder / "checkpoints" / "step-00000001" / ".metadata").read_bytes())
        assert metadata.storage_data
        return ["checkpoints/step-00000001/.metadata", "checkpoints/step-00000001/__0_0.distcp"]

    def attack(self, name, data):
        super().attack(name, data)
        version1.seal((self.folder / name).parent, 1)

    def read(self):
        step = self.folder / "checkpoints" / "step-00000001"
        checkpoint = StoredCheckpoint(step, CheckpointFolder(self.folder).record(1))
        assert isinstance(checkpoint.extra, dict)
        checkpoint.random_state(0)
        for name in checkpoint.layout.tensors:
            checkpoint.read_tensor(name)


class Prepared(Parser):
    """The index of prepared data, and the files that it lists."""

    def make(self):
        texts = self.folder.parent / f"{self.folder.name}-texts"
        texts.mkdir(exist_ok=True)
        for number in range(6):
            (texts / f"{number}.txt").write_text(f"document {number} " * 20)
        prepare([Data(path=str(texts))], str(self.folder), ByteTokenizer())
        return ["spurline-data.json", "source0.documents", "source0-00000.tokens"]

    def read(self):
        load_index(str(self.folder))
        data = open_text(Data(path=str(self.folder)), seq_len=16, seed=0)
        for window in range(len(data.train)):
            data.train.take([window])


class Parquet(Parser):
    """A table of conversations, and of texts."""

    def make(self):
        chats = [[{"role": "user", "content": "ab" * n}, {"role": "tool", "content": None}] for n in range(300)]
        rows = [{"messages": chat if n % 7 else None, "text": f"\u00e9{n % 3}"} for n, chat in enumerate(chats)]
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, self.folder / "a.parquet", compression="none", row_group_size=100)
        return ["a.parquet"]

    def read(self):
        path = str(self.folder / "a.parquet")
        assert all(set(row) <= {"messages", "text"} for _, row in parquet_rows(path, ["messages", "text"]))


class Safetensors(Parser):
    def make(self):
        for file, name in (("a.safetensors", "x"), ("b.safetensors", "y")):
            header = json.dumps({name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
            (self.folder / file).write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
        index = {"metadata": {"total_size": 32}, "weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return ["a.safetensors", "model.safetensors.index.json"]

    def attack(self, name, data):
        if name == "a.safetensors" and len(data) > 8 and data[0] % 2:  # a length that fits the changed header
            data = struct.pack("<Q", max(len(data) - 24, 0)) + data[8:]
        super().attack(name, data)

    def read(self):
        find_tensors(self.folder)


class Config(Parser):
    def make(self):
        config_io.save(self.folder / "config.json", "deepseek_v3", "deepseek_v3_debugmodel", deepseek_v3_debugmodel())
        return ["config.json"]

    def read(self):
        _, _, config = config_io.load(self.folder / "config.json")
        assert isinstance(config.training.steps, int)


class Tokenizer(Parser):
    def make(self):
        tokenizer = train_bpe([Document("a", "some text to learn from " * 20)], 300)
        (self.folder / "tokenizer.json").write_text(tokenizer.content)
        (self.folder / "tokenizer_config.json").write_text('{"bos_token": {"content": "<|endoftext|>"}}')
        return ["tokenizer_config.json", "tokenizer.json"]

    def read(self):
        tokenizer = load_tokenizer(str(self.folder))
        assert tokenizer.vocab_size > 0


class Pictures(Parser):
    def make(self):
        from PIL import Image

        rng = random.Random(0)
        image = Image.frombytes("RGB", (32, 16), rng.randbytes(32 * 16 * 3))
        for name, options in (("a.png", {}), ("a.jpg", {}), ("a.webp", {"lossless": True})):
            stream = io.BytesIO()
            image.save(stream, {"png": "PNG", "jpg": "JPEG", "webp": "WEBP"}[name[2:]], **options)
            (self.folder / name).write_bytes(stream.getvalue())
        lines = [{"image": name, "text": "a cat"} for name in ("a.png", "a.jpg", "a.webp")]
        (self.folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return ["samples.jsonl", "a.png", "a.jpg", "a.webp"]

    def read(self):
        for _, _, image in read_lines(str(self.folder / "samples.jsonl")):
            if image is not None and Path(image).parent == self.folder:
                read_picture(image, picture_size(image, 4096))


class BadSteps(Parser):
    def make(self):
        line = {"step": 3, "first_sequence": 16, "global_batch_size": 8, "local_batch_size": 2, "data_ranks": 2}
        (self.folder / "bad_steps.jsonl").write_text(
            "".join(json.dumps(line | {"step": step}) + "\n" for step in (3, 4))
        )
        return ["bad_steps.jsonl"]

    def read(self):
        recorded = read_recorded_step(self.folder, 3)
        assert recorded is None or next(recorded.micro_batches())


class Failures(Parser):
    always_reads = True

    def make(self):
        for resumed_from in (0, 2):
            crashes = CrashLoop(self.folder, {}, 4)
            crashes.step_back()
            crashes.start(resumed_from)
            with pytest.raises(RuntimeError), crashes.recorded(0, lambda: 3):
                raise RuntimeError("lost")
        (self.folder / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n{"step": 2, "loss": 5.0}\n')
        return ["failures.jsonl", "metrics.jsonl"]

    def read(self):
        assert CrashLoop(self.folder, {}, 0).step_back().num_checkpoints >= 0


PARSERS = {
    parser.__name__: parser
    for parser in (
        *(Report, LargeReport, Runs, ResumedMetrics, Record, Metadata, Version1),
        *(Prepared, Parquet, Safetensors, Config, Tokenizer, Pictures, BadSteps, Failures),
    )
}


def attack_all(make, folder, seeds):
    """Read each hostile version of the files: it must be read, or refused by a ValueError of ours."""
    valid, used = folder / "valid", folder / "used"
    valid.mkdir()
    parser = make(valid)
    parser.read()  # what was not changed is read
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for seed in seeds:
        shutil.rmtree(used, ignore_errors=True)
        shutil.copytree(valid, used)
        parser.folder = used
        name = parser.names[seed % len(parser.names)]
        parser.attack(name, hostile((valid / name).read_bytes(), f"{make.__name__} {seed}"))
        try:
            parser.read()
        except ValueError as error:
            problems = getattr(error, "problems", [str(error)])
            if not raised_by_us(error) or any("\n" in problem for problem in problems):
                raise AssertionError(f"seed {seed} of {make.__name__}, {name}: {error!r}") from error
            refused += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed} of {make.__name__}, {name}: {type(error).__name__}: {error}") from error
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert growth < MAX_GROWTH_BYTES, f"{growth:,} bytes"
    assert parser.always_reads or refused > len(seeds) // 4, f"only {refused} of {len(seeds)} were refused"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PARSERS)
def test_a_hostile_file_is_read_or_refused_in_one_line(tmp_path, name):
    attack_all(PARSERS[name], tmp_path, range(91))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PARSERS)
def test_ten_thousand_hostile_files_are_read_or_refused_in_one_line(tmp_path, name):
    attack_all(PARSERS[name], tmp_path, range(1000, 1910))
