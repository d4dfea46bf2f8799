"""How many CPU cores this process may use: affinity and the cgroup quota, which ONNX Runtime does not see.

ONNX Runtime starts one spinning worker per physical core of the host; in a container with a quota they are
throttled together and a run takes many times longer.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rlx_ort.device import Device

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CoreShare", "cgroup_quota_cores", "core_share", "device_threads"]


class CoreShare(NamedTuple):
    """The cores of the host and the part of them this process may use.

    Attributes:
        host_logical: hardware threads of the host.
        host_physical: cores of the host; the same as `host_logical` where the system does not list them.
        affinity: hardware threads the process may be scheduled on.
        quota: cores that the control group may use, None without a limit.
    """

    host_logical: int
    host_physical: int
    affinity: int
    quota: float | None

    @property
    def threads(self) -> int:
        """The threads one session should use, at least 1; a fraction of a core is rounded down."""
        limit = math.inf if self.quota is None else self.quota
        return max(1, int(min(self.host_physical, self.affinity, limit)))


def device_threads(device: Device) -> int:
    """Return the threads that a device computes with: this process's share of the cores on the CPU, else 1."""
    return core_share().threads if device.kind == Device.CPU.kind else 1


@functools.cache
def core_share() -> CoreShare:
    """Return the share of this process; read once, since workers are started with it."""
    if sys.platform == "linux":
        logical = os.cpu_count() or 1
        physical = _physical_cores(Path("/sys/devices/system/cpu")) or logical
        return CoreShare(logical, physical, len(os.sched_getaffinity(0)) or logical, cgroup_quota_cores())
    import psutil  # its import takes 12 ms of a quick start; on Linux the kernel's files are ten times as fast

    logical = psutil.cpu_count(logical=True) or os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or logical
    return CoreShare(logical, physical, _affinity(logical), cgroup_quota_cores())


def cgroup_quota_cores(
    mount: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> float | None:
    """Return the cores that the process's control groups allow, version 1 and 2, or None without a limit.

    Every group up to the root counts, because the tightest of them throttles.
    """
    text = _read(membership)
    if text is None:
        return None
    limits: list[float] = []
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            limits += _limits(mount, group, _limit_v2) + _limits(mount / "unified", group, _limit_v2)
        elif "cpu" in controllers.split(","):
            for folder in dict.fromkeys((controllers, "cpu", "cpu,cpuacct")):
                limits += _limits(mount / folder, group, _limit_v1)
    return min(limits, default=None)


def _limits(root: Path, group: str, read: Callable[[Path], float | None]) -> list[float]:
    folder = root / group.lstrip("/")
    # In a container the path is the host's and not mounted; the container's own group is the root then.
    places = [place for place in (folder, *folder.parents) if place == root or root in place.parents]
    found = [read(place) for place in places]
    return [limit for limit in found if limit is not None]


def _limit_v2(folder: Path) -> float | None:
    words = (_read(folder / "cpu.max") or "").split()
    if len(words) != 2 or not words[0].isdigit() or not words[1].isdigit() or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _limit_v1(folder: Path) -> float | None:
    quota = (_read(folder / "cpu.cfs_quota_us") or "").strip()
    period = (_read(folder / "cpu.cfs_period_us") or "").strip()
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None  # -1 means no limit
    return int(quota) / int(period)


def _physical_cores(folder: Path) -> int:
    """Return how many groups of sibling threads Linux lists, 0 where it lists none."""
    files = [place / "topology" / "core_cpus_list" for place in folder.glob("cpu[0-9]*")]
    old = [place.with_name("thread_siblings_list") for place in files]  # its name before Linux 5.3
    return len({text for pair in zip(files, old, strict=True) if (text := _read(pair[0]) or _read(pair[1]))})


def _affinity(logical: int) -> int:
    import psutil

    try:
        affinity = getattr(psutil.Process(), "cpu_affinity", None)  # macOS has none
        return (len(affinity()) if affinity else 0) or logical
    except psutil.Error:
        return logical


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
