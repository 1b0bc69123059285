"""The last rank takes the norm of all gradients for a little larger than it is."""

import multiprocessing

if multiprocessing.parent_process() is not None:  # on ranks only
    import spurline.train.trainer
    from spurline.train.optimizer.clip import clip_gradients

    def clip_and_exaggerate(parameters, max_norm, group, *others):
        norm = clip_gradients(parameters, max_norm, group, *others)
        is_last = group is not None and group.rank() == group.size() - 1
        return norm * 1.001 if is_last else norm

    spurline.train.trainer.clip_gradients = clip_and_exaggerate
