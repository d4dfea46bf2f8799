"""What the operating system and vendor tools tell about processors and GPUs, without loading a provider."""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["NvidiaGpu", "cpu_name", "memory_bytes", "nvidia_gpus"]


@dataclass(frozen=True, slots=True)
class NvidiaGpu:
    """One GPU as the NVIDIA driver tells it."""

    name: str
    driver: str
    memory_bytes: int
    bus_id: str = ""


@functools.cache
def cpu_name() -> str:
    """Return the processor's name, such as `AMD EPYC 9R14`."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Return the memory of the machine in bytes."""
    return int(psutil.virtual_memory().total)


@functools.cache
def nvidia_gpus() -> tuple[NvidiaGpu, ...]:
    """Return the NVIDIA GPUs the driver's own tool lists, in the order of the bus; takes up to a second.

    Empty without driver or tool. CUDA may count them in another order.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=name,driver_version,memory.total,pci.bus_id", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)  # noqa: S603 - fixed words
    except (OSError, subprocess.SubprocessError):
        return ()
    if done.returncode != 0:
        return ()
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return tuple(
        NvidiaGpu(row[0], row[1], int(row[2]) * 1024**2 if row[2].isdigit() else 0, row[3].lower())
        for row in rows
        if len(row) == 4
    )
