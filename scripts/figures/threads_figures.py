"""Many threads: no result of two versions, no growth of memory, no more threads than cores."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil

from figures.record import MEBIBYTE, Figure, scaled
from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.execution.session import Session
from rlx_ort.ir.graph import Graph
from rlx_ort.providers.hardware import core_share

WIDTH = 64
THREADS, UPDATES, STORM_SAMPLE_EVERY = 8, 1000, 20
GROWTH_PERCENT = 2.0
SESSIONS = 4


def measure() -> Iterator[Figure]:
    """Yield the update storm and the thread budget."""
    yield from _storm()
    before = psutil.Process().num_threads()
    graphs = [_compiled() for _ in range(SESSIONS)]
    for compiled in graphs:
        compiled.run({"x": np.ones((1, WIDTH), np.float32)})
    grown = psutil.Process().num_threads() - before
    for compiled in graphs:
        compiled.close()
    share = core_share().threads
    detail = f"{SESSIONS} sessions on a share of {share} of {os.cpu_count()} cores"
    yield Figure("threads of all sessions, callers' own not counted", grown, "threads", max(0, share - 1), detail)


def _graph() -> Graph:
    """Return `(x @ w + v) @ w`: parameters used folded and direct, so that a mixture of versions would show."""
    graph = Graph("storm")
    x, w, v = graph.input("x", ["n", WIDTH]), graph.param("w", [WIDTH, WIDTH]), graph.param("v", [WIDTH])
    graph.outputs = [(x @ w + v) @ w]
    return graph


def _compiled() -> CompiledGraph:
    compiled = Session("cpu").compile(_graph())
    _set(compiled, 1)
    return compiled


def _set(compiled: CompiledGraph, version: int) -> None:
    # w = k I and v = k give (x k + k) k: one number identifies the version, and no mixture gives the same.
    with compiled.update_params():
        compiled.set_param("w", np.eye(WIDTH, dtype=np.float32) * version)
        compiled.set_param("v", np.full(WIDTH, version, np.float32))


def _resident() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def _storm() -> Iterator[Figure]:
    compiled = _compiled()
    x = np.ones((2, WIDTH), np.float32)
    compiled.run({"x": x})
    wrong: list[Any] = []
    updates, runs, done = scaled(UPDATES), [0] * THREADS, threading.Event()

    def work(index: int) -> None:
        while not done.is_set():
            out = compiled.run({"x": x})[0]
            version = round(float(np.sqrt(out.flat[0] / 2)))  # (1 k + k) k = 2 k^2
            if not (1 <= version <= updates + 1) or not np.array_equal(out, np.full_like(out, 2.0 * version * version)):
                wrong.append(out)
            runs[index] += 1

    threads = [threading.Thread(target=work, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    levels = []
    for version in range(2, updates + 2):
        _set(compiled, version)
        compiled.run({"x": x})
        if version % STORM_SAMPLE_EVERY == 0:
            levels.append(_resident())
    done.set()
    for thread in threads:
        thread.join()
    compiled.close()
    detail = f"{THREADS} threads, {sum(runs)} runs, {updates} updates"
    yield Figure("update storm on cpu, results that are of no one version", len(wrong), "runs", 0, detail)
    settled = levels[len(levels) // 4 :] or [
        _resident()
    ]  # the first quarter is warm-up, windows are tenths of the rest
    window = max(1, len(settled) // 10)
    first, last = (float(np.mean(part)) for part in (settled[:window], settled[-window:]))
    detail = f"first window {first / MEBIBYTE:.1f} MiB, last {last / MEBIBYTE:.1f} MiB"
    title = "update storm on cpu, memory of the last window against the first"
    yield Figure(title, abs(last / first - 1) * 100, "percent", GROWTH_PERCENT, detail)
