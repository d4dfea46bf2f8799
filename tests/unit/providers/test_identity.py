"""Which GPU is behind an index: CUDA's order is not that of the driver's tool."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from rlx_ort.device import Device
from rlx_ort.providers import cuda, hardware
from rlx_ort.providers.cuda import CudaProvider
from rlx_ort.providers.engine.cuda_driver import CudaGpu, same_bus
from rlx_ort.providers.hardware import NvidiaGpu, cpu_name
from rlx_ort.providers.plugins import described

SLOW = NvidiaGpu("Slow", "580.1", 8 * 1024**3, "00000000:01:00.0")
FAST = NvidiaGpu("Fast", "580.1", 80 * 1024**3, "00000000:41:00.0")


def _ordinals(monkeypatch: pytest.MonkeyPatch, *gpus: CudaGpu) -> None:
    monkeypatch.setattr(cuda, "nvidia_gpus", lambda: (SLOW, FAST))
    monkeypatch.setattr(cuda, "cuda_gpus", lambda: gpus)


def test_a_cuda_index_names_the_gpu_cuda_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA counts the fast GPU first, the tool lists it second."""
    _ordinals(monkeypatch, CudaGpu("0000:41:00.0", "GPU-f"), CudaGpu("0000:01:00.0", "GPU-s"))
    facts = [CudaProvider().facts(Device("cuda", index)) for index in (0, 1)]
    assert [fact.hardware for fact in facts] == ["Fast", "Slow"]
    assert [fact.identity for fact in facts] == ["0000:41:00.0, GPU-f", "0000:01:00.0, GPU-s"]


def test_hidden_gpus_have_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CUDA_VISIBLE_DEVICES leaves one GPU, there is one device, and it is that one."""
    _ordinals(monkeypatch, CudaGpu("0000:01:00.0", "GPU-s"))
    assert CudaProvider().devices() == (Device("cuda", 0),)
    assert CudaProvider().facts(Device("cuda", 0)).hardware == "Slow"


def test_without_the_driver_library_the_tools_order_is_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is then named by the tool's order, without an identity."""
    _ordinals(monkeypatch)
    facts = CudaProvider().facts(Device("cuda", 1))
    assert (facts.hardware, facts.identity) == ("Fast", "")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("00000000:41:00.0", "0000:41:00.0", True),
        ("0000:41:00.0", "41:00.0", True),
        ("0000:41:00.0", "0001:41:00.0", False),
        ("", "", False),
    ],
)
def test_pci_addresses_are_compared_by_number(one: str, other: str, same: bool) -> None:
    """Tools write the domain with four or eight digits, or not at all; unknown ones are never the same."""
    assert same_bus(one, other) is same


def test_a_plugins_gpu_is_named_by_its_ids_and_told_apart_by_its_metadata() -> None:
    """Windows gives a LUID, Linux a PCI address."""
    gpu = SimpleNamespace(
        type="OrtHardwareDeviceType.GPU", vendor="NVIDIA", vendor_id=0x10DE, device_id=0x2335, metadata={"LUID": "77"}
    )
    assert described(gpu) == ("NVIDIA 10de:2335", "77")
    gpu.metadata = {"Description": "NVIDIA H200", "pci_bus_id": "0000:41:00.0"}
    assert described(gpu) == ("NVIDIA H200", "0000:41:00.0")


def test_a_plugins_cpu_is_the_processor() -> None:
    """Its ids say nothing but the vendor: profiles of two machines would pass for each other."""
    cpu = SimpleNamespace(type="OrtHardwareDeviceType.CPU", vendor="AMD", vendor_id=0x1022, device_id=0, metadata={})
    assert described(cpu) == (cpu_name(), "")


class _Nvml:
    """NVIDIA's management library as its header describes it, of a driver with two GPUs, of which one is lost."""

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802  # its name
        count._obj.value = 2
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: int) -> int:  # noqa: N802  # its name
        text.value = b"580.1"
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:  # noqa: N802  # its name
        handle._obj.value = 7
        return 15 * index  # NVML_ERROR_GPU_IS_LOST

    def nvmlDeviceGetName(self, handle: Any, text: Any, size: int) -> int:  # noqa: N802  # its name
        text.value = b"NVIDIA H200"
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:  # noqa: N802  # its name
        memory[:] = 81559 << 20, 1 << 20, 1 << 20
        return 0

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, info: Any) -> int:  # noqa: N802  # its name
        ctypes.memmove(ctypes.addressof(info._obj) + 36, b"00000000:41:00.0", 17)  # busId
        return 0


def test_the_drivers_library_lists_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that it has lost is left out."""
    monkeypatch.setattr(hardware, "nvml", _Nvml)
    [found] = hardware.nvidia_gpus.__wrapped__()
    assert found == NvidiaGpu("NVIDIA H200", "580.1", 81559 << 20, "00000000:41:00.0")
