import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from spurline.testing import RankError, RankPool, run_ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A pool to break, that does not wait long for the rest once a rank has failed."""
    with RankPool(grace=1.0) as pool:
        yield pool


def describe(rank: int, *args: Any) -> tuple[Any, ...]:
    return rank, dist.get_rank(), dist.get_world_size(), dist.get_backend(), torch.get_num_threads(), *args


def process_id(rank: int) -> int:
    return os.getpid()


def sum_of_ranks(rank: int) -> float:
    x = torch.tensor(float(rank))
    dist.all_reduce(x)
    return x.item()


def add_over_ranks(rank: int, x: Tensor, by_name: dict[str, Tensor]) -> dict[str, Tensor]:
    total = x + rank
    dist.all_reduce(total)
    return {"total": total, "half": by_name["bf16"][::2], "grad": (total * 1).requires_grad_() * 2}


def random_number(rank: int) -> float:
    return torch.rand(()).item()


def fail_on(rank: int, failing: list[int]) -> None:
    if rank in failing:
        raise KeyError(f"boom on {rank}")
    dist.barrier()


class StubbornError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("neither of these is an argument")


def raise_stubborn(rank: int) -> None:
    raise StubbornError(1, 2)


def exit_on_1(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def kill_all(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_missing_rank(rank: int) -> None:
    if rank != 1:
        dist.all_reduce(torch.ones(2))


def wait_in_functional(rank: int) -> None:
    if rank == 0:
        functional.wait_tensor(functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD))


def sleep_for_ever(rank: int) -> None:
    while True:
        time.sleep(1)


def stop_itself(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def return_a_generator(rank: int) -> Any:
    return (i for i in range(3))


def one_more_on_rank_0(rank: int) -> None:
    """A collective that rank 1 never joins and rank 0 does not wait for."""
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def sums_in_mesh(rank: int) -> tuple[float, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    sums = []
    for axis in ("outer", "inner"):
        x = torch.tensor(float(rank))
        dist.all_reduce(x, group=mesh[axis].get_group())
        sums.append(x.item())
    return sums[0], sums[1]


def num_threads_of_process(rank: int) -> int:
    return len(os.listdir("/proc/self/task"))


def compile_for_lengths(rank: int, lengths: list[int]) -> None:
    with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False):
        compiled = torch.compile(double, backend="eager", fullgraph=True)
        for length in lengths:
            compiled(torch.ones(length))


def double(x: Tensor) -> Tensor:
    return 2 * x


def test_results_come_by_rank(ranks: RankPool) -> None:
    assert ranks.run(describe, 2, "a", 3) == [(r, r, 2, "gloo", 1, "a", 3) for r in range(2)]


def test_world_sizes_in_succession_reuse_processes(ranks: RankPool) -> None:
    four = ranks.run(process_id, 4)
    assert len(set(four)) == 4
    for size in (4, 2, 8, 1, 4, 2, 2):
        assert ranks.run(sum_of_ranks, size) == [sum(range(size))] * size
    assert ranks.run(process_id, 4) == four


def test_only_needed_processes_start() -> None:
    with RankPool() as pool:
        pool.run(process_id, 2)
        assert len(pool._workers) == 2


def test_tensors_travel_by_value(ranks: RankPool) -> None:
    x, half = torch.arange(3.0), torch.arange(4, dtype=torch.bfloat16)
    results = ranks.run(add_over_ranks, 2, x, {"bf16": half})
    for result in results:
        assert torch.equal(result["total"], 2 * torch.arange(3.0) + 1)
        assert torch.equal(result["half"], half[::2])
        assert torch.equal(result["grad"], 2 * result["total"])
    results[0]["total"].zero_()
    assert results[1]["total"].any()
    assert torch.equal(x, torch.arange(3.0))


def test_every_call_starts_from_the_same_seed(ranks: RankPool) -> None:
    first = ranks.run(random_number, 2)
    assert first[0] == first[1]
    assert ranks.run(random_number, 2) == first


def test_world_stays_up_between_calls_of_one_size(ranks: RankPool) -> None:
    for size in (2, 4, 8):
        ranks.run(sum_of_ranks, size)
        world = ranks._world
        begin = time.perf_counter()
        for _ in range(10):
            ranks.run(sum_of_ranks, size)
        print(f"warm call on {size} ranks: {100 * (time.perf_counter() - begin):.2f} ms")
        assert ranks._world is world is not None


def test_exception_names_rank_and_line_and_the_pool_recovers(pool: RankPool) -> None:
    pool.run(sum_of_ranks, 4)
    with pytest.raises(RankError) as caught:
        pool.run(fail_on, 4, [2])
    error = caught.value
    assert [(f.rank, f.kind) for f in error.failures] == [(2, "raised"), (0, "stuck"), (1, "stuck"), (3, "stuck")]
    assert "rank 2 raised KeyError: 'boom on 2'" in str(error)
    assert 'raise KeyError(f"boom on {rank}")' in str(error)
    assert "in barrier, called by fail_on" in error.failures[1].summary
    assert isinstance(error.__cause__, KeyError)
    assert pool.run(sum_of_ranks, 4) == [6.0] * 4


def test_all_failing_ranks_are_listed_and_equal_tracebacks_shown_once(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(raise_stubborn, 2)
    assert sorted(f.rank for f in caught.value.failures) == [0, 1]
    assert "--- ranks 0, 1 raised" in str(caught.value)
    assert str(caught.value).count("Traceback") == 1
    assert caught.value.__cause__ is None  # it can't be pickled back; its text is there


def test_hang_names_ranks_and_collective(pool: RankPool) -> None:
    pool.run(sum_of_ranks, 4)
    with pytest.raises(RankError) as caught:
        pool.run(wait_for_missing_rank, 4, timeout=1)
    failures = caught.value.failures
    assert [f.rank for f in failures] == [0, 2, 3]
    for failure in failures:
        assert failure.kind == "stuck"
        assert "was stuck in all_reduce, called by wait_for_missing_rank" in failure.summary
        assert "dist.all_reduce(torch.ones(2))" in failure.details
    assert pool.run(sum_of_ranks, 2) == [1.0, 1.0]


def test_hang_in_functional_collective_and_outside_of_any(pool: RankPool) -> None:
    pool.run(sum_of_ranks, 2)
    with pytest.raises(RankError, match="rank 0 was stuck in wait_tensor, called by wait_in_functional"):
        pool.run(wait_in_functional, 2, timeout=1)
    with pytest.raises(RankError, match=r"rank 1 was stuck in sleep_for_ever .*test_testing.py:\d+"):
        pool.run(sleep_for_ever, 2, timeout=1)


def compute_for_a_while(rank: int) -> int:
    end = time.monotonic() + 1.6  # by the clock: on a busy machine so many CPU seconds could take minutes
    while time.monotonic() < end:
        pass
    return rank


def test_ranks_that_compute_are_slow_and_not_stuck(pool: RankPool) -> None:
    assert pool.run(compute_for_a_while, 2, timeout=0.5) == [0, 1]


def test_stopped_process_is_reported_and_replaced(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 was stuck and did not respond to a signal"):
        pool.run(stop_itself, 1, timeout=1)
    assert pool.run(sum_of_ranks, 1) == [0.0]


def test_dead_rank_comes_first_with_its_exit_code(pool: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(exit_on_1, 2)
    assert caught.value.failures[0].rank == 1
    assert caught.value.failures[0].summary == "died: its process ended with exit code 7"
    with pytest.raises(RankError, match="rank 1 died: killed by SIGKILL"):
        pool.run(kill_all, 2)
    assert pool.run(sum_of_ranks, 2) == [1.0, 1.0]


def test_process_that_died_between_calls_is_replaced(pool: RankPool) -> None:
    os.kill(pool.run(process_id, 2)[1], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 died: killed by SIGKILL"):
        pool.run(sum_of_ranks, 2)
    assert pool.run(sum_of_ranks, 2) == [1.0, 1.0]


def test_result_that_does_not_pickle_is_an_error_of_its_rank(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 raised TypeError: cannot pickle 'generator' object"):
        pool.run(return_a_generator, 2)


def test_function_must_be_importable(pool: RankPool) -> None:
    with pytest.raises(ValueError, match=r"<lambda> can't be sent to the ranks: it must be at the top level"):
        pool.run(lambda rank: rank, 2)
    with pytest.raises(ValueError, match="world_size must be at least 1"):
        pool.run(process_id, 0)


def test_ranks_out_of_step_do_not_disturb_the_next_call(pool: RankPool) -> None:
    pool.run(one_more_on_rank_0, 2)
    assert pool.run(sum_of_ranks, 2, timeout=10) == [1.0, 1.0]


def test_processes_stay_unless_a_call_made_groups_of_its_own(pool: RankPool) -> None:
    before = pool.run(process_id, 4)
    assert pool.run(sum_of_ranks, 4) == [6.0] * 4
    assert pool.run(process_id, 4) == before
    pool.run(sums_in_mesh, 4)
    assert not set(before) & set(pool.run(process_id, 4))


def test_device_mesh_can_be_made_in_every_call(ranks: RankPool) -> None:
    for _ in range(3):
        assert ranks.run(sums_in_mesh, 4) == [(2.0, 1.0), (4.0, 1.0), (2.0, 5.0), (4.0, 5.0)]


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_groups_of_a_call_do_not_pile_up(ranks: RankPool) -> None:
    ranks.run(sums_in_mesh, 4)
    before = ranks.run(num_threads_of_process, 4)
    for _ in range(5):
        ranks.run(sums_in_mesh, 4)
    assert max(ranks.run(num_threads_of_process, 4)) <= max(before)


def test_compiled_code_of_one_call_does_not_use_up_the_limit_of_the_next(ranks: RankPool) -> None:
    ranks.run(compile_for_lengths, 1, [2, 3])
    ranks.run(compile_for_lengths, 1, [4, 5])


def test_closed_pool_says_so() -> None:
    pool = RankPool()
    pool.close()
    with pytest.raises(ValueError, match="this RankPool is closed"):
        pool.run(process_id, 1)


SCRIPT = """
import os, sys, time
import torch.distributed as dist
from spurline.testing import run_ranks

def work(rank, wait):
    if wait:
        os.write(1, b"%d\\n" % os.getpid())
        if rank == 0:
            dist.barrier()
        time.sleep(1000)
    return os.getpid()

if __name__ == "__main__":
    print(*run_ranks(work, 2, sys.argv[1] == "wait", timeout=1000), sep="\\n", flush=True)
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def gone_soon(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_script_leaves_no_process_and_no_warning(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script, "return"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    pids = [int(line) for line in done.stdout.split()]
    assert len(pids) == 2
    assert gone_soon(pids)


def test_ranks_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, script, "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        try:
            pids = [int(parent.stdout.readline()) for _ in range(2)]
            assert all(map(alive, pids))
        finally:
            parent.kill()
        assert gone_soon(pids)


def test_run_ranks_needs_no_pool() -> None:
    assert run_ranks(sum_of_ranks, 2) == [1.0, 1.0]
