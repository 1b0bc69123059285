"""`spurline train` with a back end that is not here: one line, before anything starts. And 8-bit matmuls."""

import pytest

from spurline.testing.tiny import write_words

TINY = ["--training.steps", "2", "--training.seq_len", "16", "--training.local_batch_size", "2", "--data.path", "text"]
TINY += ["--metrics.sample_tokens", "0", "--training.threads", "1"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--model.moe.experts_backend", "triton"], "experts_backend 'triton' runs on NVIDIA's and AMD's accelerators"),
        (
            ["--model.moe.experts_backend", "stream", "--precision.recipe", "mxfp8"],
            "experts_backend 'stream' does not round operands, as mxfp8 does",
        ),
        (
            ["--precision.recipe", "float8", "--precision.layers", "lm_head"],
            "precision.layers 'lm_head' names no layer",
        ),
    ],
)
def test_what_is_missing_is_one_line_before_anything_starts(problems, tmp_path, options, complaint) -> None:
    (tmp_path / "text").mkdir()
    write_words(tmp_path / "text")
    (found,) = problems(*TINY, *options)
    assert found.startswith(complaint)


def test_layers_without_a_recipe_are_refused(problems) -> None:
    assert problems("--precision.layers", "*.experts") == ["precision.layers needs a recipe: float8 or mxfp8"]


def test_converted_layers_are_listed_at_start(train, tmp_path) -> None:
    (tmp_path / "text").mkdir()
    write_words(tmp_path / "text")
    outcome = train(*TINY, "--precision.recipe", "float8", "--precision.layers", "*.experts", "layers.*.attention.wo")
    assert outcome.code == 0, outcome.err
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("float8 matmuls")]
    assert line == ("float8 matmuls, emulated, in 7 layers: layers.*.attention.wo (4), layers.*.moe.experts (3)")
