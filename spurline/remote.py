"""Remote files and folders, such as s3://bucket/run, through fsspec, which is imported on use. Torch-free.

Object stores have no rename and no empty folders: what is published there is complete once its last file exists.
"""

from __future__ import annotations

import os
import re
from typing import IO, Any

_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether this is a URL with a scheme, not a local path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(path)) is not None


def ends_with_process(path: str) -> bool:
    """Whether nothing of what is written there outlives the process."""
    return path.startswith("memory://")


class RemotePath(os.PathLike[str]):
    """A file or folder at a URL, with methods named as in `pathlib.Path`; errors are one-line OSErrors."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        raise TypeError(f"{self.url} is not a path of this machine")

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def names(self) -> list[str]:
        """The names in the folder; empty if it does not exist."""
        try:
            return [entry.rstrip("/").rpartition("/")[2] for entry in self._call("ls", self._path, detail=False)]
        except FileNotFoundError:
            return []

    def exists(self) -> bool:
        return bool(self._call("exists", self._path))

    def size(self) -> int:
        return int(self._call("size", self._path))

    def open(self, mode: str = "rb") -> IO[bytes]:
        if mode == "wb":
            self._make_parents()
        file: IO[bytes] = self._call("open", self._path, mode)
        return file

    def read_range(self, begin: int, end: int) -> bytes:
        content: bytes = self._call("cat_file", self._path, start=begin, end=end)
        return content

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        self._make_parents()
        self._call("pipe_file", self._path, text.encode(encoding))

    def _make_parents(self) -> None:
        if self._scheme not in _PACKAGES:  # object stores need no folders, and would create a misspelled bucket
            self._call("makedirs", self._path.rpartition("/")[0], exist_ok=True)

    def unlink(self) -> None:
        self._call("rm_file", self._path)

    def remove_tree(self) -> None:
        if self.exists():
            self._call("rm", self._path, recursive=True)

    @property
    def _scheme(self) -> str:
        return self.url.partition("://")[0]

    @property
    def _path(self) -> str:
        return str(self.filesystem()._strip_protocol(self.url))

    def filesystem(self) -> Any:
        """fsspec's file system for the scheme; a one-line ValueError if there is none, or it needs another package."""
        scheme = self._scheme
        try:
            import fsspec

            return fsspec.filesystem(scheme)
        except ImportError:
            package = _PACKAGES.get(scheme, "fsspec")
            raise ValueError(f"{self.url}: {scheme}:// needs the package {package}: pip install {package}") from None
        except ValueError as error:
            raise ValueError(f"{self.url}: {str(error).partition(chr(10))[0]}") from None

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        filesystem = self.filesystem()
        filesystem.invalidate_cache()  # another process may have written
        try:
            return getattr(filesystem, name)(*arguments, **options)
        except FileNotFoundError as error:
            raise FileNotFoundError(error.errno or 2, "no such file or bucket", self.url) from None
        except OSError as error:
            raise OSError(error.errno or 5, _one_line(error), self.url) from None
        except Exception as error:  # from the libraries behind fsspec: no credentials, no connection
            raise OSError(5, _one_line(error), self.url) from None


def scheme_problems(url: str) -> list[str]:
    """Why the scheme of a URL can't be used; empty if it can, and for local paths."""
    try:
        if is_remote(url):
            RemotePath(url).filesystem()
    except ValueError as error:
        return [str(error)]
    return []


def url_problems(name: str, path: str) -> list[str]:
    """Report a URL where only a path is allowed: as a path, s3://bucket would be a folder named `s3:`."""
    if not is_remote(path):
        return []
    return [f"{name} {path}: only --checkpoint.folder of a run can be remote: give a path of this machine, or mount it"]


def write_probe(folder: RemotePath, name: str) -> None:
    """Write a file and read it back; a one-line ValueError if either is not allowed."""
    try:
        (folder / name).write_text("spurline")
        if (folder / name).read_range(0, 8) != b"spurline":
            raise OSError(5, "what was written is not what is read")
    except OSError as error:
        raise ValueError(f"{folder}: can't write there: {error.strerror}") from None


def remove_probe(folder: RemotePath, name: str) -> None:
    """Remove the file that `write_probe` has written."""
    try:
        (folder / name).unlink()
    except OSError as error:
        raise ValueError(f"{folder}: can't remove files there: {error.strerror}") from None


def _one_line(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return text.strip().partition("\n")[0][:300]
