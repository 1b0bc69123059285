"""The selection bias of a stage moves by the rows of its own rank's tokens alone."""

import multiprocessing
from unittest import mock

if multiprocessing.parent_process() is not None:  # on ranks only
    import spurline.train.trainer

    right = spurline.train.trainer.update_expert_bias

    def wrong(model, group, unless):  # type: ignore[no-untyped-def]
        with mock.patch("torch.distributed.all_reduce"):
            return right(model, group, unless)

    spurline.train.trainer.update_expert_bias = wrong
