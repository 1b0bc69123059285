"""Find the address and interface at which other nodes of a job reach this machine. Torch-free."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import time

_SIOCGIFADDR = 0x8915


def wait_for_name(host: str, seconds: float) -> bool:
    """Whether `host` resolves within this many seconds; a pod's address is published only after it has started."""
    deadline = time.monotonic() + seconds
    while not _addresses(host):
        if time.monotonic() > deadline:
            return False
        time.sleep(1)
    return True


def is_own_address(host: str) -> bool:
    """Whether `host` is this machine: it has the same name, or one of its addresses can be bound."""
    if host.split(".")[0] == socket.gethostname().split(".")[0]:
        return True
    for family, _, _, _, address in _addresses(host):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0))
            return True
    return False


def address_towards(host: str) -> str:
    """This machine's source address for packets to `host`; empty if there is no route. Nothing is sent."""
    for family, _, _, _, address in _addresses(host):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address[0], 9))
            return str(probe.getsockname()[0])
    return ""


def interface_of(address: str) -> str:
    """The network interface that has this IPv4 address; empty if unknown (Linux only)."""
    if not sys.platform.startswith("linux"):
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def _addresses(host: str) -> list[tuple]:
    try:
        return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return []
