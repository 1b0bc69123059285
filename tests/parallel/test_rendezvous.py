"""Ranks that meet in a store: attempts apart from each other, and the same options on all of them."""

import os
import threading
from unittest import mock

import pytest
import torch.distributed as dist

from spurline.parallel.rendezvous import Meeting, describe_differences, meet, name_ranks, refuse_different_options


def compare(*options: dict[str, str]) -> list[str]:
    """What each rank is told; the ranks are threads."""
    store = dist.HashStore()
    told = [""] * len(options)

    def run(rank: int) -> None:
        try:
            refuse_different_options(Meeting(rank, len(options), store, store), options[rank])
        except ValueError as error:
            told[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(options))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def test_ranks_with_the_same_options_go_on():
    assert compare({"seed": "0"}, {"seed": "0"}, {"seed": "0"}) == [""] * 3


def test_ranks_with_other_options_are_all_refused_with_the_same_line():
    told = compare({"seed": "0", "lr": "1"}, {"seed": "1", "lr": "1"}, {"seed": "0", "lr": "2"})
    line = (
        "ranks were started with different options: seed is 0 on ranks 0, 2 and 1 on rank 1;"
        " lr is 1 on ranks 0, 1 and 2 on rank 2. Start all ranks with the same command"
    )
    assert told == [line] * 3


def test_option_that_one_rank_does_not_know_differs():
    assert "lr is 1 on rank 0 and absent on rank 1" in describe_differences([{"lr": "1"}, {}])


def test_many_differences_are_cut():
    others = {f"option{i}": "1" for i in range(9)}
    line = describe_differences([others, dict.fromkeys(others, "2")])
    assert line.count(" is ") == 5
    assert "; and 4 more." in line


@pytest.mark.parametrize(
    ("ranks", "named"),
    [([3], "rank 3"), ([0, 1], "ranks 0, 1"), ([4, 0, 1, 2], "ranks 0 to 2, 4"), ([1, 3, 4], "ranks 1, 3, 4")],
)
def test_ranks_are_named(ranks, named):
    assert name_ranks(ranks) == named


def test_restarted_ranks_see_nothing_of_the_attempt_before():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with mock.patch.dict(os.environ, environment):
        first = meet()
        first.store.set("address", "of a killed rank")
        assert first.store.get("address") == b"of a killed rank"
        assert first.side_store.check(["address"])
        with mock.patch.dict(os.environ, TORCHELASTIC_RESTART_COUNT="1"):
            second = meet()
        assert not second.store.check(["address"])
        assert not second.side_store.check(["address"])
