"""Tied embeddings on two pipeline stages each keep their own gradient."""

import multiprocessing

if multiprocessing.parent_process() is not None:  # on ranks only
    from spurline.parallel.pipeline import PipelinedModel

    PipelinedModel.sum_gradients_of_copies = lambda self: None  # type: ignore[method-assign]
