"""Progress of a run: a live line on a terminal, with expert load if it is wide; a few plain lines elsewhere.

Free of torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from spurline.train.live_load import load_lines

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_PLAIN_LINES = 20
_DROP_ORDER = (
    "lr",
    "grad",
    "memory",
    "val",
    "bar",
    "load",
    "rate",
    "eta",
    "bpb",
)  # when the line is too long for the terminal


class Progress:
    """Shows the state of a run, as a context manager; shows nothing with `enabled=False` (ranks other than 0)."""

    def __init__(
        self,
        total_steps: int,
        console: Console | None = None,
        enabled: bool = True,
        clock: Callable[[], float] = time.monotonic,
        show_expert_load: bool = True,
    ) -> None:
        self._total_steps = total_steps
        self._enabled = enabled
        self._clock = clock
        self._show_expert_load = show_expert_load
        self._rows_of_experts: Mapping[str, Sequence[float]] = {}
        self._step = 0
        self._fields = {"step": "waiting for the first step"}
        self._held_out = {"bpb": "", "val": ""}
        self._first: tuple[int, float] | None = (
            None  # step and time of the first update, from which the ETA is computed
        )
        self._live: Live | None = None
        self.listener: Callable[[str], None] = lambda message: None  # hears every message, on all ranks
        if enabled:
            from rich.console import Console

            self._console = console or Console()

    def __enter__(self) -> Progress:
        if self._enabled and self._console.is_interactive:
            from rich.live import Live

            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=5)
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def log(self, message: str) -> None:
        """Print a message, above the live line if there is one."""
        self.listener(message)
        if self._enabled:
            self._console.print(message, markup=False, highlight=False, soft_wrap=True)

    def update(
        self,
        step: int,
        *,
        loss: float,
        tokens_per_second: float,
        memory_bytes: int | None = None,
        expert_load: float | None = None,
        validation_loss: float | None = None,
        bits_per_byte: float | None = None,
        grad_norm: float | None = None,
        lr: float | None = None,
        rows_of_experts: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Show the state after `step`. `expert_load` is the busiest expert's rows over the mean; `bits_per_byte`, which
        comes with a validation loss, is of held-out text."""
        previous_step, self._step = self._step, step
        self._rows_of_experts = rows_of_experts or {}
        if validation_loss is not None:
            self._held_out = {
                "bpb": "" if bits_per_byte is None else f"bpb {_four_digits(bits_per_byte)}",
                "val": f"val {_four_digits(validation_loss)}",
            }
        self._fields = {
            "step": f"{step:{len(str(self._total_steps))}}/{self._total_steps}",
            "loss": f"loss {_four_digits(loss)}",
            **self._held_out,
            "rate": f"{_short_count(tokens_per_second):>4} tok/s",
            "eta": self._eta(),
            "memory": "" if memory_bytes is None else _short_bytes(memory_bytes),
            "load": "" if expert_load is None else f"load {expert_load:.2f}",
            "grad": "" if grad_norm is None else f"grad {grad_norm:.2f}",
            "lr": "" if lr is None else f"lr {lr:.1e}",
        }
        if self._live:
            return  # it reads the fields by itself, a few times a second
        every = math.ceil(self._total_steps / _PLAIN_LINES)
        is_first_or_last = previous_step == 0 or step == self._total_steps
        if is_first_or_last or validation_loss is not None or step // every > previous_step // every:
            shown = {key: text for key, text in self._fields.items() if key not in ("grad", "lr")}
            if validation_loss is None:
                shown["val"] = shown["bpb"] = ""  # each value is printed once
            self.log("step " + _joined(shown))

    def _eta(self) -> str:
        now = self._clock()
        if self._first is None:
            self._first = (self._step, now)  # earlier time, such as compiling, says nothing about later steps
        first_step, first_time = self._first
        steps_left = self._total_steps - self._step
        if self._step == first_step and steps_left:
            return ""
        seconds_per_step = (now - first_time) / max(1, self._step - first_step)
        return "eta " + _duration(steps_left * seconds_per_step)

    def _render(self) -> RenderableType:
        """The live line and, in a wide terminal, the load of experts below it."""
        from rich.console import Group
        from rich.text import Text

        line, width = self._render_line(), self._console.width - 1
        if not self._show_expert_load:
            return line
        lines = load_lines(self._rows_of_experts, width, ascii_only=self._console.options.ascii_only)
        return Group(line, *(Text(text, no_wrap=True, style="dim") for text in lines)) if lines else line

    def _render_line(self) -> RenderableType:
        """At most as wide as the terminal: bar, then the fields that have room."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        room = self._console.width - 1  # some terminals wrap when the last column is written
        bar_width = 20 if room >= 110 else 6
        fields = dict(self._fields)
        show_bar = True
        for key in _DROP_ORDER:
            if len(_joined(fields)) + show_bar * (bar_width + 1) <= room:
                break
            fields.pop(key, None)
            show_bar = show_bar and key != "bar"
        text = Text(_joined(fields)[:room], no_wrap=True)
        text.highlight_regex(r"\b(?!nan|inf)[a-z/]+\b", "dim")
        if not show_bar:
            return text
        line = Table.grid(padding=(0, 1))
        line.add_row(ProgressBar(total=self._total_steps, completed=self._step, width=bar_width), text)
        return line


def _joined(fields: dict[str, str]) -> str:
    return "  ".join(text for text in fields.values() if text)


def _four_digits(value: float) -> str:
    """2.134, 21.34, 213.4: as wide for a large loss as for a small one."""
    return f"{value:.{3 if value < 10 else 2 if value < 100 else 1}f}"


def _short_count(value: float) -> str:
    """812, 9.8k, 98k, 980k, 9.8M: two or three digits and a unit."""
    for unit in ("", "k", "M"):
        if value < 999.5:
            return f"{value:.1f}{unit}" if unit and value < 9.95 else f"{value:.0f}{unit}"
        value /= 1000
    return f"{value:.1f}G"


def _short_bytes(value: float) -> str:
    return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"


def _duration(seconds: float) -> str:
    """0:12, 12:34, 1:02:03."""
    minutes, seconds = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
