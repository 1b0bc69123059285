"""Let all ranks learn of an event on any of them at the same step."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Agreement:
    """Exchanges facts between hosts while steps are computed: no rank waits for a device, or for a slower rank's step.

    With several ranks, a fact reported at one step is known to all ranks at the next: each call starts an asynchronous
    all-reduce and waits for that of the previous call, long complete by then. A single rank knows its facts at once.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """`group` contains all ranks and runs its collectives on the host; None for a single rank."""
        self._group = group
        self._under_way: tuple[torch.Tensor, dist.Work] | None = None

    def exchange(self, *facts: int) -> list[int]:
        """Report facts as numbers (0: nothing); returns the maximum of each over all ranks, as of the previous call.

        All ranks must call it equally often, with the same facts in the same order.
        """
        if self._group is None:
            return list(facts)
        known = self.finish() or [0] * len(facts)
        said = torch.tensor(facts, dtype=torch.int32)
        work = dist.all_reduce(said, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._under_way = said, work
        return known

    def finish(self) -> list[int]:
        """Wait for the exchange in flight and return its result; an empty list if there is none."""
        if self._under_way is None:
            return []
        (said, work), self._under_way = self._under_way, None
        work.wait()
        return said.tolist()
