"""Generated images of one or two colored shapes, with captions; each is determined by its index. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from spurline.data.patch_sizes import FEATURE_SIZE
from spurline.data.patches import Pixels

NUM_SCENES = 4096

_COLORS = {
    "red": (214, 40, 40),
    "green": (46, 160, 67),
    "blue": (40, 90, 220),
    "yellow": (245, 205, 40),
    "purple": (140, 60, 170),
    "black": (25, 25, 25),
}
_SHAPES = ("circle", "square", "triangle")
_MAX_CELLS = 3


@dataclass(frozen=True)
class Thing:
    color: str
    shape: str
    row: int
    column: int
    """Row and column of its cell, a square of FEATURE_SIZE pixels."""
    radius: float
    shift: tuple[float, float]
    """Offset from the center of its cell in pixels, (down, right)."""


@dataclass(frozen=True)
class Scene:
    """An image of rows x columns cells; its shapes are in reading order, as in the caption."""

    rows: int
    columns: int
    background: int
    things: tuple[Thing, ...]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.rows * FEATURE_SIZE, self.columns * FEATURE_SIZE

    def caption(self) -> str:
        names = [f"a {thing.color} {thing.shape}" for thing in self.things]
        return (" above " if self.things[0].row < self.things[-1].row else " left of ").join(names)

    def draw(self) -> Pixels:
        """Pixels (H, W, 3)."""
        height, width = self.size
        pixels_HWC = np.full((height, width, 3), self.background, np.uint8)
        for thing in self.things:
            down_H = np.arange(height) - (thing.row + 0.5) * FEATURE_SIZE - thing.shift[0]
            right_W = np.arange(width) - (thing.column + 0.5) * FEATURE_SIZE - thing.shift[1]
            inside_HW = _covers(thing.shape, down_H[:, None] / thing.radius, right_W / thing.radius)
            pixels_HWC[inside_HW] = _COLORS[thing.color]
        return pixels_HWC


def make_scene(number: int) -> Scene:
    random = np.random.default_rng([0, number])
    rows, columns = (int(side) for side in random.integers(1, _MAX_CELLS + 1, 2))
    num_things = min(rows * columns, int(random.integers(1, 3)))
    cells = sorted(random.choice(rows * columns, num_things, replace=False).tolist())
    things = tuple(
        Thing(
            color=str(random.choice(list(_COLORS))),
            shape=str(random.choice(_SHAPES)),
            row=cell // columns,
            column=cell % columns,
            radius=float(random.uniform(9, 13)),
            shift=(float(random.uniform(-3, 3)), float(random.uniform(-3, 3))),
        )
        for cell in cells
    )
    return Scene(rows, columns, int(random.integers(100, 156)), things)


def _covers(shape: str, down: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Which pixels are inside the shape; distances from its center are in units of the radius."""
    if shape == "circle":
        return down**2 + right**2 <= 1
    if shape == "square":
        return np.maximum(np.abs(down), np.abs(right)) <= 0.85
    return (down <= 0.8) & (np.abs(right) <= 0.55 * (down + 1))
