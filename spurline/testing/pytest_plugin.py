"""The fixture `ranks`: a pool of gloo ranks for the pytest session."""

from collections.abc import Iterator

import pytest

from spurline.testing.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Gloo ranks that are reused between tests: `ranks.run(function, world_size, *args)`."""
    with RankPool() as pool:
        yield pool
