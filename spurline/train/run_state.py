"""How a run has ended: state.json in its folder, which `spurline runs` reads. Free of torch."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from types import TracebackType

from spurline.files import write_file

STATE_FILE = "state.json"


class RunState:
    """Records the end of a run, as a context manager, on the first rank. A run that is killed records nothing."""

    def __init__(self, folder: Path, enabled: bool) -> None:
        self._path, self._enabled = folder / STATE_FILE, enabled
        self.state = "failed"
        """What is recorded if no error ends the block: finished or stopped."""
        if enabled:
            self._path.unlink(missing_ok=True)

    def __enter__(self) -> RunState:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._enabled:
            return
        why = ""
        if error is not None:
            self.state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            why = f"{error}".partition("\n")[0][:300] or type(error).__name__
        content = {"state": self.state, "why": why, "ended": time.strftime("%Y-%m-%d %H:%M:%S")}
        with contextlib.suppress(OSError):  # a full disk must not fail the run
            write_file(self._path, json.dumps(content) + "\n")


def note_finished(folder: Path, enabled: bool) -> None:
    """Record that a run with nothing left to do has finished, if its end was not recorded: ranks were lost there."""
    if enabled and not (folder / STATE_FILE).exists():
        with RunState(folder, enabled) as state:
            state.state = "finished"
