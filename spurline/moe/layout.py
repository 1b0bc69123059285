"""The layout of expert weights, by axis names. Torch-free.

A layout names the axes of each weight: "expert" (E), "hidden" (F, the width that expert tensor parallelism splits) and
"width" (D, the model's). A size may be a multiple of an axis: `times("hidden", 2)` for gate and up in one tensor.
Expert parallelism, expert tensor parallelism, FSDP2, initialization and parameter counts read the layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple


class Axis(NamedTuple):
    name: str
    multiple: int = 1


Layout = Mapping[str, tuple[str | Axis, ...]]
"""Weight name -> its axes; the first is always "expert"."""

SWIGLU: Layout = {
    "w1_EFD": ("expert", "hidden", "width"),
    "w3_EFD": ("expert", "hidden", "width"),
    "w2_EDF": ("expert", "width", "hidden"),
}
CLAMPED_SWIGLU: Layout = {
    "w1_EFD": ("expert", "hidden", "width"),
    "b1_EF": ("expert", "hidden"),
    "w3_EFD": ("expert", "hidden", "width"),
    "b3_EF": ("expert", "hidden"),
    "w2_EDF": ("expert", "width", "hidden"),
    "b2_ED": ("expert", "width"),
}


def times(name: str, multiple: int) -> Axis:
    """An axis that is `multiple` times as long as the one named."""
    return Axis(name, multiple)


def axis_names(layout: Layout, weight: str) -> tuple[str, ...]:
    return tuple(axis if isinstance(axis, str) else axis.name for axis in layout[weight])


def dim_of(layout: Layout, weight: str, axis: str) -> int | None:
    """The dim of the weight that holds this axis; None if it has none."""
    names = axis_names(layout, weight)
    return names.index(axis) if axis in names else None


def shape_of(layout: Layout, weight: str, *, expert: int, hidden: int, width: int) -> tuple[int, ...]:
    sizes = {"expert": expert, "hidden": hidden, "width": width}
    axes = [Axis(axis) if isinstance(axis, str) else axis for axis in layout[weight]]
    return tuple(sizes[axis.name] * axis.multiple for axis in axes)


def params_per_expert(layout: Layout, *, hidden: int, width: int) -> int:
    return sum(prod(shape_of(layout, weight, expert=1, hidden=hidden, width=width)) for weight in layout)


def layout_problems(layout: Layout) -> list[str]:
    """All errors in a layout, one sentence each; empty if it is valid."""
    found = []
    for weight in layout:
        names = axis_names(layout, weight)
        if names[:1] != ("expert",):
            found.append(f"{weight}: the first axis must be 'expert', got {names}")
        if unknown := sorted(set(names) - {"expert", "hidden", "width"}):
            found.append(f"{weight}: unknown axes {', '.join(unknown)}; there are expert, hidden and width")
        if len(set(names)) < len(names):
            found.append(f"{weight}: an axis comes twice in {names}")
    return found
