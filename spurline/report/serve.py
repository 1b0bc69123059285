"""Serve the report of runs to a browser on this machine, kept up to date while they train. Torch-free.

The server listens on 127.0.0.1 and answers two paths, `/` and `/version`; requests cannot name files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from socketserver import TCPServer
from threading import Lock

from spurline.report.page import make_page
from spurline.report.read import read_runs
from spurline.train.folder_lock import is_owned

HOST = "127.0.0.1"
WATCHED = ("metrics.jsonl", "samples.jsonl", "config.json")
SHARE_OF_TIME = 0.2  # at most this share of the time is spent on rendering, which takes seconds for a long run
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Follower:
    """The page of some runs, rendered again when their files change; a meta element holds its version."""

    def __init__(self, folders: list[str]) -> None:
        self.folders = folders
        self._lock = Lock()
        self._page, self._version, self._seconds, self._made = "", "", 0.0, 0.0

    def page(self) -> tuple[str, str]:
        """The page and its version."""
        with self._lock:
            now = time.monotonic()
            version = " ".join(self._signs())
            if version != self._version and now - self._made >= self._seconds / SHARE_OF_TIME:
                self._page = self._make(version)
                self._version, self._made = version, time.monotonic()
                self._seconds = self._made - now
            return self._page, self._version

    def _signs(self) -> Iterator[str]:
        """Strings that change whenever the page would: the state, file sizes and modification times."""
        for folder in map(Path, self.folders):
            yield f"{is_owned(folder):d}"
            for name in WATCHED:
                try:
                    stat = (folder / name).stat()
                    yield f"{stat.st_size:x}-{stat.st_mtime_ns:x}"
                except OSError:
                    yield "-"

    def _make(self, version: str) -> str:
        try:
            return make_page(read_runs(self.folders), version)
        except (ValueError, OSError) as error:
            return _waiting_page(str(error), version)


def _waiting_page(problem: str, version: str) -> str:
    """The page shown until there is a first step and all files can be read."""
    own = files("spurline.report")
    style, script = (own.joinpath(name).read_text(encoding="utf-8") for name in ("style.css", "follow.js"))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f'<meta name="version" content="{version}">'
        f"<title>Spurline</title><style>{style}</style></head>\n<body><header><h1>Waiting for the first step</h1>"
        f'<p class="soft">{escape(problem)}</p></header>\n<script>{script}</script></body></html>\n'
    )


class Handler(BaseHTTPRequestHandler):
    """Answers `/` and `/version`, and nothing else."""

    server: ReportServer

    def do_GET(self) -> None:
        if not self._is_from_here():
            self._answer(403, "This server answers requests to 127.0.0.1 and localhost only.\n", "text/plain")
        elif self.path == "/":
            self._answer(200, self.server.follower.page()[0], "text/html")
        elif self.path == "/version":
            self._answer(200, self.server.follower.page()[1], "text/plain")
        else:
            self._answer(404, "There is / and nothing else.\n", "text/plain")

    do_HEAD = do_GET

    def _is_from_here(self) -> bool:
        """Whether the Host header names this machine, as protection against DNS rebinding."""
        port = self.server.server_address[1]
        return self.headers.get("Host", "") in (f"{HOST}:{port}", f"localhost:{port}")

    def _answer(self, code: int, text: str, kind: str) -> None:
        content = text.encode("utf-8", "replace")
        self.send_response(code)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content)), **HEADERS}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def version_string(self) -> str:
        return "spurline"

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: the terminal belongs to the user."""


class ReportServer(ThreadingHTTPServer):
    """Serves the report of `folders` on a port of this machine (0: any free port)."""

    daemon_threads = True

    def __init__(self, folders: list[str], port: int) -> None:
        super().__init__((HOST, port), Handler)
        self.follower = Follower(folders)

    def server_bind(self) -> None:
        """Bind without looking up the host name, which can take seconds without a network."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore it: a browser that closes its connection is not an error."""
