"""Each tp rank keeps its own part of the gradients of router and norms: nobody sums them."""

import multiprocessing

if multiprocessing.parent_process() is not None:  # on ranks only
    import spurline.comm.gradients

    spurline.comm.gradients.copy_to_group = lambda x, group: x
