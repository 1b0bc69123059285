"""Patch sizes shared by data and model. Imports neither torch nor numpy."""

PATCH_SIZE = 16
"""Pixels per side of a patch."""
FRAMES = 2
"""Frames per patch, as for video; a still image repeats its frame."""
MERGE = 2
"""Patches per side of a block, which the encoder merges into one feature."""
PATCH_DIM = 3 * FRAMES * PATCH_SIZE * PATCH_SIZE
FEATURE_SIZE = PATCH_SIZE * MERGE
"""Pixels per side of one feature; image sides are multiples of it."""
