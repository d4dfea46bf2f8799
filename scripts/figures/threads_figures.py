"""Many threads and long runs: no result of two versions, no growth of memory, no more threads than cores."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil

from figures.record import Figure

__all__ = ["measure"]

THREADS, UPDATES = 8, 1000
SOAK_RUNS, REBUILD_EVERY, SAMPLE_EVERY = 200_000, 1000, 5000
WIDTH = 64
SESSIONS = 4


def measure() -> Iterator[Figure]:
    """Yield the update storm, the soak and the thread budget."""
    yield from _storm()
    yield _soak()
    yield _budget()


def _graph() -> Any:
    """Return `(x @ w + v) @ w`: parameters used folded and direct, so that a mixture of versions would show."""
    from rlx_ort.ir.graph import Graph

    graph = Graph("storm")
    x = graph.input("x", ["n", WIDTH])
    w = graph.param("w", [WIDTH, WIDTH])
    v = graph.param("v", [WIDTH])
    graph.outputs = [(x @ w + v) @ w]
    return graph


def _set(compiled: Any, version: int) -> None:
    # w = k I and v = k give (x k + k) k: one number tells the version, and no mixture gives the same.
    with compiled.update_params():
        compiled.set_param("w", np.eye(WIDTH, dtype=np.float32) * version)
        compiled.set_param("v", np.full(WIDTH, version, np.float32))


def _storm() -> Iterator[Figure]:
    from rlx_ort.execution.session import Session

    compiled = Session("cpu").compile(_graph())
    _set(compiled, 1)
    x = np.ones((2, WIDTH), np.float32)
    compiled.run({"x": x})
    wrong: list[Any] = []
    runs = [0] * THREADS
    done = threading.Event()

    def work(index: int) -> None:
        while not done.is_set():
            out = compiled.run({"x": x})[0]
            # (1 k + k) k = 2 k^2
            version = round(float(np.sqrt(out.flat[0] / 2)))
            if not (1 <= version <= UPDATES + 1) or not np.array_equal(out, np.full_like(out, 2.0 * version * version)):
                wrong.append(out)
            runs[index] += 1

    threads = [threading.Thread(target=work, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    levels = []
    for version in range(2, UPDATES + 2):
        _set(compiled, version)
        compiled.run({"x": x})
        if version % 100 == 0:
            levels.append(_rss())
    done.set()
    for thread in threads:
        thread.join()
    compiled.close()
    detail = f"{THREADS} threads, {sum(runs)} runs, {UPDATES} updates"
    yield Figure("update storm on cpu, results that are of no one version", len(wrong), "runs", 0, detail)
    # The first hundreds fill the allocators' pools.
    growth = max(levels[len(levels) // 2 :]) / max(levels[: len(levels) // 2])
    yield Figure("update storm on cpu, memory of the second half over the first", growth, "times", 1.02, _mb(levels))


def _soak() -> Figure:
    from rlx_ort.execution.session import Session

    compiled = Session("cpu").compile(_graph())
    rng = np.random.default_rng(0)
    inputs = [{"x": rng.standard_normal((rows, WIDTH)).astype(np.float32)} for rows in (1, 3, 8)]
    levels = []
    for number in range(SOAK_RUNS):
        if number % REBUILD_EVERY == 0:
            _set(compiled, 1 + number // REBUILD_EVERY)
        given = inputs[number % 3]
        match number % 5:
            case 0:
                compiled.run_slots([given["x"]])
            case 1:
                compiled.run_raw(given)
            case 2:
                compiled.run_read_outputs(given, [0])
            case 3 if number % 100 == 3:
                compiled.run_pipelined(inputs)
            case _:
                compiled.run(given)
        if number % SAMPLE_EVERY == 0:
            gc.collect()
            levels.append(_rss())
    compiled.close()
    settled = levels[len(levels) // 4 :]  # the first quarter fills the allocators' pools
    return Figure(
        f"soak of {SOAK_RUNS} mixed runs with {SOAK_RUNS // REBUILD_EVERY} rebuilds, spread of memory",
        (max(settled) - min(settled)) / min(settled) * 100,
        "percent",
        2.0,
        _mb(levels),
    )


def _budget() -> Figure:
    from rlx_ort.execution.session import Session
    from rlx_ort.providers.cores import core_share

    before = psutil.Process().num_threads()
    graphs = []
    for _ in range(SESSIONS):
        compiled = Session("cpu").compile(_graph())
        _set(compiled, 1)
        compiled.run({"x": np.ones((1, WIDTH), np.float32)})
        graphs.append(compiled)
    grown = psutil.Process().num_threads() - before
    for compiled in graphs:
        compiled.close()
    share = core_share().threads
    detail = f"{SESSIONS} sessions on a share of {share} of {os.cpu_count()} cores"
    return Figure("threads of all sessions, callers' own not counted", grown, "threads", max(0, share - 1), detail)


def _rss() -> int:
    return int(psutil.Process().memory_info().rss)


def _mb(levels: list[int]) -> str:
    return f"{min(levels) / 2**20:.0f} to {max(levels) / 2**20:.0f} MiB"
