"""Show that an adaptive choice leaves a busy CPU for another device, and comes back.

    python scripts/load_figures.py --devices cpu,cuda
    python scripts/load_figures.py --devices cpu,webgpu --handicap

Runs one graph in a loop, for which the CPU is somewhat faster than the other device while the machine is idle, and
slower while processes occupy all its cores; such a graph is searched for. Prints a JSON object with what it took to
leave and to come back, and compares every result with numpy in float64. The exit code is 1 when the choice takes
longer than 3 s and 10 s or a result is wrong, and 2 when there is no such graph here.

With --handicap no process is started: the CPU's runs sleep instead, a little at first and longer under load, which is
for machines without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import rlx_ort  # noqa: E402  # a checkout is not installed
from rlx_ort import adaptive  # noqa: E402
from rlx_ort.execution.benchmark import timed_block  # noqa: E402

LEAVE_S, RETURN_S = 3.0, 10.0
IDLE_S, LOAD_S, AFTER_S = 2.0, 7.0, 12.0
SEARCH_S, TRY_S = 12.0, 0.4
IDLE, LOADED = (0.4, 0.8), 1.15  # the CPU's time as a share of the other's, idle and, at least, under load
BOUND = 1e-4
SIZES = (1 << 19, 1 << 20, 1 << 21, 1 << 22)  # elements: enough for every core, and a millisecond to bring to a GPU
MOST_LAYERS = 48
WIDTH = 64
A_CORE = 3  # busy processes: beside one, a scheduler lets runs that are shorter than its slice go first
BUSY = f"import time\nend = time.time() + {LOAD_S + SEARCH_S}\nwhile time.time() < end: pass"


class Case:
    """A chain of products of elements, its inputs, and its results; the CPU's runs sleep for `sleep_s` before."""

    def __init__(self, devices: list[str], elements: int, layers: int) -> None:
        rng = np.random.default_rng(7)
        graph = rlx_ort.Graph("chain")
        self.inputs = {"x": rng.standard_normal((elements // WIDTH, WIDTH)).astype(np.float32)}
        value, wanted = graph.input("x", ["rows", WIDTH]), self.inputs["x"].astype(np.float64)
        for layer in range(layers):
            factors = rng.uniform(0.5, 2.0, WIDTH).astype(np.float32)
            value = graph.tanh(value * graph.param(f"w{layer}", [WIDTH], data=factors))
            wanted = np.tanh(wanted * factors)
        graph.outputs = [value]
        self.wanted, self.shape, self.sleep_s = wanted, {"elements": elements, "layers": layers}, 0.0
        self.home = devices[0]
        self.runner = rlx_ort.GraphDevices(graph, rlx_ort.DevicePolicy.only(devices).with_adaptive_pick())
        self.compiled = [self.runner.compile(device) for device in devices]
        plain = self.compiled[0].run

        def run(inputs: Any) -> list[Any]:
            if self.sleep_s:
                time.sleep(self.sleep_s)
            return plain(inputs)

        self.compiled[0].__dict__["run"] = run

    def close(self) -> None:
        """Close the sessions: the idle threads of others' would take the cores of the one that is timed."""
        self.runner.close()

    def times_ns(self) -> list[float]:
        """Return the median time of a run on the CPU and the other device, in turns of a few runs; two warm each up."""
        found: list[list[int]] = [[] for _ in self.compiled]
        end = time.perf_counter() + TRY_S
        while time.perf_counter() < end or not found[1]:
            for compiled, times in zip(self.compiled, found, strict=True):
                times += timed_block(compiled, self.inputs, 6, 2)
        return [statistics.median(times) for times in found]

    def run_for(self, seconds: float) -> list[tuple[str, float, float, bool]]:
        """Run in a loop and return each run's device, what it took in us, when it ended, and whether it was right."""
        runs, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            begun = time.perf_counter()
            device, outputs = self.runner.run_chosen(self.inputs)
            done = time.perf_counter()
            right = bool(np.abs(outputs[0] - self.wanted).max() < BOUND * np.abs(self.wanted).max())
            runs.append((device.label, (done - begun) * 1e6, done, right))
        return runs


@contextlib.contextmanager
def load(processes: bool, case: Case | None = None, sleep_s: float = 0.0) -> Iterator[None]:
    """Slow the CPU down in the block: by a process for each core, or by sleeps in a case's runs."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    started = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(A_CORE * cores if processes else 0)]
    before = 0.0 if case is None else case.sleep_s
    try:
        if case is not None:
            case.sleep_s = max(before, sleep_s)
        yield
    finally:
        if case is not None:
            case.sleep_s = before
        for process in started:
            process.kill()
            process.wait()


def search(devices: list[str], tried: list[dict[str, Any]]) -> Case | None:
    """Return a case for which the CPU is the faster one on an idle machine, and the slower one on a busy one.

    What was `tried` gets the median times of every graph, in us: the CPU's and the other device's.
    """
    end, fitting = time.perf_counter() + SEARCH_S, list[tuple[int, int]]()
    for elements in SIZES:
        low, high = 1, MOST_LAYERS  # the more layers, the slower is the CPU beside a GPU
        while low < high and time.perf_counter() < end:
            case = Case(devices, elements, layers := math.isqrt(low * high))
            cpu_ns, other_ns = case.times_ns()
            tried.append({**case.shape, "idle_us": [round(ns / 1e3, 1) for ns in (cpu_ns, other_ns)]})
            if IDLE[0] <= cpu_ns / other_ns <= IDLE[1]:
                fitting.append((elements, layers))
            case.close()
            if fitting[-1:] == [(elements, layers)]:
                break
            low, high = (layers + 1, high) if cpu_ns / other_ns < IDLE[0] else (low, layers)
    with load(processes=True):
        time.sleep(0.3)
        for shape in fitting:
            case = Case(devices, *shape)
            cpu_ns, other_ns = case.times_ns()
            tried.append({**case.shape, "loaded_us": [round(ns / 1e3, 1) for ns in (cpu_ns, other_ns)]})
            if cpu_ns / other_ns >= LOADED:
                return case
            case.close()
    return None


def measure(case: Case, handicap: bool) -> dict[str, Any]:
    """Run idle, under load and idle again, and return what it took to leave and to come back, in s."""
    other_s = 0.0
    if handicap:
        cpu_ns, other_ns = case.times_ns()
        other_s = other_ns / 1e9
        case.sleep_s = max(0.4 * other_ns - cpu_ns, 0.0) / 1e9
    phases = {"idle": case.run_for(IDLE_S)}
    race = case.runner.last_choice
    with load(not handicap, case, 8 * other_s):
        loaded_s = time.perf_counter()
        phases["load"] = case.run_for(LOAD_S)
    freed_s = time.perf_counter()
    phases["after"] = case.run_for(AFTER_S)
    left = [done - loaded_s for device, _, done, _ in phases["load"] if device != case.home]
    away = [done - freed_s for device, _, done, _ in phases["after"] if device != case.home]
    left_s, back_s = min(left, default=None), max(away, default=0.0)
    wrong = sum(not right for runs in phases.values() for *_, right in runs)
    began_at = statistics.mode(device for device, *_ in phases["idle"])
    ok = left_s is not None and left_s <= LEAVE_S and back_s <= RETURN_S
    return {
        **case.shape,
        "race_us": {} if race is None else {label: round(ns / 1e3, 1) for label, ns in race.measured.items()},
        "left_s": left_s,
        "back_s": back_s,
        "runs": sum(map(len, phases.values())),
        "wrong": wrong,
        **{name: summary(runs) for name, runs in phases.items()},
        "ok": ok and not wrong and began_at == case.home,
    }


def summary(runs: list[tuple[str, float, float, bool]]) -> dict[str, Any]:
    """Return, by device, how many runs there were and what they took."""
    times = {label: [us for device, us, *_ in runs if device == label] for label in {device for device, *_ in runs}}
    return {label: {"runs": len(us), "median_us": round(statistics.median(us), 1)} for label, us in times.items()}


def main() -> int:
    """Search, measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu,cuda", help="the CPU and the device to leave it for")
    parser.add_argument("--handicap", action="store_true", help="the CPU's runs sleep, instead of a load")
    given = parser.parse_args()
    devices = given.devices.split(",")
    # Without predictions the adaptive choice always times both devices.
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(adaptive, "explain", return_value=None):
        os.environ["RLX_CACHE_DIR"] = folder
        tried: list[dict[str, Any]] = []
        case = Case(devices, 64 * WIDTH, 2) if given.handicap else search(devices, tried)
        document = {"found": False, "ok": False} if case is None else measure(case, given.handicap)
    print(json.dumps({"devices": given.devices, "handicap": given.handicap, **document, "tried": tried}, indent=1))
    return int(not document["ok"]) if case is not None else 2


if __name__ == "__main__":
    sys.exit(main())
