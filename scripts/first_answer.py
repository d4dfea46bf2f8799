"""Measure the time to the first answer while a device opens, against that of the CPU alone, in new processes in turns.

    python scripts/first_answer.py                    a made-up device that takes 20 seconds to open
    python scripts/first_answer.py webgpu --rounds 20
    python scripts/first_answer.py cuda

Prints the lower quartile and the median of both, their ratio, when the device answered first, and the longest run until
then. The exit code is 1 when the ratio of the lower quartiles is above 1.1, or the device never answered.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from fault_provider import FaultProvider

from rlx_ort import environment
from rlx_ort.graph_devices import GraphDevices
from rlx_ort.ir.graph import Graph
from rlx_ort.providers.cpu import CpuProvider
from rlx_ort.providers.registry import register_provider
from rlx_ort.resilience.options import Resilience
from rlx_ort.selection.policy import DevicePolicy

LAYERS, WIDTH, ROWS = 30, 512, 8
COMPILE_S, PATIENCE_S = 20.0, 90.0


def main() -> int:
    """Measure, and return 1 when the first answer waits for the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", nargs="?", default="fault")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--one", choices=["cpu", "first", "swap"], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(_measured(asked.device, asked.one)), flush=True)
        os._exit(0)  # the device may still be opening
    times: dict[str, list[float]] = {"cpu": [], "first": []}
    for _ in range(asked.rounds):
        for kind, found in times.items():
            found.append(_in_new_process(asked.device, kind)["first_s"])
    ratio = _quartile(times["first"]) / _quartile(times["cpu"])
    for kind, found in times.items():
        print(f"{kind}: lower quartile {_quartile(found):.3f} s, median {statistics.median(found):.3f} s")
    swap = _in_new_process(asked.device, "swap")
    print(f"ratio {ratio:.2f}; {json.dumps(swap)}")
    return int(ratio > 1.1 or swap.get("swap_s") is None)


def _quartile(found: list[float]) -> float:
    return sorted(found)[len(found) // 4]


def _in_new_process(device: str, kind: str) -> dict[str, float]:
    command = [sys.executable, "-P", __file__, device, "--one", kind]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measured(device: str, kind: str) -> dict[str, float]:
    if device == "fault":
        fault = FaultProvider(CpuProvider())
        fault.open_delay_s = COMPILE_S
        register_provider(fault)
    environment.set_override("DEVICE", "cpu" if kind == "cpu" else device)
    rng = np.random.default_rng(0)
    graph = Graph("first")
    value = graph.input("x", [ROWS, WIDTH])
    for layer in range(LAYERS):
        weights = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 20
        value = graph.tanh(value @ graph.param(f"w{layer}", [WIDTH, WIDTH], data=weights))
    graph.outputs = [value]
    inputs = {"x": rng.standard_normal((ROWS, WIDTH)).astype(np.float32)}
    begun = time.perf_counter()
    policy = DevicePolicy.only(["cpu"] if kind == "cpu" else ["cpu", device])
    runner = GraphDevices(graph, policy, resilience=None if kind == "cpu" else Resilience())
    runner.run_resolved(inputs)
    found = {"first_s": time.perf_counter() - begun}
    longest = 0.0
    while kind == "swap" and time.perf_counter() - begun < PATIENCE_S:
        start = time.perf_counter()
        runner.run_resolved(inputs)
        longest = max(longest, time.perf_counter() - start)
        last = runner.last_run
        if last is not None and last.device is not None and last.device.label.startswith(device):
            return found | {"swap_s": time.perf_counter() - begun, "longest_run_s": longest}
        time.sleep(0.01)
    return found


if __name__ == "__main__":
    sys.exit(main())
