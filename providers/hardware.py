"""Processors, GPUs and shared libraries, as the operating system and vendor tools report them.

ONNX Runtime sees neither affinity nor the cgroup quota: it starts one spinning worker per physical core of the host. In
a container with a quota they are throttled together and a run takes many times longer. `core_share` counts both.

A start from the compile cache waits for this module, so psutil and subprocess are imported where they are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlx_ort.device import Device

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterable, Iterator

_NOT_FOUND = re.compile(r"^\s*(\S+)\s+=>\s+not found", re.MULTILINE)
_LOADER = re.compile(r"(\S+\.so[\d.]*): cannot open shared object file")
_GROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_seen: dict[str, int] = {}  # throttle counters
_complete: set[Path] = set()  # libraries whose own libraries are there
_PROCESSOR_KEY = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
NO_WINDOW = 0x08000000 if sys.platform == "win32" else 0
"""CREATE_NO_WINDOW, by which a program of Windows without a console opens none for a process that it starts."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


class NvidiaGpu(NamedTuple):
    """One GPU as the NVIDIA driver lists it."""

    name: str
    driver: str
    memory_bytes: int
    bus_id: str = ""


@functools.cache
def cpu_name() -> str:
    """Return the processor's name, such as `AMD EPYC 9R14`."""
    for line in (_read(Path("/proc/cpuinfo")) or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return _registered("ProcessorNameString") or platform.processor() or platform.machine()


def _registered(name: str) -> str:
    """Return an entry of Windows' registry on the first processor; Python itself asks WMI, which may take seconds."""
    if sys.platform == "win32":
        import winreg

        with contextlib.suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _PROCESSOR_KEY) as key:
            return str(winreg.QueryValueEx(key, name)[0]).strip()
    return ""


def memory_bytes() -> int:
    """Return the memory in bytes that this process may use: the machine's, or the limit of its control group."""
    host = host_memory_bytes()
    return min(host, cgroup_memory_bytes() or host)


def host_memory_bytes() -> int:
    """Return the memory of the machine in bytes."""
    import psutil

    return int(psutil.virtual_memory().total)


def swap_bytes() -> int | None:
    """Return the bytes that the system may swap out; None where it makes room as it needs it, on Windows and macOS."""
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith("SwapTotal:"):
            return int(line.split()[1]) * 1024
    return None


def private_bytes() -> int:
    """Return the memory of this process alone in bytes; takes 10 us.

    On Linux these are resident pages that map no file, on Windows committed pages, on macOS all resident pages.
    """
    if sys.platform.startswith("linux"):
        pages = Path("/proc/self/statm").read_bytes().split()
        return (int(pages[1]) - int(pages[2])) * mmap.PAGESIZE
    import psutil

    memory = psutil.Process().memory_info()
    return int(getattr(memory, "private", memory.rss))


@functools.cache
def keep_free_heap_small() -> None:
    """Let glibc return freed blocks of 4 MiB, and the end of a heap from 1 MiB on; for the rest of the process.

    By default each thread's heap may keep 64 MiB, and `release_free_heap` does not reach the end of other threads'
    heaps. Each large block then takes new pages, at 0.1 to 0.2 ms a MiB.
    """
    if sys.platform.startswith("linux"):
        set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if set_option is not None:
            set_option(_M_TRIM_THRESHOLD, 1 << 20)
            set_option(_M_MMAP_THRESHOLD, 4 << 20)


