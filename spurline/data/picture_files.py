"""A user's own pictures: a JSONL file with the path of an image and its text in each line. Free of torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from spurline.data.patches import Pixels, fitting_size

_ORIENTATION = 0x0112  # the EXIF tag of how a camera was held; from 5 on, height and width change places


def read_lines(path: str) -> Iterator[tuple[int, str, str | None]]:
    """Number, text and path of the image, if any, of every line that is not blank; a ValueError says which is wrong."""
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, *_parse(path, number, line)
    except OSError as error:
        raise ValueError(f"data.path: can't read {path!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"data.path: {path!r} is not UTF-8 text") from None


def picture_size(path: str, max_pixels: int) -> tuple[int, int]:
    """Height and width of what `read_picture` gives, from the file's header alone."""
    with _open(path) as image:
        width, height = image.size
        if image.getexif().get(_ORIENTATION, 1) >= 5:
            width, height = height, width
    return fitting_size(height, width, max_pixels)


def read_picture(path: str, size: tuple[int, int]) -> Pixels:
    """The picture, upright, in the given height and width: (H, W, 3)."""
    from PIL import Image, ImageOps

    height, width = size
    try:
        with _open(path) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
            return np.asarray(upright.resize((width, height), Image.Resampling.BICUBIC))
    except OSError as error:
        raise ValueError(f"data.path: can't read the picture {path!r}: {error}") from None


def import_pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("pictures need the package Pillow: pip install 'spurline[images]'") from None
    return Image


def _open(path: str) -> Any:
    package = import_pillow()
    try:
        return package.open(path)
    except package.UnidentifiedImageError:
        raise ValueError(f"{path!r} is not a picture that Pillow can read") from None
    except package.DecompressionBombError as error:
        raise ValueError(f"{path!r} is too large: {error}") from None
    except OSError as error:
        raise ValueError(f"can't read the picture {path!r}: {error.strerror}") from None


def _parse(path: str, number: int, line: str) -> tuple[str, str | None]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise wrong_line(path, number, f"not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(entry, dict):
        raise wrong_line(path, number, 'not an object such as {"image": "cat.png", "text": "a cat"}')
    text, image = entry.get("text"), entry.get("image")
    if not isinstance(text, str) or not text:
        raise wrong_line(path, number, 'there is no "text"')
    if image is not None and not isinstance(image, str):
        raise wrong_line(path, number, f'"image" must be the path of a file, got {image!r}')
    return text, None if image is None else os.path.join(os.path.dirname(path), image)


def wrong_line(path: str, number: int, what: object) -> ValueError:
    return ValueError(f"data.path {path!r}, line {number}: {what}")
