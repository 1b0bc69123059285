from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from spurline import device
from spurline.moe.kernels.choose import verdicts
from spurline.moe.kernels.kernel import Work
from spurline.moe.kernels.triton import experts

GPU = "cu" + "da"


@pytest.fixture
def accelerator(monkeypatch):  # type: ignore[no-untyped-def]
    """Has PyTorch say that it is built for a kind of device, of which this machine has some."""

    def has(kind: str | None, count: int) -> None:
        built_for = None if kind is None else torch.device(kind)
        monkeypatch.setattr(
            torch.accelerator,
            "current_accelerator",
            lambda check_available=False: built_for if count or not check_available else None,
        )
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

    return has


def test_auto_is_the_accelerator_of_this_machine_else_the_cpu(accelerator, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    for kind, count, expected in ((None, 0, "cpu"), (GPU, 0, "cpu"), (GPU, 4, f"{GPU}:3"), ("xpu", 8, "xpu:3")):
        accelerator(kind, count)
        assert device.pick_device() == torch.device(expected)
        assert device.pick_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"])
def test_process_that_sees_one_device_of_its_own_takes_it(accelerator, monkeypatch, variable: str) -> None:
    """As with Slurm's --gpus-per-task=1, or with an affinity mask for each rank."""
    accelerator("xpu", 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv(variable, "3")
    assert device.pick_device() == torch.device("xpu", 0)
    accelerator("xpu", 4)
    assert device.pick_device() == torch.device("xpu", 3)
    accelerator("xpu", 3)
    with pytest.raises(ValueError, match="this is process 4 on this machine, which has 3 of them"):
        device.pick_device()


def test_device_without_collectives_is_for_one_rank(accelerator, monkeypatch) -> None:
    accelerator("mps", 1)
    assert device.pick_device() == device.pick_device("mps") == torch.device("mps", 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert device.pick_device() == torch.device("cpu")
    with pytest.raises(ValueError, match=r"^training.device mps is one device: train on one rank, or use .* cpu$"):
        device.pick_device("mps")


@pytest.mark.parametrize(
    ("built_for", "count", "wanted", "message"),
    [
        (None, 0, GPU, rf"^training.device {GPU}: this PyTorch \(.*\) is built for CPUs alone\. Use .* auto or cpu$"),
        (GPU, 2, "xpu", rf"^training.device xpu: this PyTorch \(.*\) is built for {GPU} devices\. Use .* auto or cpu$"),
        (GPU, 0, GPU, rf"^training.device {GPU}: PyTorch finds no such device here; check the driver, .* auto or cpu$"),
        (GPU, 2, GPU, rf"^training.device {GPU}: this is process 3 on this machine, which has 2 of them\. Start at"),
    ],
)
def test_absent_device_is_one_line(accelerator, monkeypatch, built_for, count, wanted, message) -> None:
    accelerator(built_for, count)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match=message) as error:
        device.pick_device(wanted)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(("kind", "bound"), [(GPU, torch.device(GPU, 3)), ("xpu", None), ("cpu", None)])
def test_only_groups_that_can_be_split_are_bound_to_a_device(
    monkeypatch: pytest.MonkeyPatch, kind: str, bound: torch.device | None
) -> None:
    """A mesh splits a bound group, and gets the backend of a new group for the bound device: neither works on XPUs."""
    current: list[int] = []
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: given.update(options, backend=backend))
    device.start_process_group(torch.device(kind, 3) if kind != "cpu" else torch.device("cpu"), 9, FakeStore(), 3, 8)
    assert given["device_id"] == bound
    assert current == ([] if kind == "cpu" else [3])
    assert given["backend"] == {"xpu": "xccl", "cpu": "gloo"}.get(kind, "nccl")


@pytest.fixture
def gloo_group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group()
    dist.destroy_process_group()


def test_timeout_is_set_where_the_backend_has_one(gloo_group: dist.ProcessGroup) -> None:
    device.limit_waiting(gloo_group, 7)
    assert gloo_group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
    said: list[timedelta] = []

    class OtherBackend:
        def set_timeout(self, timeout: timedelta) -> None:
            said.append(timeout)
            raise RuntimeError("Backend other does not support setting timeout")

    device.limit_waiting(OtherBackend(), 8)  # type: ignore[arg-type]
    assert said == [timedelta(seconds=8)]


def test_barrier_names_the_device_of_a_group_that_is_bound_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(dist, "barrier", lambda device_ids: given.append(device_ids))
    device.wait_for_all_ranks(torch.device("xpu", 3))
    device.wait_for_all_ranks(torch.device("cpu"))
    assert given == [[3], None]


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        (GPU, "NVIDIA H100 80GB HBM3", 989e12),
        ("xpu", "Intel(R) Data Center GPU Max 1550", 416e12),  # one of its two stacks, which is a device
        ("xpu", "Intel(R) Arc(TM) A770 Graphics", None),
    ],
)
def test_peak_is_known_of_listed_accelerators(monkeypatch, kind: str, name: str, expected: float | None) -> None:
    monkeypatch.setattr(torch.get_device_module(kind), "get_device_name", lambda device: name)
    peak = device.peak_flops(torch.device(kind, 0), torch.bfloat16)
    assert peak == (expected and pytest.approx(expected, rel=1e-3))
    assert device.peak_flops(torch.device(kind, 0), torch.float32) is None


@pytest.mark.parametrize(
    ("capability", "is_kernel", "chosen"),
    [((8, 0), False, "triton"), ((9, 0), True, "grouped_mm"), ((10, 3), True, "triton"), ((12, 0), False, "triton")],
)
def test_grouped_matmul_is_a_kernel_for_bfloat16_on_some_devices(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_kernel: bool, chosen: str
) -> None:
    module = getattr(torch, GPU)
    monkeypatch.setattr(module, "is_available", lambda: True)
    monkeypatch.setattr(module, "get_device_capability", lambda: capability)
    assert device.has_grouped_mm_kernel(GPU, torch.bfloat16) is is_kernel
    assert not device.has_grouped_mm_kernel(GPU, torch.float32)
    assert device.has_doubtful_grouped_mm(GPU) is (capability[0] == 10)
    assert not device.has_doubtful_grouped_mm("xpu")
    monkeypatch.setattr(experts, "HAS_TRITON", True)
    assert next(iter(verdicts(Work("swiglu", GPU, torch.bfloat16, 64, 32)))) == chosen
    assert not device.has_grouped_mm_kernel("xpu", torch.bfloat16)


@pytest.mark.parametrize(("allowed", "chosen"), [("", "triton"), ("0", "triton"), ("1", "grouped_mm")])
def test_grouped_matmul_is_a_kernel_on_rocm_if_pytorch_is_told_so(
    monkeypatch: pytest.MonkeyPatch, allowed: str, chosen: str
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(experts, "HAS_TRITON", True)
    monkeypatch.setenv("ROCM_ALLOW_GROUP_GEMM_CK", allowed)
    work = Work("swiglu", GPU, torch.bfloat16, 64, 32)
    assert max(verdicts(work), key=lambda name: verdicts(work)[name].score) == chosen