def release_free_heap() -> None:
    """Return free heap pages to the system, which takes glibc about a millisecond."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(ctypes.c_size_t(0))


@functools.cache
def nvidia_gpus() -> tuple[NvidiaGpu, ...]:
    """Return the driver's NVIDIA GPUs in the order of the bus, which need not be CUDA's; none without NVML.

    `nvidia-smi` prints the same facts, but takes a second to start on a host with four GPUs.
    """
    try:
        library, count, driver = nvml(), ctypes.c_uint(), ctypes.create_string_buffer(_NVML_TEXT)
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return ()
        library.nvmlSystemGetDriverVersion(driver, _NVML_TEXT)
        gpus = [_nvidia_gpu(library, index, driver.value.decode(errors="replace")) for index in range(count.value)]
    except (OSError, AttributeError):  # no library, or an old one
        return ()
    return tuple(gpu for gpu in gpus if gpu is not None)


def _nvidia_gpu(library: ctypes.CDLL, index: int, driver: str) -> NvidiaGpu | None:
    handle, name, pci = ctypes.c_void_p(), ctypes.create_string_buffer(_NVML_TEXT), _PciInfo()
    memory = (ctypes.c_ulonglong * 3)()  # total, free, used
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
        return None
    library.nvmlDeviceGetName(handle, name, _NVML_TEXT)
    library.nvmlDeviceGetMemoryInfo(handle, memory)
    library.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(pci))
    return NvidiaGpu(name.value.decode(errors="replace"), driver, memory[0], pci.bus_id.decode().lower())


@functools.cache
def nvml() -> ctypes.CDLL:
    """Return NVIDIA's management library, started.

    Raises:
        OSError: there is no NVIDIA driver.
    """
    library = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    library.nvmlInit_v2()
    return library


class _PciInfo(ctypes.Structure):
    """nvmlPciInfo_t."""

    _fields_ = [("old_bus_id", ctypes.c_char * 16), ("numbers", ctypes.c_uint * 5), ("bus_id", ctypes.c_char * 32)]


_NVML_TEXT = 96  # bytes of the longest name, NVML_DEVICE_NAME_V2_BUFFER_SIZE


def is_throttled() -> bool:
    """Return whether heat throttles the processor: by macOS's speed limit, or Linux's counters since the last call."""
    if sys.platform == "darwin":
        done = _ran("pmset", "-g", "therm", timeout_s=5)
        return done is not None and _limited_by(done.stdout)
    return sys.platform.startswith("linux") and _more_than_before(Path("/sys/devices/system/cpu"))


def _limited_by(report: str) -> bool:
    """Return whether the lines of `pmset -g therm` contain a speed limit below 100."""
    match = re.search(r"^\s*CPU_Speed_Limit\s*=\s*(\d+)\s*$", report, re.MULTILINE)
    return match is not None and int(match[1]) < 100


def _more_than_before(cores: Path) -> bool:
    """Return whether a core's throttle counter grew since the last call; the first call only remembers."""
    counts = {}
    for path in cores.glob("cpu[0-9]*/thermal_throttle/core_throttle_count"):
        with contextlib.suppress(OSError, ValueError):
            counts[str(path)] = int(path.read_text(encoding="utf-8"))
    grew = any(count > _seen.get(name, count) for name, count in counts.items())
    _seen.update(counts)
    return grew


def engine_library(name: str) -> Path | None:
    """Return a provider library of the installed ONNX Runtime, such as `onnxruntime_providers_cuda`, or None."""
    import importlib.util

    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        return None
    file = {"win32": f"{name}.dll", "darwin": f"lib{name}.dylib"}.get(sys.platform, f"lib{name}.so")
    path = Path(spec.origin).parent / "capi" / file
    return path if path.is_file() else None


