"""Many threads and long runs: no result of two versions, no growth of memory, no more threads than cores."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import psutil

from figures.record import MEBIBYTE, Figure, scaled
from rlx_ort.execution.buckets import BucketedCompileCache, power_of_two_ladder
from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.execution.session import Session
from rlx_ort.ir.graph import Graph
from rlx_ort.providers.hardware import core_share

WIDTH = 64
THREADS, UPDATES, STORM_SAMPLE_EVERY = 8, 1000, 20
SOAK_CALLS, SOAK_SAMPLE_EVERY, REBUILD_EVERY, CLONE_EVERY = 200_000, 1000, 1000, 250
GROWTH_PERCENT = 2.0
SESSIONS = 4


def measure() -> Iterator[Figure]:
    """Yield the update storm, the soak and the thread budget."""
    yield from _storm()
    yield from _soak()
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


def _graph(name: str = "storm") -> Graph:
    """Return `(x @ w + v) @ w`: parameters used folded and direct, so that a mixture of versions would show."""
    graph = Graph(name)
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


def _growth(title: str, levels: Sequence[int], each: str) -> Figure:
    """Return how far memory is from where it was; the first quarter is warm-up, windows are tenths of the rest."""
    settled = levels[len(levels) // 4 :]
    window = max(1, len(settled) // 10)
    first, last = float(np.mean(settled[:window])), float(np.mean(settled[-window:]))
    slope = (last - first) / max(1, len(settled) - window) / 1024
    detail = f"first window {first / MEBIBYTE:.1f} MiB, last {last / MEBIBYTE:.1f} MiB, {slope:+.1f} KiB per {each}"
    title += ", memory of the last window against the first"
    return Figure(title, abs(last / first - 1) * 100, "percent", GROWTH_PERCENT, detail)


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
    yield _growth("update storm on cpu", levels or [_resident()], f"{STORM_SAMPLE_EVERY} updates")


def _soak() -> Iterator[Figure]:
    """Yield wrong results and growth over many calls of every kind, with rebuilds and clones between them."""
    plain = _compiled()
    host, device = (Session("cpu").compile(_graph(name), plain.weights) for name in ("host", "device"))
    buckets = BucketedCompileCache(power_of_two_ladder(2, 8))
    loop = asyncio.new_event_loop()
    kinds: tuple[Callable[[Any], Any], ...] = (
        lambda x: plain.run({"x": x}),
        lambda x: plain.run_slots([x]),
        lambda x: plain.run_raw({"x": x}),
        lambda x: plain.run_read_outputs({"x": x}, [0]),
        lambda x: _on_host(host, x),
        lambda x: _on_device(device, x),
        lambda x: [np.from_dlpack(plain.run_dlpack({"x": x})[0])],
        lambda x: plain.run_pipelined([{"x": x}, {"x": x[:1]}])[0],
        lambda x: loop.run_until_complete(plain.run_async({"x": x})),
        lambda x: _committed(plain, x),
        lambda x: plain.run({"x": _padded(buckets, x)}),
    )
    arrays = [np.random.default_rng(rows).standard_normal((rows, WIDTH)).astype(np.float32) for rows in (1, 3, 8)]
    count, wrong, scale = scaled(SOAK_CALLS), 0, 1
    levels = []
    for number in range(count):
        if number % REBUILD_EVERY == 0:
            scale = 1 + number // REBUILD_EVERY % 3
            _set(plain, scale)
        x = arrays[number // len(kinds) % len(arrays)]
        got = kinds[number % len(kinds)](x)
        wrong += not np.allclose(got[0], (x * scale + scale) * scale, rtol=1e-5, atol=1e-5)
        if number % CLONE_EVERY == 0:
            with plain.clone() as twin:
                wrong += not np.array_equal(twin.run({"x": x})[0], plain.run({"x": x})[0])
        if number % scaled(SOAK_SAMPLE_EVERY) == 0:
            levels.append(_resident())
    for graph in (plain, host, device, buckets):
        graph.close()
    loop.close()
    title = f"soak of {count} calls of {len(kinds)} kinds with {1 + (count - 1) // REBUILD_EVERY} rebuilds"
    yield Figure(f"{title}, wrong results", wrong, "calls", 0)
    yield _growth(title, levels, f"{scaled(SOAK_SAMPLE_EVERY)} calls")


def _on_host(compiled: CompiledGraph, x: Any) -> Any:
    compiled.bind_handle("x", x)
    return compiled.run({})


def _on_device(compiled: CompiledGraph, x: Any) -> Any:
    compiled.bind_gpu_handle("x", x)
    compiled.set_gpu_handle_feed("x", 0)
    compiled.run_read_outputs({}, [0])
    return [compiled.read_gpu_handle("x")]


def _committed(compiled: CompiledGraph, x: Any) -> Any:
    compiled.commit_no_wait({"x": x})
    compiled.sync_pending()
    return compiled.run({"x": x})


def _padded(buckets: BucketedCompileCache, x: Any) -> Any:
    """Return `x` as a graph of fixed rows passes it on."""

    def build(rows: int) -> Graph:
        graph = Graph("rows")
        graph.outputs = [graph.neg(graph.input("x", [rows, WIDTH]))]
        return graph

    padded = buckets.run_padded(len(x), len(x), build, [("x", x, WIDTH)], [WIDTH])
    assert padded is not None
    return -padded[1][0]
