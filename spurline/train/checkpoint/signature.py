"""Signatures of checkpoints: an HMAC over the record, which holds the checksum of every file. Free of torch.

A checksum shows damage; only a signature shows who wrote a checkpoint, to those who have the same secret key.
"""

from __future__ import annotations

import hashlib
import hmac
import os

from spurline.untrusted import read_bytes, reason

MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 4096
_PURPOSE = b"spurline checkpoint record\0"


def read_key(path: str) -> bytes | None:
    """The key in a file, without white space around it; None for an empty path."""
    if not path:
        return None
    try:
        key = read_bytes(os.path.expanduser(path), MAX_KEY_BYTES).strip()
    except OSError as error:
        raise ValueError(f"sign_key_file {path}: can't read it: {reason(error)}") from None
    except ValueError as error:
        raise ValueError(f"sign_key_file {path}: {error}") from None
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(
            f"sign_key_file {path}: a key needs at least {MIN_KEY_BYTES} bytes: make one with `openssl rand -hex 32`"
        )
    return key


def signature(content: bytes, key: bytes) -> str:
    return hmac.new(key, _PURPOSE + content, hashlib.sha256).hexdigest()


def is_signed(content: bytes, key: bytes, given: object) -> bool:
    """Whether `given` is the signature of `content`, compared in constant time."""
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(signature(content, key), given)
