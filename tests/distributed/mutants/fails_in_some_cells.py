"""Cells with a forced equal split raise on their last rank; those with full recomputation hang there."""

import multiprocessing
import time

if multiprocessing.parent_process() is not None:  # on ranks only
    import torch.distributed as dist

    from spurline.train.trainer import Trainer

    take_step = Trainer.step

    def step(trainer, number):
        if trainer.world.meshes is not None and dist.get_rank() == dist.get_world_size() - 1:
            if trainer.config.model.moe.equal_split == "forced":
                raise ZeroDivisionError("planted")
            if trainer.config.activation_checkpoint.mode == "full":
                time.sleep(600)
        return take_step(trainer, number)

    Trainer.step = step
