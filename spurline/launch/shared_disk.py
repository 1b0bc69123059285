"""Refuse nodes that do not share the run folder, before any of their ranks is started."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from spurline.shared_folder import SECONDS_TO_SEE, not_shared, sees, token_in
from spurline.train.exit_codes import RefusedError

_SECONDS_TO_ANSWER = SECONDS_TO_SEE + 10


def refuse_unless_shared(folder: Path, store: dist.Store, node: int, num_nodes: int) -> None:
    """Raise a RefusedError on all nodes if one of them does not see what node 0 writes to the folder.

    `store` belongs to this round of the rendezvous. Ranks check their own folder in the same way; this check comes
    first because launchers meet long before their ranks do. What keeps it from an answer (a lost node, a folder that
    node 0 can't create) is left to the ranks, which report it.
    """
    try:
        problem = _ask(folder, store, num_nodes) if node == 0 else _answer(folder, store, node)
    except (dist.DistError, OSError):
        return
    if problem:
        raise RefusedError(problem)


def _ask(folder: Path, store: dist.Store, num_nodes: int) -> str:
    """As node 0, write a file and collect what the others see of it; returns the error message for all nodes."""
    blind = []
    with ExitStack() as until_all_have_looked:
        try:
            store.set(_TOKEN, until_all_have_looked.enter_context(token_in(folder)))
        except OSError:
            store.set(_TOKEN, "")
            raise
        for node in range(1, num_nodes):
            has_seen, host = json.loads(_wait_for(store, _seen_by(node)))
            if not has_seen:
                blind.append(f"node {node} (on {host})")
    problem = not_shared(", ".join(blind), folder.absolute(), f"node 0 (on {socket.gethostname()})") if blind else ""
    store.set(_PROBLEM, problem)
    return problem


def _answer(folder: Path, store: dist.Store, node: int) -> str:
    """As another node, look for the file and tell; returns the error message."""
    token = _wait_for(store, _TOKEN)
    if not token:
        return ""
    store.set(_seen_by(node), json.dumps([sees(folder / token), socket.gethostname()]))
    return _wait_for(store, _PROBLEM)


_TOKEN, _PROBLEM = "spurline/shared/token", "spurline/shared/problem"


def _seen_by(node: int) -> str:
    return f"spurline/shared/seen_by_{node}"


def _wait_for(store: dist.Store, key: str) -> str:
    store.wait([key], timedelta(seconds=_SECONDS_TO_ANSWER))
    return store.get(key).decode()
