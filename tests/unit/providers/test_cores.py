"""The share of the cores, from control groups of both versions and from affinity."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from rlx_ort.providers.hardware import CoreShare, _windows_share, cgroup_memory_bytes, cgroup_quota_cores, core_share


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("files", "membership", "cores"),
    [
        ({"a/b/cpu.max": "150000 100000"}, "0::/a/b\n", 1.5),
        ({"a/b/cpu.max": "800000 100000", "a/cpu.max": "200000 100000", "cpu.max": "max 100000"}, "0::/a/b\n", 2),
        ({"cpu.max": "50000 100000"}, "0::/docker/0123abcd\n", 0.5),
        (
            {"cpu,cpuacct/g/cpu.cfs_quota_us": "300000", "cpu,cpuacct/g/cpu.cfs_period_us": "100000"},
            "4:memory:/g\n3:cpu,cpuacct:/g\n0::/\n",
            3,
        ),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "1:cpu:/\n", None),
        ({"cpu.max": "max 100000"}, "0::/\n", None),
        ({"cpu.max": ""}, "0::/\n", None),
        ({"cpu.max": "garbage"}, "0::/\n", None),
        ({"cpu.max": "100000 0"}, "0::/\n", None),
        ({"cpu.max": "-1 100000"}, "0::/\n", None),
        ({}, None, None),
    ],
    ids=[
        "version 2", "a parent is tighter", "the path of a host", "version 1", "unlimited in version 1",
        "unlimited in version 2", "empty", "garbage", "no period", "negative", "no control groups",
    ],
)  # fmt: skip
def test_the_quota_of_a_control_group_limits_the_cores(tmp_path, files, membership, cores):
    """Both versions, each up to the root; anything but two positive numbers limits nothing."""
    for name, text in files.items():
        write(tmp_path / "fs" / name, f"{text}\n")
    if membership is not None:
        write(tmp_path / "self", membership)
    assert cgroup_quota_cores(tmp_path / "fs", tmp_path / "self") == cores


@pytest.mark.parametrize(
    ("share", "threads"),
    [
        (CoreShare(16, 8, 16, None), 8),
        (CoreShare(16, 8, 4, None), 4),
        (CoreShare(16, 8, 16, 2.9), 2),
        (CoreShare(16, 8, 16, 0.5), 1),
    ],
)
def test_threads_are_the_smallest_of_all_limits_and_at_least_one(share, threads):
    """Physical cores, affinity and quota all bound the threads."""
    assert share.threads == threads


def test_this_machine_has_a_share():
    """The real numbers make sense together."""
    share = core_share()
    assert 1 <= share.threads <= share.host_physical <= share.host_logical


@pytest.mark.parametrize(
    ("files", "membership", "limit"),
    [
        ({"a/memory.max": "1000", "a/b/memory.max": "max"}, "0::/a/b\n", 1000),
        ({"memory.max": "536870912"}, "0::/docker/0123abcd\n", 536870912),
        ({"memory/g/memory.limit_in_bytes": "2000"}, "4:memory:/g\n", 2000),
        ({"a/memory.max": "max"}, "0::/a\n", None),
        ({}, "", None),
    ],
)
def test_the_memory_of_a_container_is_its_limit(tmp_path, files, membership, limit):
    """Both versions of control groups; a parent's limit holds for its children."""
    for name, text in files.items():
        write(tmp_path / "fs" / name, f"{text}\n")
    write(tmp_path / "self", membership)
    assert cgroup_memory_bytes(tmp_path / "fs", tmp_path / "self") == limit


class Kernel32:
    """The functions of `kernel32.dll`, on a processor with efficiency cores that have one hardware thread each."""

    def __init__(self, allowed: int, present: int, records: bytes) -> None:
        self.allowed, self.present, self.records = allowed, present, records
        self.GetCurrentProcess: Any = ctypes.CFUNCTYPE(ctypes.c_void_p)(lambda: -1)

    def GetLogicalProcessorInformationEx(self, kind: int, table: Any, size: Any) -> int:  # noqa: N802  # Windows' name
        """Fill a table with records, or return the size that it needs."""
        assert kind == 0
        fits = table is not None and size._obj.value >= len(self.records)
        size._obj.value = len(self.records)
        if fits:
            ctypes.memmove(table, self.records, len(self.records))
        return int(fits)

    def GetProcessAffinityMask(self, process: Any, allowed: Any, present: Any) -> int:  # noqa: N802  # Windows' name
        """Tell on which hardware threads the process may run, and which there are."""
        allowed._obj.value, present._obj.value = self.allowed, self.present
        return 1


# https://learn.microsoft.com/windows/win32/api/winnt/ns-winnt-system_logical_processor_information_ex
RECORDS = b"".join(struct.pack("<II", 0, size) + bytes(size - 8) for size in (48, 64, 48, 48))


@pytest.mark.parametrize(
    ("allowed", "present", "affinity"),
    [(0x3F, 0x3F, 6), (0x07, 0x3F, 3), (0, 0, 6)],
    ids=["all", "three", "two groups of 64"],
)
def test_on_windows_the_system_itself_is_asked(
    allowed: int, present: int, affinity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without psutil, whose import is a large part of a quick start."""
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert _windows_share(Kernel32(allowed, present, RECORDS)) == CoreShare(6, 4, affinity, None)


def test_an_old_windows_that_lists_no_cores_has_as_many_as_hardware_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux without its files."""
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert _windows_share(Kernel32(1, 1, b"")) == CoreShare(6, 6, 6, None)
