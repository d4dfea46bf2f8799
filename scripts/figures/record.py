"""What a figure is, and the ways of measuring that all families share."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "Figure",
    "Turns",
    "in_turns",
    "machine",
    "peak_bytes",
    "python_json",
    "scaled",
    "seconds_of",
    "shorten",
    "step_turns_of",
    "turns_of",
]


_scale = 1.0


def shorten(scale: float) -> None:
    """Make the long measurements this fraction of their length, for a quick look."""
    global _scale  # set once, by the command line
    _scale = scale


def scaled(count: int) -> int:
    """Return a count of repetitions as `shorten` wants it, at least 1."""
    return max(1, round(count * _scale))


@dataclass(frozen=True)
class Figure:
    """One measured value; `target` is the most it may be, or None for a figure without a target."""

    figure: str
    value: float
    unit: str
    target: float | None = None
    detail: str = ""

    @property
    def ok(self) -> bool | None:
        """Whether the target is met; None without a target."""
        return None if self.target is None else self.value <= self.target


def machine() -> dict[str, Any]:
    """Return what a reader needs to judge the figures: system, processor, cores, load and versions."""
    # Imported here, or the processes that only measure ONNX Runtime would load this package as well.
    from rlx_ort.errors import EngineError
    from rlx_ort.providers.engine.runtime import describe_runtime

    versions = {}
    for name in ("rlx_ort", "onnxruntime", "onnx", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    with contextlib.suppress(EngineError):  # the module, for its package may be hidden by another flavour's
        versions["onnxruntime"] = describe_runtime()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else -1.0
    facts = {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_1min": round(load, 2),
        "python": platform.python_version(),
    }
    return facts | versions


def _processor() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as stream:
            return next(line.split(":", 1)[1].strip() for line in stream if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


@dataclass(frozen=True)
class Turns:
    """Two things measured in turns.

    Attributes:
        first: the median of the first, in seconds.
        second: the median of the second, in seconds.
        ratio: the median over blocks of first / second, each block's by its medians.
        least_ratio: the least time of the first over the least of the second.
    """

    first: float
    second: float
    ratio: float
    least_ratio: float


def turns_of(first: Callable[[], object], second: Callable[[], object], blocks: int, runs: int) -> Turns:
    """Measure two actions in blocks that alternate and swap their order; one block of each goes before as warm-up."""
    times: tuple[list[float], list[float]] = ([], [])
    ratios = []
    for block in range(-1, blocks):
        order = (0, 1) if block % 2 else (1, 0)
        found = [0.0, 0.0]
        for side in order:
            action = (first, second)[side]
            samples = [_timed(action) for _ in range(runs)]
            found[side] = statistics.median(samples)
            if block >= 0:
                times[side].extend(samples)
        if block >= 0:
            ratios.append(found[0] / found[1])
    medians = [statistics.median(samples) for samples in times]
    return Turns(medians[0], medians[1], statistics.median(ratios), min(times[0]) / min(times[1]))


def step_turns_of(first: Callable[[], Iterable[object]], second: Callable[[], Iterable[object]], blocks: int) -> Turns:
    """Measure two loops step by step in turns, in both orders; a block is both loops whole, one goes before as warm-up.

    A loop of some tens of milliseconds is as long as a core is disturbed by what else runs on its hardware, which in
    turns of whole loops counts for one of them.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for block in range(-1, blocks):
        loops, spent, turn = [iter(first()), iter(second())], [0.0, 0.0], block
        going = True
        while going:
            turn += 1
            for side in (0, 1) if turn % 2 else (1, 0):
                start = time.perf_counter()
                going = next(loops[side], _END) is not _END
                spent[side] += time.perf_counter() - start
        if block >= 0:
            for side in (0, 1):
                times[side].append(spent[side])
    medians = [statistics.median(samples) for samples in times]
    ratio = statistics.median(ours / theirs for ours, theirs in zip(*times, strict=True))
    return Turns(medians[0], medians[1], ratio, min(times[0]) / min(times[1]))


_END = object()


def in_turns(
    first: Callable[[], object], second: Callable[[], object], blocks: int, runs: int
) -> tuple[float, float, float]:
    """Return the medians of both in seconds, and the median over blocks of first / second; see `turns_of`."""
    found = turns_of(first, second, blocks, runs)
    return found.first, found.second, found.ratio


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def seconds_of(command: Sequence[str]) -> float:
    """Return the wall time of a process, away from the checkout."""
    start = time.perf_counter()
    subprocess.run(command, cwd=tempfile.gettempdir(), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def python_json(program: str, *arguments: str) -> Any:
    """Run a program in a fresh Python and return the JSON document of its last line of output."""
    command = [sys.executable, "-c", program, *arguments]
    result = subprocess.run(
        command, cwd=tempfile.gettempdir(), check=True, capture_output=True, text=True, encoding="utf-8"
    )
    return json.loads(result.stdout.splitlines()[-1])


def peak_bytes() -> int:
    """Return the most resident memory this process ever had, in bytes."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    if sys.platform == "linux":
        # not getrusage: on Linux its peak is carried over from the process that started this one
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
