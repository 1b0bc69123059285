"""Image datasets: a JSONL file with an image path and a text in each line. Torch-free."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from spurline.data.patches import Pixels, fitting_size
from spurline.untrusted import lines, open_regular, parse_json, reason

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Whatever a file is called: Pillow reads many others, some with other programs (EPS with Ghostscript)."""
_ORIENTATION = 0x0112  # EXIF orientation tag; values from 5 on swap height and width


def read_lines(path: str) -> Iterator[tuple[int, str, str | None]]:
    """(line number, text, image path or None) of every non-blank line; raises a ValueError for an invalid line."""
    try:
        with open_regular(path) as file:
            for number, line in enumerate(lines(file), start=1):
                if line.strip():
                    yield number, *_parse(path, number, line.decode("utf-8"))
    except OSError as error:
        raise ValueError(f"data.path: can't read {path!r}: {reason(error)}") from None
    except UnicodeDecodeError:
        raise ValueError(f"data.path: {path!r} is not UTF-8 text") from None


def picture_size(path: str, max_pixels: int) -> tuple[int, int]:
    """Height and width of the image after scaling, read from the file header only."""
    with _readable(path), _open(path) as image:
        width, height = image.size
        orientation = image.getexif().get(_ORIENTATION, 1)
        if isinstance(orientation, int) and orientation >= 5:
            width, height = height, width
    return fitting_size(height, width, max_pixels)


def read_picture(path: str, size: tuple[int, int]) -> Pixels:
    """Read an image, apply its EXIF orientation and resize it to (height, width): pixels (H, W, 3)."""
    from PIL import Image, ImageOps

    height, width = size
    with _readable(path, "data.path: "), _open(path) as image:
        upright = ImageOps.exif_transpose(image).convert("RGB")
        return np.asarray(upright.resize((width, height), Image.Resampling.BICUBIC))


@contextmanager
def _readable(path: str, prefix: str = "") -> Iterator[None]:
    """Turn Pillow's many errors for truncated or malformed images into a one-line ValueError."""
    try:
        yield
    except (OSError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError, struct.error) as error:
        raise ValueError(f"{prefix}can't read the image {path!r}: {_first_line(error)}") from None
    except ValueError as error:
        message = _first_line(error)
        raise ValueError(
            f"{prefix}{message}" if repr(path) in message else f"{prefix}can't read the image {path!r}: {message}"
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def import_pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("image data needs the package Pillow: pip install 'spurline[images]'") from None
    return Image


@contextmanager
def _open(path: str) -> Iterator[Any]:
    package = import_pillow()
    with ExitStack() as stack:
        try:
            image = package.open(stack.enter_context(open_regular(path)), formats=FORMATS)
        except package.UnidentifiedImageError:
            raise ValueError(f"{path!r} is not an image of a format that is read here: {', '.join(FORMATS)}") from None
        except package.DecompressionBombError as error:
            raise ValueError(f"{path!r} is too large: {error}") from None
        except OSError as error:
            raise ValueError(f"can't read the image {path!r}: {reason(error)}") from None
        yield image


def _parse(path: str, number: int, line: str) -> tuple[str, str | None]:
    try:
        entry = parse_json(line)
    except ValueError as error:
        raise wrong_line(path, number, str(error).replace("line 1, ", "")) from None
    if not isinstance(entry, dict):
        raise wrong_line(path, number, 'not a JSON object such as {"image": "cat.png", "text": "a cat"}')
    text, image = entry.get("text"), entry.get("image")
    if isinstance(image, str) and "\0" in image:
        raise wrong_line(path, number, '"image" is not a file path')
    if not isinstance(text, str) or not text:
        raise wrong_line(path, number, '"text" is missing or empty')
    if image is not None and not isinstance(image, str):
        raise wrong_line(path, number, f'"image" must be a file path, got {image!r}')
    return text, None if image is None else os.path.join(os.path.dirname(path), image)


def wrong_line(path: str, number: int, what: object) -> ValueError:
    return ValueError(f"data.path {path!r}, line {number}: {what}")
