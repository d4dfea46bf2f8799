"""Figures, and the ways of measuring that all families share."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

SCRIPTS = Path(__file__).resolve().parents[1]
MEBIBYTE = 2**20
_CHILD = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
function = getattr(importlib.import_module(sys.argv[2]), sys.argv[3])
print(json.dumps(function(*json.loads(sys.argv[4]))), flush=True)
"""
_END = object()
T = TypeVar("T")


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

    def __str__(self) -> str:
        target = "" if self.target is None else f"  target <= {self.target:g}"
        verdict = {True: "ok", False: "MISSED", None: "  "}[self.ok]
        detail = f"  ({self.detail})" if self.detail else ""
        return f"{verdict:6}  {self.figure}: {self.value:.4g} {self.unit}{target}{detail}"


def show(figures: Iterable[Figure], family: str, *, as_json: bool = False) -> int:
    """Print figures as they are measured, and return how many miss their target."""
    missed = 0
    for figure in figures:
        row = {"family": family, **asdict(figure), "ok": figure.ok}
        print(json.dumps(row) if as_json else figure, flush=True)
        missed += figure.ok is False
    return missed


def machine() -> dict[str, Any]:
    """Return the facts by which a reader judges the figures: system, processor, cores, load and versions."""
    # Imported here, or the processes that only measure ONNX Runtime would load this package as well.
    from rlx_ort.errors import EngineError
    from rlx_ort.providers.engine.runtime import describe_runtime
    from rlx_ort.providers.hardware import cpu_name

    versions = {}
    for name in ("rlx_ort", "onnxruntime", "onnx", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "none"
    with contextlib.suppress(EngineError):  # the module, for its package may be hidden by another flavour's
        versions["onnxruntime"] = describe_runtime()
    facts = {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": cpu_name(),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else -1.0,
        "python": platform.python_version(),
    }
    return facts | versions


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


def in_turns(*calls: Callable[[], T], rounds: int, warm: int = 0) -> list[list[T]]:
    """Return the results of each call; every round makes each once, in the other order than the round before.

    The rounds of `warm` go before and do not count.
    """
    results: list[list[T]] = [[] for _ in calls]
    for turn in range(-warm, rounds):
        for at in range(len(calls))[:: 1 if turn % 2 else -1]:
            result = calls[at]()
            results[at] += [result] if turn >= 0 else []
    return results


def turns_of(first: Callable[[], object], second: Callable[[], object], blocks: int, runs: int) -> Turns:
    """Measure two actions in blocks that alternate and swap their order; one block of each goes before as warm-up."""

    def block(action: Callable[[], object]) -> list[float]:
        return [seconds_of(action) for _ in range(runs)]

    both = in_turns(lambda: block(first), lambda: block(second), rounds=blocks, warm=1)
    ratios = [statistics.median(ours) / statistics.median(theirs) for ours, theirs in zip(*both, strict=True)]
    return _turns([list(itertools.chain(*each)) for each in both], ratios)


def step_turns_of(first: Callable[[], Iterable[object]], second: Callable[[], Iterable[object]], blocks: int) -> Turns:
    """Measure two loops step by step in turns, in both orders; a block is both loops whole, one goes before as warm-up.

    A loop of some tens of milliseconds is as long as a core is disturbed by other work on its hardware, which in
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
    return _turns(times, [ours / theirs for ours, theirs in zip(*times, strict=True)])


def _turns(times: Sequence[Sequence[float]], ratios: Sequence[float]) -> Turns:
    first, second = (statistics.median(samples) for samples in times)
    return Turns(first, second, statistics.median(ratios), min(times[0]) / min(times[1]))


def seconds_of(action: Callable[[], object]) -> float:
    """Return the time of a call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def process_seconds(*arguments: str) -> float:
    """Return the wall time of a Python process, away from the checkout."""
    command = [sys.executable, *arguments]
    folder = tempfile.gettempdir()
    return seconds_of(lambda: subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL))


def fresh(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a module of `scripts/` in a new Python process and return its result, by way of JSON."""
    called = [str(SCRIPTS), function.__module__, function.__name__, json.dumps(arguments)]
    command = [sys.executable, "-P", "-c", _CHILD, *called]
    done = subprocess.run(command, cwd=tempfile.gettempdir(), check=True, stdout=subprocess.PIPE, encoding="utf-8")
    return json.loads(done.stdout.splitlines()[-1])


class Child:
    """Calls functions that may end their process, as drivers do, in another one; after such a call in the next.

    Args:
        most: calls a process, where it would keep memory or end after more; 0 for any number.
    """

    def __init__(self, most: int = 0) -> None:
        self._most = most
        self._pool = self._started()
        self._fresh = True

    def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Return what a function returns. A call that ends a process is repeated once, in one that made no call before.

        Raises:
            BrokenProcessPool: it ended that one, too.
        """
        while True:
            fresh, self._fresh = self._fresh, False
            try:
                return self._pool.submit(function, *arguments).result()
            except BrokenProcessPool:
                self.close()
                self._pool, self._fresh = self._started(), True
                if fresh:
                    raise

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown(cancel_futures=True)

    def _started(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=self._most or None)


@contextlib.contextmanager
def sampled(read: Callable[[], T], pause_s: float) -> Iterator[list[T]]:
    """Read a value before a `with` block and again and again within it."""
    samples, done = [read()], threading.Event()

    def sample() -> None:
        while not done.wait(pause_s):
            samples.append(read())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


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
