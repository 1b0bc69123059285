"""Pictures with texts as batches: drawn scenes, a user's own files, packing, patches."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spurline.config import Data, RunConfig
from spurline.data import check_data, open_data
from spurline.data.batch import IGNORE_INDEX, Batch, Images, Spot
from spurline.data.patches import FEATURE_SIZE, PATCH_DIM, fitting_size, to_patches
from spurline.data.picture_files import picture_size, read_picture
from spurline.data.picture_samples import Picture, Sample
from spurline.data.picture_tokenizer import PictureTokenizer
from spurline.data.pictures import PictureWindows
from spurline.data.scenes import make_scene
from spurline.data.tokenizer import ByteTokenizer
from spurline.models.qwen3.configs import Qwen3Config

SCENES = Data(kind="pictures")
opened = cache(lambda seq_len, seed: open_data(SCENES, seq_len, seed))
START, FEATURE, END, BOUNDARY = 257, 258, 259, 256


def test_patches_are_blocks_of_two_by_two_with_colors_frames_rows_and_columns():
    pixels_HWC = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    patches = to_patches(pixels_HWC).reshape(-1, 3, 2, 16, 16)
    assert len(patches) == 4 * 6
    number = 0
    for block_row in range(2):
        for block_column in range(3):
            for row in range(2):
                for column in range(2):
                    y, x = (2 * block_row + row) * 16, (2 * block_column + column) * 16
                    expected_CHW = pixels_HWC[y : y + 16, x : x + 16].transpose(2, 0, 1) / 127.5 - 1
                    for frame in range(2):
                        np.testing.assert_allclose(patches[number, :, frame], expected_CHW, atol=1e-6)
                    number += 1


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1024, 300_000))
def test_fitting_size_is_whole_features_within_the_limit_and_nearly_of_the_same_form(height, width, max_pixels):
    new_height, new_width = fitting_size(height, width, max_pixels)
    assert new_height % FEATURE_SIZE == new_width % FEATURE_SIZE == 0
    assert 0 < new_height * new_width <= max_pixels
    scale = min(1, (max_pixels / (height * width)) ** 0.5)
    if min(height, width) * scale > 4 * FEATURE_SIZE:
        assert new_height == pytest.approx(height * scale, abs=FEATURE_SIZE)
        assert new_width == pytest.approx(width * scale, abs=FEATURE_SIZE)


def middle_of(scene, thing):
    return round((thing.row + 0.5) * FEATURE_SIZE + thing.shift[0]), round(
        (thing.column + 0.5) * FEATURE_SIZE + thing.shift[1]
    )


def test_captions_are_true_of_what_is_drawn():
    seen = set()
    for number in range(300):
        scene = make_scene(number)
        pixels_HWC = scene.draw()
        assert pixels_HWC.shape == (*scene.size, 3)
        places = [middle_of(scene, thing) for thing in scene.things]
        for thing, (y, x) in zip(scene.things, places, strict=True):
            color = pixels_HWC[y, x].astype(int)
            strongest = {"red": 0, "green": 1, "blue": 2}.get(thing.color)
            assert strongest is None or color.argmax() == strongest
            assert f"a {thing.color} {thing.shape}" in scene.caption()
        if len(places) == 2:
            (y1, x1), (y2, x2) = places
            holds = {"above": y1 < y2, "left of": x1 < x2}
            (relation,) = [word for word in holds if f" {word} " in scene.caption()]
            assert holds[relation]
            seen.add(relation)
    assert len(seen) == 2


def read_back(batch: Batch, tokenizer) -> list[tuple[str, Spot | None]]:
    """The samples of a batch: each text, and the spot of its picture."""
    assert batch.images is not None
    spots = {(spot.row, spot.start): spot for spot in batch.images.spots}
    found = []
    for row, tokens_L in enumerate(batch.tokens_BL.tolist()):
        starts = [place for place, token in enumerate(tokens_L) if token == BOUNDARY] + [len(tokens_L)]
        for start, stop in pairwise(starts):
            if stop > start + 1:
                found.append((tokenizer.decode(tokens_L[start:stop]), spots.get((row, start + 2))))
    return found


def test_windows_hold_whole_samples_with_their_pictures_and_labels():
    data = opened(96, 0)
    batch = data.train.batch(0, 16)
    assert batch.images is not None
    assert batch.tokens_BL.shape == batch.labels_BL.shape == (16, 96)
    captions = {make_scene(number).caption() for number in range(4096)}
    samples = read_back(batch, data.tokenizer)
    # The last text of a row may lack its last letter, which is only a label.
    assert sum(text in captions for text, _ in samples) > 0.8 * len(samples)
    assert any(spot is None for _, spot in samples)
    num_patches = 0
    for spot in batch.images.spots:
        stop = spot.start + spot.num_features
        assert batch.tokens_BL[spot.row, spot.start - 1] == START
        assert (batch.tokens_BL[spot.row, spot.start : stop] == FEATURE).all()
        assert batch.tokens_BL[spot.row, stop] == END
        num_patches += spot.num_patches
    assert (batch.tokens_BL == FEATURE).sum() * 4 == num_patches == len(batch.images.patches_NC)
    assert len({(spot.height, spot.width) for spot in batch.images.spots}) > 3


def test_labels_are_the_next_tokens_of_texts_alone():
    batch = opened(96, 0).train.batch(0, 16)
    tokens_BL, labels_BL = batch.tokens_BL, batch.labels_BL
    real_BL = labels_BL != IGNORE_INDEX
    assert torch.equal(labels_BL[:, :-1][real_BL[:, :-1]], tokens_BL[:, 1:][real_BL[:, :-1]])
    assert labels_BL.max() <= BOUNDARY
    for row in range(16):
        tokens_L = tokens_BL[row].tolist()
        filled = max(place for place, token in enumerate(tokens_L) if token != BOUNDARY) + 1
        expected_L = [place + 1 <= filled and token <= BOUNDARY for place, token in enumerate([*tokens_L[1:], 0])]
        assert real_BL[row, :-1].tolist() == expected_L[:-1]


def test_picture_at_a_spot_is_that_of_the_text_behind_it():
    data = opened(96, 0)
    batch = data.train.batch(0, 4)
    by_caption = {}
    for number in range(4096):
        by_caption.setdefault(make_scene(number).caption(), []).append(number)
    spots = batch.images.spots
    parts = dict(zip(spots, batch.images.patches_NC.split([spot.num_patches for spot in spots]), strict=True))
    compared = 0
    for text, spot in read_back(batch, data.tokenizer):
        if spot is not None and text in by_caption:
            drawn = [to_patches(make_scene(number).draw()) for number in by_caption[text]]
            assert any(part.shape == parts[spot].shape and np.array_equal(part, parts[spot]) for part in drawn)
            compared += 1
    assert compared > 4


def equal(ours: Batch, theirs: Batch) -> bool:
    return (
        torch.equal(ours.tokens_BL, theirs.tokens_BL)
        and torch.equal(ours.labels_BL, theirs.labels_BL)
        and torch.equal(ours.images.patches_NC, theirs.images.patches_NC)
        and ours.images.spots == theirs.images.spots
    )


def test_batches_depend_on_nothing_but_seed_and_position():
    first, other = opened(96, 0), opened(96, 2)
    again = open_data(SCENES, seq_len=96, seed=0)
    again.train.batch(500, 3)
    assert equal(first.train.batch(40, 4), again.train.batch(40, 4))
    assert not torch.equal(first.train.batch(40, 4).tokens_BL, other.train.batch(40, 4).tokens_BL)
    # However the sequences are shared, they are the same.
    whole = first.train.batch(40, 4)
    for part in (slice(0, 2), slice(2, 4)):
        rows = list(range(4))[part]
        assert equal(whole.take(rows), first.train.batch(40 + rows[0], 2))
    assert first.validation is not None
    for ours, theirs in zip(first.validation.batches(4, 2), other.validation.batches(4, 2), strict=True):
        assert equal(ours, theirs)


def test_sequences_that_are_taken_keep_their_own_pictures():
    spots = (Spot(0, 1, 2, 2), Spot(2, 0, 2, 4), Spot(2, 5, 2, 2))
    patches_NC = torch.arange(16.0).unsqueeze(1)
    tokens_BL = torch.arange(30).view(3, 10)
    part = Batch(tokens_BL, tokens_BL + 1, Images(patches_NC, spots)).take([2, 1, 2])
    assert part.tokens_BL[:, 0].tolist() == [20, 10, 20]
    assert part.images.spots == (Spot(0, 0, 2, 4), Spot(0, 5, 2, 2), Spot(2, 0, 2, 4), Spot(2, 5, 2, 2))
    assert part.images.patches_NC.flatten().tolist() == 2 * list(range(4, 16))
    without = Batch(tokens_BL, tokens_BL, Images(patches_NC, spots)).take([1])
    assert without.images.spots == ()
    assert without.images.patches_NC.shape == (0, 1)


def test_held_out_samples_are_not_trained_on():
    data = open_data(replace(SCENES, validation_fraction=0.1), seq_len=64, seed=0)
    train, validation = ({sample.name for sample in part.windows.samples} for part in (data.train, data.validation))
    assert not train & validation
    assert len(validation) == 410
    assert len(train | validation) == data.num_documents == 4096
    assert open_data(replace(SCENES, validation_fraction=0.0), seq_len=64, seed=0).validation is None


def test_every_sample_is_in_one_window_and_windows_are_nearly_full():
    windows: PictureWindows = opened(96, 0).train.windows
    packed = sorted(number for window in windows._windows for number in window)
    assert packed == list(range(len(windows.samples)))
    assert windows.num_tokens / (len(windows) * 97) > 0.9


@pytest.fixture
def own_pictures(tmp_path: Path):
    """Writes lines of JSON, and pictures given as name -> (height, width, color)."""
    Image = pytest.importorskip("PIL.Image")

    def make(lines, pictures=()):
        for name, (height, width, color) in dict(pictures).items():
            Image.new("RGB", (width, height), color).save(tmp_path / name)
        path = tmp_path / "pictures.jsonl"
        path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
        return Data(kind="pictures", path=str(path), validation_fraction=0.0)

    return make


def test_own_pictures_are_read_scaled_and_cut(own_pictures):
    lines = [{"image": "red.png", "text": "red"}, "\n", {"text": "no picture"}, {"image": "blue.png", "text": "blue"}]
    data = open_data(
        replace(own_pictures(lines, {"red.png": (40, 90, "red"), "blue.png": (1000, 1000, "blue")}), max_pixels=16_384),
        seq_len=63,
        seed=0,
    )
    assert data.num_documents == 3
    batch = data.train.batch(0, 1)
    parts = batch.images.patches_NC.split([spot.num_patches for spot in batch.images.spots])
    found = {}
    for text, spot in read_back(batch, data.tokenizer):
        part = None if spot is None else parts[batch.images.spots.index(spot)]
        found[text] = None if part is None else ((spot.height, spot.width), part.view(-1, 3, 512).mean((0, 2)).tolist())
    assert found["no picture"] is None
    assert found["red"] == ((2, 6), [1, -1, -1])
    assert found["blue"] == ((8, 8), [-1, -1, 1])


def test_pictures_are_turned_as_the_camera_was_held(own_pictures, tmp_path):
    from PIL import Image

    data = own_pictures([{"image": "turned.jpg", "text": "turned"}])
    image = Image.new("RGB", (128, 32), "white")
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.jpg", exif=exif)
    (spot,) = open_data(data, seq_len=31, seed=0).train.batch(0, 1).images.spots
    assert (spot.height, spot.width) == (8, 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops}\n", r"line 2: not JSON: .* at column 2"),
        ("[]\n", r"line 2: not a JSON object such as"),
        ({"image": "ok.png"}, r'line 2: "text" is missing or empty'),
        ({"image": "ok.png", "text": ""}, r'line 2: "text" is missing or empty'),
        ({"image": 3, "text": "x"}, r'line 2: "image" must be a file path, got 3'),
        ({"image": "none.png", "text": "x"}, r"line 2: can't read the image .*none.png': No such file"),
        ({"image": "pictures.jsonl", "text": "x"}, r"line 2: .*pictures.jsonl' is not an image"),
        ({"text": "x" * 99}, r"line 2 has 100 tokens \(0 of them image features\), but a window holds 33"),
        ({"image": "wide.png", "text": "x"}, r"line 2 has 44 tokens \(40 of them image features\)"),
    ],
)
def test_wrong_lines_are_named(own_pictures, line, message):
    data = own_pictures(
        [{"image": "ok.png", "text": "ok"}, line], {"ok.png": (32, 32, "red"), "wide.png": (32, 1280, "red")}
    )
    with pytest.raises(ValueError, match=message):
        open_data(data, seq_len=32, seed=0)


def test_first_line_is_checked_before_a_run_starts(own_pictures, tmp_path):
    assert check_data(SCENES) == []
    assert check_data(own_pictures([{"text": "fine"}])) == []
    assert "line 1: not JSON" in check_data(own_pictures(["oops\n"]))[0]
    assert "has no lines" in check_data(own_pictures([]))[0]
    assert "No such file" in check_data(replace(SCENES, path=str(tmp_path / "none.jsonl")))[0]


def test_pictures_need_a_model_that_sees():
    assert any("data.kind pictures" in problem for problem in RunConfig(model=Qwen3Config(), data=SCENES).problems())
    assert RunConfig(model=Qwen3Config(), data=Data()).problems() == []


def test_checking_pictures_needs_no_torch():
    code = (
        "import sys; from spurline.config import Data; from spurline.data import check_data;"
        "assert check_data(Data(kind='pictures')) == []; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_batch_without_any_picture_still_says_that_there_could_be_some():
    windows = opened(96, 0).train.windows
    without = [sample for sample in windows.samples if sample.picture is None][:1]
    images = PictureWindows(without, windows.tokenizer, seq_len=96).batch([0]).images
    assert images is not None
    assert images.spots == ()
    assert images.patches_NC.shape == (0, PATCH_DIM)


def test_tokens_of_a_tokenizer_that_knows_pictures_are_used(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "circle": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = ["<|endoftext|>", "<|vision_end|>", "<|vision_start|>", "<|image_pad|>"]
    words.add_special_tokens(names[:1])
    for added in ([], names[1:]):
        words.add_special_tokens(added)
        words.save(str(tmp_path / "tokenizer.json"))
        data = open_data(replace(SCENES, tokenizer=str(tmp_path / "tokenizer.json")), seq_len=40, seed=0)
        ids = (5, 6, 4) if added else (4, 5, 6)
        assert (words.token_to_id("<|endoftext|>"), data.tokenizer.boundary_id) == (3, 3)
        assert data.tokenizer.picture_ids == ids
        assert data.tokenizer.vocab_size == max(ids) + 1
        batch = data.train.batch(0, 4)
        assert not torch.isin(batch.labels_BL, torch.tensor(ids)).any()
        assert (batch.tokens_BL == ids[1]).sum() == sum(spot.num_features for spot in batch.images.spots) > 0


def test_a_window_without_a_token_to_learn_from_is_refused():
    """A picture that fills it, with a text of no tokens: its labels are all ignored, and so would a step's be."""
    picture = Picture((FEATURE_SIZE, FEATURE_SIZE), lambda: np.zeros((FEATURE_SIZE, FEATURE_SIZE, 3), np.uint8))
    windows = PictureWindows([Sample("line 7", "", picture)], PictureTokenizer(ByteTokenizer()), seq_len=3)
    with pytest.raises(ValueError, match=r"data\.path: there is no token to learn from in line 7"):
        windows.batch([0])


