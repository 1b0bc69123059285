"""A Chromium that a test drives, by the DevTools protocol over a pair of pipes: no port and no further package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
QUIET = [
    "--headless",
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


class PageChangedError(Exception):
    """The page was replaced before it could answer."""


class Tab:
    """An open page."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._count, self._rest = to_browser, from_browser, 0, b""
        self._session = ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def open(self, address: str) -> None:
        self._call("Page.navigate", url=address)

    def read(self, script: str) -> Any:
        """What an expression is in the page; None if it fails, as while a page loads."""
        try:
            answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        except PageChangedError:
            return None
        return answer["result"].get("value") if "exceptionDetails" not in answer else None

    def wait_for(self, script: str) -> Any:
        """What an expression is in the page as soon as it is something. The test's own limit of time ends the wait."""
        while not (found := self.read(script)):
            time.sleep(0.1)
        return found

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                part = os.read(self._from, 65536)
                assert part, "the browser has ended"
                self._rest += part
            line, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self._count:
                if "navigated" in answer.get("error", {}).get("message", ""):
                    raise PageChangedError
                assert "error" not in answer, answer
                return answer["result"]


@contextmanager
def open_tab(profile: Path) -> Iterator[Tab]:
    """A tab of a browser of its own, which ends with it."""
    their_in, our_out = os.pipe()
    our_in, their_out = os.pipe()
    shell = f'exec "$@" 3<&{their_in} 4>&{their_out}'
    command = [CHROMIUM, *QUIET, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", *command], pass_fds=(their_in, their_out), stderr=subprocess.DEVNULL
    )
    try:
        os.close(their_in), os.close(their_out)
        yield Tab(our_out, our_in)
    finally:
        process.kill()
        process.wait()
        os.close(our_in), os.close(our_out)
        shutil.rmtree(profile, ignore_errors=True)
