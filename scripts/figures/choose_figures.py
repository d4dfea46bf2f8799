"""The cost of choosing a device: measuring it once, reading the measurements, and deciding for a graph."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from figures.record import Figure, fresh, seconds_of
from rlx_ort import environment
from rlx_ort.calibration import store
from rlx_ort.converters.to_onnx.exporter import exported
from rlx_ort.device import Device
from rlx_ort.execution.benchmark import Pace
from rlx_ort.graph_devices import GraphDevices
from rlx_ort.ir.graph import Graph
from rlx_ort.providers.registry import availability, available_devices, is_selectable
from rlx_ort.selection.candidates import automatic, fastest_device_for
from rlx_ort.selection.predict import calibrate

CALIBRATIONS, READINGS = 3, 9
GRAPHS = 31
CACHED_CALLS = 2000
_QUICKER = 0.05  # of the host's times are quicker than undisturbed, as for calibrations
NODES = 1000
READ_LIMIT_MS, FIRST_LIMIT_MS, CACHED_LIMIT_US, NEW_SIZE_LIMIT_US = 5, 20, 50, 20


def measure() -> Iterator[Figure]:
    """Yield the times of calibrations, of reading a profile, and of choosing, first and again; medians all."""
    with tempfile.TemporaryDirectory() as folder, environment.override({"RLX_CACHE_DIR": folder}):
        store.forget()
        working = [device for device in available_devices() if is_selectable(device)]
        hardware = {availability(device).hardware: device for device in reversed(working)}  # kinds may share a GPU
        for device in reversed(hardware.values()):
            yield from _calibrations(device)
        times = [fresh(reading_ms, folder) for _ in range(READINGS)]
        detail = f"in a new process, longest {max(times):.2f} ms"
        yield Figure("reading a stored profile", statistics.median(times), "ms", READ_LIMIT_MS, detail)
        yield from _choosing(", ".join(device.label for device in working))
    store.forget()


def _calibrations(device: Device) -> Iterator[Figure]:
    software = "software" in availability(device).hardware
    for kind, limit_s in (("quick", None if software else 2.0), ("full", 30.0 if software else 8.0)):
        times, rows = [], []
        for _ in range(CALIBRATIONS):
            start = time.perf_counter()
            profile = calibrate(device, quick=kind == "quick")
            times.append(time.perf_counter() - start)
            rows.append(len(profile.rows))
        detail = f"longest {max(times):.2f} s, {min(rows)} rows of {profile.key.hardware}"
        name = f"{kind} calibration of {device.label}{', in software' if software else ''}"
        yield Figure(name, statistics.median(times), "s", limit_s, detail)


def reading_ms(folder: str) -> float:
    """Return the milliseconds that reading the CPU's profile takes; modules are loaded before the clock starts."""
    environment.set_override("CACHE_DIR", folder)
    store.key_of(Device.CPU)
    start = time.perf_counter()
    profile = store.find(Device.CPU).profile
    taken = time.perf_counter() - start
    assert profile is not None, store.find(Device.CPU).reason
    return taken * 1e3


def _choosing(devices: str) -> Iterator[Figure]:
    """Yield the time of a first choice, the rest of the export that its first run needs, and of the choice again.

    A choice during which the host's core was slower than usual counts only where there are no others.
    """
    pace = Pace(time.perf_counter_ns, _QUICKER)
    fastest_device_for(_graph(NODES, 8))  # probes the devices and reads their kernels, once a process
    choosing: list[tuple[float, float]] = []  # how slow the host was, and seconds
    finishing = []
    for at in range(GRAPHS):
        graph = _graph(NODES, 16 + 8 * at)
        before, spent = pace.now(), _collected(partial(fastest_device_for, graph))
        choosing.append((max(before, pace.now()), spent))
        finishing.append(_collected(partial(exported, graph, automatic(None))))
    steady = [spent for slow, spent in choosing if slow <= pace.limit_ns] or [spent for _, spent in choosing]
    name = f"choosing for a new graph of {NODES} nodes in equal layers"
    detail = f"among {devices}; longest of {len(steady)} {max(steady) * 1e3:.1f} ms"
    yield Figure(name, statistics.median(steady) * 1e3, "ms", FIRST_LIMIT_MS, detail)
    detail = "the rest of its export once it was judged"
    yield Figure(f"{name}, its model after that", statistics.median(finishing) * 1e3, "ms", None, detail)
    again = statistics.median(_collected(partial(fastest_device_for, graph)) for _ in range(CACHED_CALLS))
    yield Figure("choosing for it again", again * 1e6, "us", CACHED_LIMIT_US)
    runner = GraphDevices(_graph(NODES, 8))
    first, *others = [{"x": np.ones((batch, 8), np.float32)} for batch in range(512, 1024)]
    runner.fastest(first)
    curves, *times = [_collected(partial(runner.fastest, given)) for given in others]
    detail = f"making the curves {curves * 1e3:.1f} ms"
    name = f"choosing for a new batch size of {NODES} nodes"
    yield Figure(name, statistics.median(times) * 1e6, "us", NEW_SIZE_LIMIT_US, detail)


def _collected(action: Callable[[], object]) -> float:
    """Return the time of a call; garbage of earlier ones is collected before, not in it."""
    if gc.get_count()[0] > 300:
        gc.collect()
    return seconds_of(action)


def _graph(nodes: int, width: int) -> Graph:
    """Return dense layers with normalisation, ten nodes each, whose width makes this graph unique."""
    graph = Graph(f"layers{width}")
    value = graph.input("x", ["batch", width])
    for layer in range(nodes // 10):
        hidden = value @ graph.param(f"w{layer}", [width, 4 * width]) + graph.param(f"b{layer}", [4 * width])
        hidden = graph.relu(hidden) @ graph.param(f"v{layer}", [4 * width, width])
        value = graph.relu(graph.softmax(graph.sigmoid(hidden) * graph.tanh(hidden), -1) + value)
    graph.outputs = [value]
    return graph