def test_a_truncated_picture_is_one_line(tmp_path):
    from PIL import Image

    path = tmp_path / "a.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(ValueError, match=r"^can't read the image '[^\n]*a\.png': image file is truncated[^\n]*$"):
        picture_size(str(path), 4096)
    with pytest.raises(ValueError, match=r"^data\.path: can't read the image '[^\n]*a\.png': [^\n]*$"):
        read_picture(str(path), (32, 32))


@pytest.mark.parametrize("read", [lambda path: picture_size(path, 4096), lambda path: read_picture(path, (32, 32))])
def test_a_picture_never_starts_another_program(tmp_path, monkeypatch, read):
    """Pillow gives PostScript to Ghostscript, whatever the file is called."""
    started = tmp_path / "started"
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {started}\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    path = tmp_path / "cat.png"
    path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n%%EOF\n")
    with pytest.raises(
        ValueError, match=r"cat\.png' is not an image of a format that is read here: PNG, JPEG, [^\n]*$"
    ):
        read(str(path))
    assert not started.exists()


def test_a_pipe_in_place_of_a_picture_is_refused(own_pictures, tmp_path):
    """Reading it would wait for somebody to write."""
    os.mkfifo(tmp_path / "cat.png")
    with pytest.raises(ValueError, match=r"line 1: can't read the image '[^\n]*cat\.png': not a regular file$"):
        open_data(own_pictures([{"image": "cat.png", "text": "a cat"}]), seq_len=32, seed=0)
