"""When things happen on a device that is not there, worked out by hand."""

from dataclasses import replace

import pytest

from spurline.hardware import hardware_named
from spurline.simulate.timeline import HOST, Efficiency, Event, Stream, Timeline

# 1 FLOP/s, 1 byte/s, links of 10 and 1 bytes/s, and a host that costs nothing unless said otherwise.
SLOW = replace(
    hardware_named("h100"),
    bf16_flops=1.0,
    memory_bandwidth=1.0,
    intra_node_bandwidth=10.0,
    inter_node_bandwidth=1.0,
)
IDEAL = Efficiency(1, 1, 1, 0.5, launch_seconds=0, read_seconds=0, latency_seconds=0)


def timeline(**changes: float) -> Timeline:
    return Timeline(SLOW, replace(IDEAL, **changes))


def test_a_kernel_takes_the_longer_of_its_arithmetic_and_its_bytes() -> None:
    time = timeline()
    time.kernel(flops=3, num_bytes=2, is_fp32=False, kind="matmul")
    time.kernel(flops=1, num_bytes=5, is_fp32=False, kind="other")
    time.kernel(flops=2, num_bytes=1, is_fp32=True, kind="matmul")  # at half the rate
    assert time.busy == {"matmul": 3 + 4, "other": 5}
    assert time.finish() == 12
    assert sum(time.exposed.values()) == 0


def test_a_collective_on_its_own_stream_is_hidden_behind_kernels() -> None:
    time = timeline()
    end = time.collective("all-gather", "dp", intra_bytes=20, inter_bytes=3)  # 2 s and 3 s at the same time
    time.kernel(5, 0, False, "matmul")
    time.current.wait_event(end)
    assert time.finish() == 5
    assert time.exposed["all-gather"] == 0


def test_what_kernels_do_not_hide_is_exposed() -> None:
    time = timeline()
    end = time.collective("all-gather", "dp", 0, 7)
    time.kernel(5, 0, False, "matmul")
    time.current.wait_event(end)
    time.kernel(1, 0, False, "matmul")
    assert time.finish() == 8
    assert time.exposed["all-gather"] == 2


def test_collectives_share_a_link_but_not_two_links() -> None:
    time = timeline()
    first = time.collective("a", "group a", 0, 4)
    second = time.collective("b", "group b", 0, 4)
    inside = time.collective("c", "group c", 40, 0)
    assert (first.time, second.time, inside.time) == (4, 8, 4)


def test_the_host_waits_for_a_read_and_the_device_for_the_host() -> None:
    time = timeline(launch_seconds=1)
    time.kernel(5, 0, False, "matmul")  # launched at 1, done at 6
    time.host_read()
    assert time.host == 6
    time.kernel(1, 0, False, "matmul")  # launched at 7
    assert time.finish() == 8
    assert time.exposed[HOST] == 1 + 1


def test_streams_run_side_by_side_and_wait_for_events() -> None:
    time = timeline()
    side = Stream(time)
    time.kernel(2, 0, False, "matmul")
    with side:
        time.kernel(9, 0, False, "copy")
        done = Event(time).record()
    assert time.current is time.compute
    time.kernel(2, 0, False, "matmul")
    assert (time.compute.tail, side.tail) == (4, 9)
    time.current.wait_event(done)
    assert time.compute.tail == 9
    assert time.exposed["copy"] == 5


def test_what_is_exposed_and_what_is_computed_make_up_the_step() -> None:
    time = timeline(launch_seconds=0.25, latency_seconds=0.5, read_seconds=0.125)
    for _ in range(3):
        end = time.collective("exchange", "ep", 10, 2)
        time.kernel(1, 0, False, "matmul")
        time.host_read()
        time.current.wait_event(end)
        time.kernel(2, 0, False, "matmul")
    assert time.finish() == pytest.approx(time.busy["matmul"] + sum(time.exposed.values()))
