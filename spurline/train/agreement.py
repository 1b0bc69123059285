"""What happened on any rank, known to all of them at the same step."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Agreement:
    """Exchanges facts between hosts while steps are computed: nobody waits for a device, or for a slower rank's step.

    With several ranks, what one of them says at a step is known to all at the next: the exchange of a step is started
    with it and waited for with the following one, when it has long arrived. A rank alone knows at once.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """`group` is one whose collectives run on the host, of all ranks; None for a rank alone."""
        self._group = group
        self._under_way: tuple[torch.Tensor, dist.Work] | None = None

    def exchange(self, *facts: int) -> list[int]:
        """Say which facts are true here; returns which of those said at the last call were true on any rank.

        All ranks must call it equally often, with the same facts in the same order. A fact may be a number of one rank,
        with 0 on all others.
        """
        if self._group is None:
            return list(facts)
        known = self.finish() or [0] * len(facts)
        said = torch.tensor(facts, dtype=torch.int32)
        work = dist.all_reduce(said, group=self._group, async_op=True)
        assert work is not None
        self._under_way = said, work
        return known

    def finish(self) -> list[int]:
        """Wait for the exchange that is under way; returns what it tells, nothing if there was none."""
        if self._under_way is None:
            return []
        (said, work), self._under_way = self._under_way, None
        work.wait()
        return said.tolist()
