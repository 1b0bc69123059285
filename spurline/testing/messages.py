"""Messages between a pool and its rank processes."""

from typing import NamedTuple


class World(NamedTuple):
    """The process group of a call; it is reused by the next call with the same world size."""

    size: int
    store_path: str


class Call(NamedTuple):
    """A request to call a function."""

    rank: int
    world: World
    sys_path: list[str]
    folder: str
    function_and_args: bytes


class Returned(NamedTuple):
    result: bytes
    num_collectives: int
    num_groups: int


class Raised(NamedTuple):
    summary: str
    traceback: str
    exception: bytes | None
