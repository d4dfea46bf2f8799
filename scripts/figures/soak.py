"""Every way to run, in turns and for long, each result compared with that of a plain run."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

__all__ = ["Levels", "Soak", "resident_bytes", "storm_graph"]

WIDTH = 64
REBUILD_EVERY, CLONE_EVERY = 1000, 250
MEBIBYTE = 2**20


def resident_bytes() -> int:
    """Return the resident memory of this process, after a collection."""
    gc.collect()
    return int(psutil.Process().memory_info().rss)


@dataclass(frozen=True)
class Levels:
    """Resident memory over time, in bytes, with the count of calls at each sample.

    The first quarter is warm-up, in which the allocators' pools fill; windows are tenths of what remains.
    """

    calls: list[int]
    found: list[int]

    @property
    def _settled(self) -> tuple[list[int], list[int]]:
        start = len(self.found) // 4
        return self.calls[start:], self.found[start:]

    @property
    def windows(self) -> tuple[float, float]:
        """The mean of the first window, and that of the last, in bytes."""
        _, found = self._settled
        count = max(1, len(found) // 10)
        return float(np.mean(found[:count])), float(np.mean(found[-count:]))

    @property
    def growth_percent(self) -> float:
        """How far the last window is from the first, either way."""
        first, last = self.windows
        return abs(last / first - 1) * 100

    @property
    def slope(self) -> float:
        """The line through all samples after the warm-up, in bytes a call."""
        calls, found = self._settled
        return float(np.polyfit(calls, found, 1)[0]) if len(calls) > 1 else 0.0

    def __str__(self) -> str:
        first, last = (level / MEBIBYTE for level in self.windows)
        return f"first window {first:.1f} MiB, last {last:.1f} MiB, slope {self.slope / 1024 * 1000:+.1f} KiB per 1000"


def storm_graph(name: str = "storm") -> Any:
    """Return `(x @ w + v) @ w`: parameters used folded and direct, so that a mixture of versions would show."""
    from rlx_ort.ir.graph import Graph

    graph = Graph(name)
    x = graph.input("x", ["n", WIDTH])
    w = graph.param("w", [WIDTH, WIDTH])
    v = graph.param("v", [WIDTH])
    graph.outputs = [(x @ w + v) @ w]
    return graph


def _fixed_graph(rows: int) -> Any:
    from rlx_ort.ir.graph import Graph

    graph = Graph("rows")
    graph.outputs = [graph.gelu(graph.input("x", [rows, WIDTH]))]
    return graph


class Soak:
    """Calls of all kinds on graphs that share one store of weights."""

    def __init__(self) -> None:
        from rlx_ort.execution.buckets import BucketedCompileCache, power_of_two_ladder
        from rlx_ort.execution.session import Session

        session = Session("cpu")
        self.plain = session.compile(storm_graph())
        self.host = session.compile(storm_graph("host"), self.plain.weights)
        self.device = session.compile(storm_graph("device"), self.plain.weights)
        self.buckets = BucketedCompileCache(power_of_two_ladder(2, 8))
        rng = np.random.default_rng(0)
        self.arrays = [rng.standard_normal((rows, WIDTH)).astype(np.float32) for rows in (1, 3, 8)]
        self.loop = asyncio.new_event_loop()
        self.version = 0
        self.wrong = 0
        self.kinds: tuple[Callable[[Any, Any], Any], ...] = (
            lambda x, _: self.plain.run({"x": x}),
            lambda x, _: self.plain.run_slots([x]),
            lambda x, _: self.plain.run_raw({"x": x}),
            lambda x, _: self.plain.run_read_outputs({"x": x}, [0]),
            self._host_handle,
            self._device_handle,
            lambda x, _: [np.from_dlpack(self.plain.run_dlpack({"x": x})[0])],
            lambda x, _: self.plain.run_pipelined([{"x": x}, {"x": self.arrays[0]}])[0],
            lambda x, _: self.loop.run_until_complete(self.plain.run_async({"x": x})),
            self._committed,
            self._padded,
        )

    def rebuild(self) -> None:
        """Set the parameters, so that every session is opened again, and note what plain runs give from now on."""
        self.version += 1
        scale = 1 + self.version % 3
        with self.plain.update_params():
            self.plain.set_param("w", np.eye(WIDTH, dtype=np.float32) * scale)
            self.plain.set_param("v", np.full(WIDTH, scale, np.float32))
        self.expected = [((x * scale + scale) * scale).astype(np.float32) for x in self.arrays]

    def call(self, number: int) -> None:
        """Make one call of the kind whose turn it is and compare its result."""
        if number % REBUILD_EVERY == 0:
            self.rebuild()
        if number % CLONE_EVERY == 0:
            self._clone()
        which = number // len(self.kinds) % len(self.arrays)
        x, expected = self.arrays[which], self.expected[which]
        found = self.kinds[number % len(self.kinds)](x, expected)
        if found is not None and not np.allclose(found[0], expected, rtol=1e-5, atol=1e-5):
            self.wrong += 1

    def close(self) -> None:
        """Close everything."""
        for graph in (self.plain, self.host, self.device, self.buckets):
            graph.close()
        self.loop.close()

    def _clone(self) -> None:
        with self.plain.clone() as twin:
            if not np.allclose(twin.run({"x": self.arrays[0]})[0], self.expected[0], rtol=1e-5):
                self.wrong += 1

    def _host_handle(self, x: Any, expected: Any) -> Any:
        self.host.bind_handle("x", x)
        return self.host.run({})

    def _device_handle(self, x: Any, expected: Any) -> Any:
        self.device.bind_gpu_handle("x", x)
        self.device.set_gpu_handle_feed("x", 0)
        found = self.device.run_read_outputs({}, [0])
        held = self.device.read_gpu_handle("x")
        self.wrong += held is None or not np.array_equal(held, found[0])
        return found

    def _committed(self, x: Any, expected: Any) -> None:
        self.plain.commit_no_wait({"x": x})
        self.plain.sync_pending()

    def _padded(self, x: Any, expected: Any) -> None:
        found = self.buckets.run_padded(len(x), len(x), _fixed_graph, [("x", x, WIDTH)], [WIDTH])
        self.wrong += found is None or found[1][0].shape != x.shape
