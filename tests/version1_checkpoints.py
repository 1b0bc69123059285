"""Checkpoints as version 1 wrote them: by torch.distributed.checkpoint alone, with pickled objects."""

import dataclasses
import hashlib
import json
import pickle
import random
import warnings

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from spurline.train.checkpoint.state import model_tensors, optimizer_tensors


def save(run, step, model, optimizer, extra, change=lambda state: state):
    """`change` may put something else into the state that is written."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    random_state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    state = {
        **model_tensors(model),
        **optimizer_tensors(model, optimizer),
        "random.0": (random_state,),
        "extra": (extra,),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(change(state), storage_writer=dcp.FileSystemWriter(folder))
    seal(folder, step, extra)
    return folder


def seal(folder, step, extra=None):
    """Write checkpoint.json with the checksums that the files have now, as anybody can."""
    files = [
        {"name": path.name, "num_bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(folder.iterdir())
        if path.name != "checkpoint.json"
    ]
    content = {
        "step": step,
        "num_ranks": 1,
        "tokens_seen": (extra or {}).get("tokens_seen"),
        "validation_loss": None,
        "best_validation_loss": None,
        "model": None,
        "files": files,
        "version": 1,
    }
    reseal(folder, content)


def reseal(folder, content):
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / "checkpoint.json").write_text(json.dumps({"sha256": digest, "checkpoint": content}))


def rewrite_metadata(folder, step, change):
    """Change the unpickled .metadata and write it again."""
    path = folder / ".metadata"
    path.write_bytes(pickle.dumps(change(pickle.loads(path.read_bytes()))))
    seal(folder, step, {"tokens_seen": 7})


def with_place(metadata, name, **changes):
    for index, info in metadata.storage_data.items():
        if index.fqn == name:
            metadata.storage_data[index] = dataclasses.replace(info, **changes)
    return metadata
