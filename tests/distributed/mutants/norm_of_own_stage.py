"""The gradient norm misses the parameters of other pipeline stages."""

import multiprocessing

if multiprocessing.parent_process() is not None:  # on ranks only
    from spurline.parallel.world import World

    World.group = World.stage_group  # type: ignore[method-assign]
