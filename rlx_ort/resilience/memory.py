"""Memory of devices: the share of each model, and which to free when a device has none left.

The budgets and the measuring are in `rlx_ort.execution.residency`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from rlx_ort.device import Device
from rlx_ort.execution.residency import budget_of, residency
from rlx_ort.execution.resident import Resident
from rlx_ort.faults import OUT_OF_MEMORY, fault_of
from rlx_ort.providers.registry import provider_of


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What a graph takes on a device.

    Attributes:
        model: the graph's name.
        nbytes: bytes that its session takes, or took before it was closed; None without a budget, since nothing is
            measured then.
        sessions: its sessions that exist now.
        openings: how often a session was opened for it.
        evictions: how often its session was closed to make room for others.
        idle_s: seconds since its last use; without a budget, since its last opening.
    """

    model: str
    nbytes: int | None
    sessions: int
    openings: int
    evictions: int
    idle_s: float


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """What this process uses of a device's memory.

    Attributes:
        device: the device.
        budget_bytes: its budget, None if it has none.
        used_bytes: the bytes that count against the budget; None if it cannot be read and no budget is set.
        source: where `used_bytes` comes from.
        models: the graphs that had a session there, the one used last first.
    """

    device: Device
    budget_bytes: int | None
    used_bytes: int | None
    source: str
    models: tuple[ModelMemory, ...]


def device_memory(device: Device | str) -> DeviceMemory:
    """Return this process's share of a device's memory, and its budget.

    Raises:
        DeviceParseError: the name is no device, or `RLX_DEVICE_MEMORY` does not parse.
    """
    device = Device(device)
    now = time.monotonic()
    models = []
    for each in reversed(residency().residents(device)):
        nbytes = each.nbytes if each.governed else None
        models.append(ModelMemory(each.model, nbytes, each.sessions, each.opened, each.evictions, now - each.used_s))
    budget = budget_of(device)
    provider = provider_of(device)
    reading = None if provider is None else provider.memory(device)
    if reading is not None and reading.whole:
        return DeviceMemory(device, budget, reading.nbytes, reading.source, tuple(models))
    if budget is None:
        return DeviceMemory(device, None, None, "", tuple(models))
    source = "weights of the open sessions" if reading is None else f"sum over the sessions, from {reading.source}"
    return DeviceMemory(device, budget, residency().used(device), source, tuple(models))


def memory_use() -> list[DeviceMemory]:
    """Return this process's share of the memory of each device on which it has opened sessions."""
    return [device_memory(each) for each in dict.fromkeys(each.device for each in residency().residents())]


def freed_after(error: Exception, device: Device, kept: Resident | None) -> bool:
    """Free the memory of idle sessions of the device, those of other runners too, if the error is its lack of memory.

    `kept` is the session that needs the memory.

    Returns:
        Whether anything was freed, so that the run should be tried again.
    """
    return fault_of(error)[1] == OUT_OF_MEMORY and residency().relieve(device, kept)
