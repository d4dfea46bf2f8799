"""Many threads and long runs: no result of two versions, no growth of memory, no more threads than cores."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil

from figures.record import Figure, scaled
from figures.soak import REBUILD_EVERY, WIDTH, Levels, Soak, resident_bytes, storm_graph

__all__ = ["measure"]

THREADS, UPDATES, STORM_SAMPLE_EVERY = 8, 1000, 20
SOAK_CALLS, SOAK_SAMPLE_EVERY = 200_000, 1000
GROWTH_PERCENT = 2.0
SESSIONS = 4


def measure() -> Iterator[Figure]:
    """Yield the update storm, the soak and the thread budget."""
    yield from _storm()
    yield from _soak()
    yield _budget()


def _set(compiled: Any, version: int) -> None:
    # w = k I and v = k give (x k + k) k: one number identifies the version, and no mixture gives the same.
    with compiled.update_params():
        compiled.set_param("w", np.eye(WIDTH, dtype=np.float32) * version)
        compiled.set_param("v", np.full(WIDTH, version, np.float32))


def _storm() -> Iterator[Figure]:
    from rlx_ort.execution.session import Session

    compiled = Session("cpu").compile(storm_graph())
    _set(compiled, 1)
    x = np.ones((2, WIDTH), np.float32)
    compiled.run({"x": x})
    wrong: list[Any] = []
    updates = scaled(UPDATES)
    runs = [0] * THREADS
    done = threading.Event()

    def work(index: int) -> None:
        while not done.is_set():
            out = compiled.run({"x": x})[0]
            # (1 k + k) k = 2 k^2
            version = round(float(np.sqrt(out.flat[0] / 2)))
            if not (1 <= version <= updates + 1) or not np.array_equal(out, np.full_like(out, 2.0 * version * version)):
                wrong.append(out)
            runs[index] += 1

    threads = [threading.Thread(target=work, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    calls, found = [], []
    for version in range(2, updates + 2):
        _set(compiled, version)
        compiled.run({"x": x})
        if version % STORM_SAMPLE_EVERY == 0:
            calls.append(version)
            found.append(resident_bytes())
    done.set()
    for thread in threads:
        thread.join()
    compiled.close()
    levels = Levels(calls, found)
    detail = f"{THREADS} threads, {sum(runs)} runs, {updates} updates"
    yield Figure("update storm on cpu, results that are of no one version", len(wrong), "runs", 0, detail)
    title = "update storm on cpu, memory of the last window against the first"
    yield Figure(title, levels.growth_percent, "percent", GROWTH_PERCENT, f"{levels} updates")


def _soak() -> Iterator[Figure]:
    count = scaled(SOAK_CALLS)
    soak = Soak()
    calls, found = [], []
    for number in range(count):
        soak.call(number)
        if number % scaled(SOAK_SAMPLE_EVERY) == 0:
            calls.append(number)
            found.append(resident_bytes())
    soak.close()
    levels = Levels(calls, found)
    title = f"soak of {count} calls of {len(soak.kinds)} kinds with {1 + (count - 1) // REBUILD_EVERY} rebuilds"
    yield Figure(f"{title}, wrong results", soak.wrong, "calls", 0)
    title += ", memory of the last window against the first"
    yield Figure(title, levels.growth_percent, "percent", GROWTH_PERCENT, f"{levels} calls")


def _budget() -> Figure:
    from rlx_ort.execution.session import Session
    from rlx_ort.providers.hardware import core_share

    before = psutil.Process().num_threads()
    graphs = []
    for _ in range(SESSIONS):
        compiled = Session("cpu").compile(storm_graph())
        _set(compiled, 1)
        compiled.run({"x": np.ones((1, WIDTH), np.float32)})
        graphs.append(compiled)
    grown = psutil.Process().num_threads() - before
    for compiled in graphs:
        compiled.close()
    share = core_share().threads
    detail = f"{SESSIONS} sessions on a share of {share} of {os.cpu_count()} cores"
    return Figure("threads of all sessions, callers' own not counted", grown, "threads", max(0, share - 1), detail)
