"""What a pool and the processes of its ranks say to each other."""

from typing import NamedTuple


class World(NamedTuple):
    """The ranks that take part in a call; it stays up for the next call of its size."""

    size: int
    store_path: str


class Call(NamedTuple):
    """Please call a function."""

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
