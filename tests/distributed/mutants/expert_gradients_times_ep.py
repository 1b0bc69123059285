"""The gradients of experts are as many times too large as there are ranks that share the experts."""

import multiprocessing

if multiprocessing.parent_process() is not None:  # on ranks only
    import spurline.moe.experts.experts
    from spurline.comm.gradients import local

    def local_with_scaled_gradient(weight):
        part = local(weight)
        if part.requires_grad and hasattr(weight, "device_mesh"):
            ep = weight.device_mesh.size(0)
            part.register_hook(lambda gradient: gradient * ep)
        return part

    spurline.moe.experts.experts.local = local_with_scaled_gradient
