"""The timeline of a simulated device: a host that launches, streams that run in order, and links.

Every kernel and collective of a step is put on its stream in program order, starts when its stream, the host and its
dependencies are ready, and takes the time given by a roofline model. Time that the compute stream is idle is exposed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from spurline.hardware import Hardware

HOST = "host"
"""Label of the time in which the compute stream waits for the host to launch something."""


@dataclass(frozen=True)
class Efficiency:
    """Fractions of the vendors' peak figures that are reached. All times in a plan are based on them."""

    matmul: float = 0.7
    """Fraction of peak FLOP/s reached by large matmuls."""
    memory: float = 0.8
    """Fraction of memory bandwidth reached by everything else."""
    link: float = 0.8
    """Fraction of the bandwidth reached within a node and between nodes."""
    fp32_matmul: float = 1 / 16
    """Peak of float32 matmuls without tensor cores, as a fraction of the bfloat16 peak."""
    launch_seconds: float = 5e-6
    """Host time to launch one kernel."""
    read_seconds: float = 10e-6
    """Delay until the host has a value after the device is done."""
    latency_seconds: float = 15e-6
    """Latency of a collective of any size."""


class Event:
    """A point on a stream: when everything before it is done, and the label of the last operation."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.time, self.label = timeline, 0.0, HOST

    def record(self, stream: Stream | None = None) -> Event:
        stream = stream or self.timeline.current
        self.time, self.label = stream.tail, stream.label
        return self

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.timeline.current).wait_event(self)

    def synchronize(self) -> None:
        self.timeline.host_wait(self.time)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return (end.time - self.time) * 1000


class Stream:
    """Runs operations in order. As a context manager, it is the current stream inside the block."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.tail = 0.0
        """When all operations on it are done."""
        self.label = HOST
        """Label of the last operation."""
        self._before: list[Stream] = []

    def wait_event(self, event: Event) -> None:
        self.wait_until(event.time, event.label)

    def wait_stream(self, other: Stream) -> None:
        self.wait_until(other.tail, other.label)

    def wait_until(self, time: float, label: str) -> None:
        if time <= self.tail:
            return
        ready = max(self.tail, self.timeline.host)
        if self is self.timeline.compute:
            self.timeline.exposed[HOST] += ready - self.tail
            self.timeline.exposed[label] += max(0.0, time - ready)
        self.tail, self.label = max(ready, time), label

    def record_event(self, event: Event | None = None) -> Event:
        return (event or Event(self.timeline)).record(self)

    def synchronize(self) -> None:
        self.timeline.host_wait(self.tail)

    def run(self, seconds: float, label: str) -> None:
        """Enqueue a kernel, which starts no earlier than the host's current time."""
        self.wait_until(self.timeline.host, HOST)
        self.tail, self.label = self.tail + seconds, label

    def __enter__(self) -> Stream:
        self._before.append(self.timeline.current)
        self.timeline.current = self
        return self

    def __exit__(self, *exception: object) -> None:
        self.timeline.current = self._before.pop()


class Timeline:
    def __init__(self, hardware: Hardware, efficiency: Efficiency | None = None) -> None:
        self.hardware, self.efficiency = hardware, efficiency or Efficiency()
        self.host = 0.0
        self.compute = self.current = Stream(self)
        self.groups: dict[str, Stream] = {}
        self.links = {"intra": 0.0, "inter": 0.0}
        """When each link becomes free; it carries one collective at a time."""
        self.busy: defaultdict[str, float] = defaultdict(float)
        """Seconds of kernels on the compute stream by kind, and of collectives by label."""
        self.exposed: defaultdict[str, float] = defaultdict(float)
        """Seconds in which the compute stream was idle, by what it waited for."""

    def kernel(self, flops: float, num_bytes: float, is_fp32: bool, kind: str) -> None:
        """Launch a kernel on the current stream."""
        peak = self.hardware.bf16_flops * self.efficiency.matmul * (self.efficiency.fp32_matmul if is_fp32 else 1.0)
        seconds = max(flops / peak, num_bytes / (self.hardware.memory_bandwidth * self.efficiency.memory))
        self.host += self.efficiency.launch_seconds
        self.current.run(seconds, kind)
        if self.current is self.compute:
            self.busy[kind] += seconds

    def collective(self, label: str, group: str, intra_bytes: float, inter_bytes: float) -> Event:
        """Start a collective after the current stream and earlier work of its group; returns the event of its end."""
        bandwidth = {"intra": self.hardware.intra_node_bandwidth, "inter": self.hardware.inter_node_bandwidth}
        needed = {"intra": intra_bytes, "inter": inter_bytes}
        seconds = {link: needed[link] / (bandwidth[link] * self.efficiency.link) for link in needed}
        self.host += self.efficiency.launch_seconds
        stream = self.groups.setdefault(group, Stream(self))
        used = [link for link in needed if needed[link]]
        start = max([self.host, stream.tail, self.current.tail, *(self.links[link] for link in used)])
        end = start + max(seconds.values()) + self.efficiency.latency_seconds
        for link in used:
            self.links[link] = start + seconds[link]
        stream.tail, stream.label = end, label
        self.busy[label] += end - start
        return Event(self).record(stream)

    def host_wait(self, time: float) -> None:
        """Make the host wait for a point in time on the device, plus the delay of a read."""
        self.host = max(self.host, time) + self.efficiency.read_seconds

    def host_read(self) -> None:
        """Make the host wait for all work on the current stream."""
        self.host_wait(self.current.tail)

    def finish(self) -> float:
        """The time at which everything is done; the compute stream waits for it."""
        last = max([self.compute, *self.groups.values()], key=lambda stream: stream.tail)
        self.compute.wait_until(last.tail, last.label)
        return max(self.compute.tail, self.host)
