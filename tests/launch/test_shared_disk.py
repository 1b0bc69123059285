"""Nodes compare their folders before they start ranks; here each node is a thread."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from spurline import shared_folder
from spurline.launch import shared_disk
from spurline.launch.shared_disk import refuse_unless_shared
from spurline.train.exit_codes import RefusedError


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_folder, "SECONDS_TO_SEE", 0.3)


def told(folders: list[Path]) -> list[str]:
    """What each node is told; empty if its ranks may start."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=60))

    def check(node: int) -> str:
        try:
            refuse_unless_shared(folders[node], store, node, len(folders))
        except RefusedError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(folders)) as pool:
        return list(pool.map(check, range(len(folders))))


def test_nodes_that_share_the_folder_may_start(tmp_path: Path) -> None:
    assert told([tmp_path / "runs" / "run"] * 3) == [""] * 3
    assert list(tmp_path.iterdir()) == [], "nothing is left of the check"


def test_folder_that_was_there_stays(tmp_path: Path) -> None:
    assert told([tmp_path] * 2) == [""] * 2
    assert tmp_path.is_dir()


def test_all_nodes_are_refused_if_one_sees_another_folder(tmp_path: Path) -> None:
    here, there = tmp_path / "here" / "run", tmp_path / "there" / "run"
    there.mkdir(parents=True)  # it looks the same
    lines = told([here, here, there])
    assert len(set(lines)) == 1
    host = socket.gethostname()
    assert lines[0].startswith(f"node 2 (on {host}) can't see the run folder {here} that node 0 (on {host}) has made")
    assert "choose a --job.dump_folder on a disk that all nodes share" in lines[0]
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "run"], "nothing is left of the check"


def test_folder_that_can_not_be_made_is_left_to_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert told([tmp_path / "file" / "run"] * 2) == [""] * 2


def test_node_that_is_lost_is_left_to_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_disk, "_SECONDS_TO_ANSWER", 0.3)
    refuse_unless_shared(tmp_path, dist.HashStore(), 0, 2)
    refuse_unless_shared(tmp_path, dist.HashStore(), 1, 2)
