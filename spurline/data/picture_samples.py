"""Sources of images with captions: generated scenes, or image files. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from spurline.config import Data
from spurline.data.patch_sizes import FEATURE_SIZE
from spurline.data.patches import Pixels
from spurline.data.picture_files import import_pillow, picture_size, read_lines, read_picture, wrong_line
from spurline.data.scenes import NUM_SCENES, make_scene

# Every 8th scene is text only, so that the model also learns to write without an image.
_WITHOUT_PICTURE = 8


@dataclass(frozen=True)
class Picture:
    size: tuple[int, int]
    """Height and width in pixels, multiples of FEATURE_SIZE."""
    load: Callable[[], Pixels]

    @property
    def num_features(self) -> int:
        return self.size[0] * self.size[1] // FEATURE_SIZE**2


@dataclass(frozen=True)
class Sample:
    name: str
    """Its hash determines order and train/validation split."""
    text: str
    picture: Picture | None


def read_samples(data: Data) -> Iterator[Sample]:
    """All samples (at least one); raises a ValueError that names the invalid line."""
    return _read_file(os.path.expanduser(data.path), data.max_pixels) if data.path else _draw()


def check_pictures(data: Data) -> list[str]:
    """Errors in the data options that can be found by reading the first sample."""
    try:
        next(read_samples(data))
    except ValueError as problem:
        return [str(problem)]
    return []


def _draw() -> Iterator[Sample]:
    for number in range(NUM_SCENES):
        scene = make_scene(number)
        picture = None if number % _WITHOUT_PICTURE == 0 else Picture(scene.size, scene.draw)
        yield Sample(f"scene {number}", scene.caption(), picture)


def _read_file(path: str, max_pixels: int) -> Iterator[Sample]:
    import_pillow()
    number = 0
    for number, text, image in read_lines(path):
        picture = None
        if image is not None:
            try:
                size = picture_size(image, max_pixels)
            except ValueError as problem:
                raise wrong_line(path, number, problem) from None
            picture = Picture(size, partial(read_picture, image, size))
        yield Sample(f"line {number}", text, picture)
    if number == 0:
        raise ValueError(f"data.path {path!r} has no lines")
