"""Convert images to the patches that a vision encoder reads. Torch-free.

An image is H x W pixels of 3 colors. A patch is 16 x 16 pixels x 2 frames, as for video; a still image repeats its
frame. Patches are ordered in blocks of 2 x 2, row by row, since the encoder merges each block into one feature.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from spurline.data.patch_sizes import FEATURE_SIZE, FRAMES, MERGE, PATCH_DIM, PATCH_SIZE

Pixels = npt.NDArray[np.uint8]


def to_patches(pixels_HWC: Pixels) -> npt.NDArray[np.float32]:
    """Pixels (H, W, 3) -> patches (N, 3 * 2 * 16 * 16) with values in [-1, 1], in the order color, frame, y, x."""
    H, W, _ = pixels_HWC.shape
    assert H % FEATURE_SIZE == 0, f"height {H} is not a multiple of {FEATURE_SIZE}"
    assert W % FEATURE_SIZE == 0, f"width {W} is not a multiple of {FEATURE_SIZE}"
    blocks = pixels_HWC.reshape(H // FEATURE_SIZE, MERGE, PATCH_SIZE, W // FEATURE_SIZE, MERGE, PATCH_SIZE, 3)
    # (block row, block column, row in block, column in block, color, y, x)
    frame = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, 1, PATCH_SIZE, PATCH_SIZE)
    return (frame.repeat(FRAMES, axis=2).reshape(-1, PATCH_DIM) / 127.5 - 1).astype(np.float32)


def fitting_size(height: int, width: int, max_pixels: int) -> tuple[int, int]:
    """Height and width rounded to multiples of FEATURE_SIZE, scaled down to at most `max_pixels`."""
    rows, columns = (max(1, round(side / FEATURE_SIZE)) for side in (height, width))
    most = max_pixels // FEATURE_SIZE**2
    if rows * columns > most:
        scale = min(1.0, (max_pixels / (height * width)) ** 0.5)
        # The short side of a very elongated image is one feature; then only the long side can meet the limit.
        rows, columns = (min(most, max(1, int(side * scale / FEATURE_SIZE))) for side in (height, width))
    return rows * FEATURE_SIZE, columns * FEATURE_SIZE
