"""Run functions on local gloo ranks; `spurline.testing.equivalence` compares layers with the reference.

With pytest, import the fixture `ranks` from `spurline.testing.pytest_plugin` into a conftest.py:

    def add_up(rank: int, start: int) -> float:          # at the top level of the test module
        x = torch.tensor(float(start + rank))
        dist.all_reduce(x)
        return x.item()

    def test_add_up(ranks: RankPool) -> None:
        assert ranks.run(add_up, 4, 10) == [46.0] * 4    # what each rank returned, by rank

Elsewhere, `run_ranks` does the same with newly started ranks; scripts must call it below `if __name__ == "__main__":`.
"""

from spurline.testing.failures import RankError, RankFailure
from spurline.testing.pool import RankPool, run_ranks

__all__ = ["RankError", "RankFailure", "RankPool", "run_ranks"]
