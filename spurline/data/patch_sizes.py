"""How a picture is cut into patches, which the data and the model have to agree on. Free of torch and numpy."""

PATCH_SIZE = 16
"""Pixels along a side of a patch."""
FRAMES = 2
"""As video has them: a still picture is shown twice."""
MERGE = 2
"""Patches along a side of a block, which the encoder merges into one feature."""
PATCH_DIM = 3 * FRAMES * PATCH_SIZE * PATCH_SIZE
FEATURE_SIZE = PATCH_SIZE * MERGE
"""Pixels along a side of what becomes one feature; the sides of a picture are multiples of it."""
