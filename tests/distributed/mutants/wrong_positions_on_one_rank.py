"""The second rank of context parallelism counts its rotary positions from one too many."""

import multiprocessing

if multiprocessing.parent_process() is not None:  # on ranks only
    import spurline.comm.sequence

    right = spurline.comm.sequence.HeadTailShard.positions

    def wrong(self, device):  # type: ignore[no-untyped-def]
        return right(self, device) + (self.rank == 1)

    spurline.comm.sequence.HeadTailShard.positions = wrong  # type: ignore[method-assign]
