"""Which devices work here: order, priority, names and what is remembered."""

import sys
import threading
from typing import Any

import pytest

from rlx_ort import Device, NoViableDeviceError
from rlx_ort.providers.registry import (
    availability,
    available_apple_devices,
    available_devices,
    drain_device,
    fastest_among,
    fastest_device,
    full_name,
    is_available,
    known_devices,
    supports_run_slots,
)


def test_a_device_whose_probe_succeeds_is_available(machine: Any) -> None:
    """The provider's probe decides."""
    machine.add("cuda")
    assert is_available(Device.CUDA)
    assert is_available("nvidia")


def test_a_device_whose_probe_fails_is_not_available_and_says_why(machine: Any) -> None:
    """The reason is that of the probe, which runs once in a process, however often one asks."""
    provider = machine.add("cuda", answer=machine.away)
    assert [is_available("cuda") for _ in range(3)] == [False] * 3
    assert availability("cuda").reason == "libfake.so is missing"
    assert provider.probes == 1


def test_a_device_without_a_provider_is_not_available_and_says_why() -> None:
    """A known name that nothing serves is answered, not raised."""
    assert not is_available("tpu")
    assert "no ONNX Runtime execution provider" in availability("tpu").reason
    assert availability("tpu").remedy


def test_registering_again_replaces_and_asks_again(machine: Any) -> None:
    """A later provider for a kind is the one that counts."""
    machine.add("cuda", answer=machine.away)
    assert not is_available("cuda")
    machine.add("cuda")
    assert is_available("cuda")


def test_available_devices_come_in_the_order_of_the_table(machine: Any) -> None:
    """Not the priority but `Device.all()` orders them."""
    machine.add("webgpu", "gpu")
    machine.add("cuda", answer=machine.away)
    machine.add("cpu")
    assert available_devices() == [Device.CPU, Device.GPU, Device.WEBGPU]


def test_apple_devices_are_listed_on_macos_in_their_order(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metal, then gpu, and nothing else."""
    machine.add("cpu")
    machine.add("gpu")
    machine.add("metal")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert available_apple_devices() == [Device.METAL, Device.GPU]


def test_apple_devices_are_nowhere_else(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on another system is no Apple device."""
    machine.add("gpu")
    monkeypatch.setattr(sys, "platform", "linux")
    assert available_apple_devices() == []


def test_the_fastest_device_is_the_first_by_priority(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No graph or cost is involved, nor `RLX_DEVICE`; a device that is away or must be named is not picked."""
    machine.add("cpu")
    machine.add("webgpu")
    machine.add("tpu", answer=machine.away)
    machine.add("cuda", selectable=False)
    monkeypatch.setenv("RLX_DEVICE", "cpu")
    assert fastest_device() == Device.WEBGPU


def test_known_devices_are_every_kind_and_every_index(machine: Any) -> None:
    """By kind and index, as the providers count them; nothing is probed."""
    provider = machine.add("cuda", devices=lambda self: (Device("cuda"), Device("cuda:1")))
    found = known_devices()
    assert [device for device in found if device.kind == "cuda"] == [Device("cuda"), Device("cuda:1")]
    assert {device for device in found if not device.index} == set(Device.all())
    assert provider.probes == 0


def test_a_provider_of_which_nothing_is_wanted_is_not_asked_for_its_devices(machine: Any) -> None:
    """Counting CUDA's cards starts its driver, which a denial must prevent."""

    def count(self: Any) -> tuple[Device, ...]:
        raise AssertionError("was asked")

    machine.add("cuda", devices=count)
    assert Device.CUDA not in known_devices(lambda device: device != Device.CUDA)


def test_without_any_device_the_fastest_raises_with_the_reasons(machine: Any) -> None:
    """The original answered CPU even where there was none."""
    machine.add("cuda", answer=machine.away)
    with pytest.raises(NoViableDeviceError, match=r"cuda: libfake\.so is missing"):
        fastest_device()


@pytest.mark.parametrize(
    "devices", [[Device.CPU, Device.METAL, Device.ROCM], ["cpu", "metal", "rocm"], "cpu,metal,rocm"]
)
def test_fastest_among_follows_the_priority(devices: Any) -> None:
    """The first of the priority that is in a list of devices or names, or in one string."""
    assert fastest_among(devices) == Device.ROCM


def test_fastest_among_unknown_kinds_is_the_first(machine: Any) -> None:
    """Kinds without a place in the priority come after all others, in the order given."""
    machine.add("zeta9")
    machine.add("alpha9")
    assert fastest_among([Device("zeta9"), Device("alpha9")]) == Device("zeta9")
    assert fastest_among([Device("zeta9"), Device.CPU]) == Device.CPU


def test_fastest_among_nothing_raises() -> None:
    """The original answered CPU, which may be the one thing that was denied."""
    with pytest.raises(NoViableDeviceError, match="empty"):
        fastest_among([])


@pytest.mark.parametrize(
    ("device", "name"), [("cpu", "CPU (MLAS)"), ("directx", "DirectX 12"), ("gpu", "GPU (wgpu)"), ("cuda:1", "CUDA 1")]
)
def test_the_full_name_is_the_display_name_with_the_cpus_matrix_library(device: str, name: str) -> None:
    """ONNX Runtime multiplies with MLAS on the CPU."""
    assert full_name(device) == name


def test_run_slots_work_wherever_there_is_a_provider(machine: Any) -> None:
    """The answer is static: it does not depend on the device being here."""
    provider = machine.add("cuda", answer=machine.away)
    assert supports_run_slots("cuda")
    assert not supports_run_slots("tpu")
    assert provider.probes == 0


def test_draining_waits_for_the_run_of_another_thread(machine: Any) -> None:
    """A device that runs one session at a time is waited for."""
    lock = threading.Lock()
    machine.add("gpu", run_lock=lambda self: lock)
    drained = threading.Event()
    with lock:
        thread = threading.Thread(target=lambda: (drain_device("gpu"), drained.set()))
        thread.start()
        assert not drained.wait(0.05)
    assert drained.wait(5)
    thread.join()


def test_draining_a_device_that_nothing_serves_is_harmless() -> None:
    """There is nothing to wait for."""
    drain_device("tpu")