def missing_libraries(library: Path, dlls: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the libraries that `library` needs and the loader does not find; on Windows only those of `dlls`.

    A library that lacked none is not looked at again: `ldd` takes 8 ms, and each session asks.
    """
    if library in _complete:
        return ()
    missing = _missing(library, dlls)
    if not missing:
        _complete.add(library)
    return missing


def _missing(library: Path, dlls: Iterable[str]) -> tuple[str, ...]:
    if sys.platform == "win32":
        return tuple(name for name in dlls if not loads(name))
    done = _ran("ldd", str(library), timeout_s=60) if sys.platform.startswith("linux") else None
    if done is not None:
        # A library that Python already loaded, from a wheel of its vendor, need not be on the loader's path.
        return tuple(dict.fromkeys(name for name in _NOT_FOUND.findall(done.stdout) if not loads(name)))
    try:
        ctypes.CDLL(str(library))
    except OSError as err:
        return tuple(_LOADER.findall(str(err))) or (str(err),)
    return ()


def file_version(library: str) -> tuple[int, ...] | None:
    """Return the version of a library of Windows, as it is loaded or as the loader finds it; None if there is none."""
    if sys.platform != "win32":
        return None
    kernel, api, zero = ctypes.WinDLL("kernel32"), ctypes.WinDLL("version"), ctypes.c_uint32(0)
    kernel.GetModuleHandleW.restype = ctypes.c_void_p
    if handle := kernel.GetModuleHandleW(library):
        path = ctypes.create_unicode_buffer(1 << 15)
        kernel.GetModuleFileNameW(ctypes.c_void_p(handle), path, len(path))
        library = path.value
    buffer = ctypes.create_string_buffer(api.GetFileVersionInfoSizeW(library, ctypes.byref(zero)))
    info, size = ctypes.POINTER(ctypes.c_uint16)(), ctypes.c_uint32(0)
    if not api.GetFileVersionInfoW(library, 0, len(buffer), buffer):
        return None
    if not api.VerQueryValueW(buffer, "\\", ctypes.byref(info), ctypes.byref(size)):
        return None
    return tuple(info[place] for place in (5, 4, 7, 6))  # of VS_FIXEDFILEINFO, in 16 bits each


def loads(name: str) -> bool:
    """Return whether the loader finds and loads a library by name; it stays loaded."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _ran(tool: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str] | None:
    """Run a tool of the system; None if it is missing, does not start or takes too long."""
    import shutil
    import subprocess

    path = shutil.which(tool)
    if path is None:
        return None
    try:
        return subprocess.run(  # noqa: S603 - no user input
            [path, *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout_s,
            check=False,
            creationflags=NO_WINDOW,
        )
    except (OSError, subprocess.SubprocessError):
        return None


class CoreShare(NamedTuple):
    """The cores of the host and the part of them this process may use.

    `host_physical` is `host_logical` where the system does not list cores. `affinity` counts hardware threads, `quota`
    the cores that the control group may use, None without a limit.
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
        # A core is a group of sibling threads; the file had another name before Linux 5.3.
        places = [place / "topology" for place in Path("/sys/devices/system/cpu").glob("cpu[0-9]*")]
        groups = {_read(at / "core_cpus_list") or _read(at / "thread_siblings_list") for at in places}
        physical = len(groups - {None, ""}) or logical
        return CoreShare(logical, physical, len(os.sched_getaffinity(0)) or logical, cgroup_quota_cores())
    if sys.platform == "win32":
        return _windows_share(ctypes.WinDLL("kernel32", use_last_error=True))
    import psutil  # its import takes 12 ms of a quick start

    logical = psutil.cpu_count(logical=True) or os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or logical
    return CoreShare(logical, physical, logical, None)


def _windows_share(kernel: Any) -> CoreShare:
    """Return the share of this process by functions of `kernel32.dll`.

    A process on a machine with more than 64 hardware threads may use all of them, unless it asks for a part.
    """
    logical = os.cpu_count() or 1
    size = ctypes.c_uint32(0)
    kernel.GetLogicalProcessorInformationEx(0, None, ctypes.byref(size))  # 0: RelationProcessorCore; asks for the size
    table = ctypes.create_string_buffer(size.value)
    cores, at = 0, 0
    if kernel.GetLogicalProcessorInformationEx(0, table, ctypes.byref(size)):
        while at + 8 <= size.value:  # records of unequal size, one a core, which begin with their kind and their size
            cores += 1
            at += max(8, int.from_bytes(table.raw[at + 4 : at + 8], "little"))
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    process, allowed, present = ctypes.c_void_p(kernel.GetCurrentProcess()), ctypes.c_size_t(0), ctypes.c_size_t(0)
    kernel.GetProcessAffinityMask(process, ctypes.byref(allowed), ctypes.byref(present))
    part = allowed.value.bit_count() if allowed.value != present.value else 0
    return CoreShare(logical, cores or logical, part or logical, None)


def cgroup_quota_cores(mount: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> float | None:
    """Return the cores that the tightest of the process's control groups allows, or None without a limit."""
    files = ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    limits = _limits("cpu", *files, mount, membership)
    return min((words[0] / words[1] for words in limits if len(words) == 2 and words[1]), default=None)


def cgroup_memory_bytes(mount: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> int | None:
    """Return the bytes of memory that the tightest of the process's control groups allows, or None without a limit."""
    limits = _limits("memory", ("memory.max",), ("memory.limit_in_bytes",), mount, membership)
    return min((words[0] for words in limits), default=None)


def _limits(
    controller: str, files: tuple[str, ...], old_files: tuple[str, ...], mount: Path, membership: Path
) -> Iterator[list[int]]:
    """Yield the numbers in the files of the process's control groups and their parents; there is none without a limit.

    `old_files` are the names in the first version of control groups, which has a folder for each controller.
    """
    for line in (_read(membership) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            places = [(mount, files), (mount / "unified", files)]
        elif controller in controllers.split(","):
            names = dict.fromkeys((controllers, controller, "cpu,cpuacct"))
            places = [(mount / name, old_files) for name in names]
        else:
            continue
        for root, read in places:
            folder = root / group.lstrip("/")
            # In a container the path is the host's and not mounted; the container's own group is the root then.
            for place in (folder, *folder.parents):
                if place == root or root in place.parents:
                    words = " ".join(_read(place / file) or "" for file in read).split()
                    if words and all(word.isdigit() for word in words):
                        yield [int(word) for word in words]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
