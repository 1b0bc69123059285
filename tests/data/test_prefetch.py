import threading

import pytest

from spurline.data.prefetch import DEPTH, Prefetcher


def test_values_come_in_order_and_a_few_steps_ahead() -> None:
    made: list[int] = []

    def make(step: int) -> int:
        made.append(step)
        return step * step

    with Prefetcher(make, range(3, 9)) as prefetcher:
        for step in range(3, 9):
            assert prefetcher.get(step) == step * step
            assert len(made) <= step - 2 + DEPTH
    assert made == list(range(3, 9))


def test_only_the_thread_makes_values_after_its_set_up() -> None:
    threads: list[int] = []
    with Prefetcher(
        lambda step: threads.append(threading.get_ident()), range(3), lambda: threads.append(-1)
    ) as batches:
        for step in range(3):
            batches.get(step)
    assert threads[0] == -1
    assert len({*threads} - {-1}) == 1
    assert threading.get_ident() not in threads


def test_error_is_raised_for_its_own_step() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise ValueError("data.path: line 7 is no text")
        return step

    with Prefetcher(make, range(5)) as prefetcher:
        assert [prefetcher.get(0), prefetcher.get(1)] == [0, 1]
        with pytest.raises(ValueError, match=r"^data.path: line 7 is no text$"):
            prefetcher.get(2)


def test_leaving_early_ends_the_thread_and_makes_no_more() -> None:
    made: list[int] = []
    with Prefetcher(made.append, range(1000)) as prefetcher:
        prefetcher.get(0)
    assert len(made) <= 1 + DEPTH
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_steps_out_of_order_are_refused() -> None:
    with Prefetcher(str, range(5)) as prefetcher, pytest.raises(AssertionError, match="asked for step 1"):
        prefetcher.get(1)
