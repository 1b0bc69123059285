"""Bits per byte of held-out text: a calculation by hand, other tokenizers, conversations."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from spurline.data.batch import IGNORE_INDEX
from spurline.data.formats import Document
from spurline.data.tokenizer_train import save_tokenizer, train_bpe
from spurline.testing.tiny import tiny_model, tiny_run, write_words
from spurline.train.trainer import make_trainer
from spurline.train.validation import count_text_bytes, validate

WORDS = "a train of seven cars rolls over the bridge, the engine first; then it stops and waits for rain.\n"


def run_on_equal_documents(folder, tokenizer):
    """One of ten equal documents is held out, in windows of one label each, so that none is left out at the end."""
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}.txt").write_text(WORDS * 3)
    return tiny_run(
        folder,
        tiny_model(vocab_size=320),
        training={"seq_len": 1, "local_batch_size": 64},
        metrics={"validation_batches": 100},
        data={"tokenizer": tokenizer},
    )


@torch.no_grad()
def test_bits_are_nats_over_the_bytes_of_the_text_and_ln_2(tmp_path):
    trainer = make_trainer(tiny_run(write_words(tmp_path), metrics={"validation_batches": 100}))
    (batch,) = trainer.data.validation.batches(10**6, 1)
    logits = trainer.model(batch.tokens_BL)
    nats = F.cross_entropy(logits.flatten(0, 1).double(), batch.labels_BL.flatten(), reduction="sum").item()
    text = trainer.data.tokenizer.decode(batch.labels_BL.flatten())
    assert validate(trainer).bits_per_byte == pytest.approx(nats / len(text.encode()) / math.log(2), rel=1e-6)


def test_a_boundary_between_documents_adds_bits_and_no_bytes(tmp_path):
    run = tiny_run(write_words(tmp_path, *"abcdefgh", num_words=40), data={"validation_fraction": 0.5})
    trainer = make_trainer(replace(run, metrics=replace(run.metrics, validation_batches=100)))
    (batch,) = trainer.data.validation.batches(10**6, 1)
    num_boundaries = int((batch.labels_BL == 256).sum())
    assert num_boundaries > 0
    trainer.loss_of = lambda batch: torch.tensor(float(batch.labels_BL.numel()))  # a nat a token
    bits, tokens = validate(trainer).bits_per_byte, batch.labels_BL.numel()
    assert bits == pytest.approx(tokens / (tokens - num_boundaries) / math.log(2))


def test_bytes_and_bpe_agree_on_a_model_that_predicts_the_same(tmp_path):
    """It predicts each byte by itself; a token of several bytes costs what they cost together."""
    held_out = (WORDS * 3).encode()
    nats = [1 + byte % 7 / 3 for byte in range(256)]
    save_tokenizer(train_bpe([Document("a", WORDS)], vocab_size=320), str(tmp_path / "bpe.json"))
    found = {}
    for name, tokenizer in {"bytes": "", "bpe": str(tmp_path / "bpe.json")}.items():
        trainer = make_trainer(run_on_equal_documents(tmp_path / name, tokenizer))
        decode = trainer.data.tokenizer.decode
        trainer.loss_of = lambda batch, decode=decode: torch.tensor(
            sum(nats[byte] for byte in decode(batch.labels_BL.flatten()).encode())
        )
        found[name] = validate(trainer)
    expected = sum(nats[byte] for byte in held_out) / len(held_out) / math.log(2)
    assert found["bytes"].bits_per_byte == pytest.approx(expected, rel=1e-6)
    assert found["bpe"].bits_per_byte == pytest.approx(expected, rel=1e-6)
    assert found["bpe"].loss > 1.3 * found["bytes"].loss


def test_labels_that_the_loss_ignores_are_no_text():
    labels_BL = torch.tensor([[0, 2, IGNORE_INDEX], [1, IGNORE_INDEX, 2]])
    assert count_text_bytes(labels_BL, torch.tensor([3, 0, 5])) == 3 + 5 + 0 + 5
