"""The fixture `ranks`: one pool of gloo ranks for a whole pytest run."""

from collections.abc import Iterator

import pytest

from spurline.testing.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Gloo ranks that stay warm between tests: `ranks.run(function, world_size, *args)`."""
    with RankPool() as pool:
        yield pool
