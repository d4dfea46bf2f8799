"""Check and measure two GPUs of one machine: parity and placement on the second, and both at once.

    python scripts/two_gpus.py --out FOLDER

Writes two-gpus.json. Two threads, each on a GPU of its own, must finish at least 1.95 times the runs of one thread.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import rlx_ort  # noqa: E402  # a checkout is not installed
from rlx_ort.providers.registry import default_registry  # noqa: E402

LEAST = 1.95
BOUND = 1e-4
SECONDS = 4.0
ROUNDS = 3
RNG = np.random.default_rng(5)


def main() -> int:
    """Run the checks and return 0 when all hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    devices = [rlx_ort.Device("cuda:0"), rlx_ort.Device("cuda:1")]
    found = {device.label: default_registry().availability(device) for device in devices}
    for device in devices:
        assert found[device.label].available, f"{device.label}: {found[device.label].reason}"
    document: dict[str, Any] = {
        "machine": {label: f"{row.hardware}, driver {row.driver}, {row.identity}" for label, row in found.items()},
        "python": platform.python_version(),
        "identities_differ": found["cuda"].identity != found["cuda:1"].identity,
        **parity(),
        **choice(),
        **speed(),
    }
    (out / "two-gpus.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document, indent=1))
    fast = document["speed_up"] >= LEAST
    return 0 if fast and document["identities_differ"] and document["ranked"] and document["denied"] else 1


def graph(width: int = 1024, layers: int = 48) -> rlx_ort.Graph:
    """Return a chain of products with activations, one input of any number of rows."""
    made = rlx_ort.Graph("chain")
    value = made.input("x", ["rows", width])
    for at in range(layers):
        weight = (RNG.standard_normal((width, width)) / width**0.5).astype(np.float32)
        value = made.tanh(value @ made.param(f"w{at}", [width, width], data=weight))
    made.outputs = [made.sum(value, [1])]
    return made


def parity() -> dict[str, Any]:
    """Return the error and the placement on the second GPU, against float64 by numpy."""
    made = graph(256, 3)
    inputs = {"x": RNG.standard_normal((64, 256)).astype(np.float32)}
    runner = rlx_ort.GraphDevices(made)
    expected = inputs["x"].astype(np.float64)
    for at in range(3):
        weight = runner.weights.get(f"w{at}")
        assert weight is not None
        expected = np.tanh(expected @ weight.numpy().astype(np.float64))
    expected = expected.sum(1)
    [result] = runner.run("cuda:1", inputs)
    error = float(np.linalg.norm(result - expected) / np.linalg.norm(expected))
    share = runner.placement("cuda:1").requested_share
    assert error <= BOUND, error
    assert share == 1.0, share
    return {"error_on_cuda:1": error, "placement_on_cuda:1": share}


def choice() -> dict[str, Any]:
    """Return whether the choice sees both GPUs, and whether denying CUDA denies both."""
    made = graph(256, 3)
    labels = [row.label for row in rlx_ort.GraphDevices(made).rank({"x": np.zeros((4, 256), np.float32)})]
    denied = rlx_ort.DevicePolicy().with_deny(["cuda"])
    left = [device.label for device in rlx_ort.GraphDevices(made, denied).devices()]
    return {"ranked": {"cuda", "cuda:1"} <= set(labels), "denied": not {"cuda", "cuda:1"} & set(left)}


def speed() -> dict[str, Any]:
    """Return how many runs a second one thread does on one GPU and two threads do on two, in turns."""
    made = graph()
    x = {"x": RNG.standard_normal((2048, 1024)).astype(np.float32)}
    runs: list[Callable[[], object]] = []
    for label in ("cuda:0", "cuda:1"):
        compiled = rlx_ort.Session(label).compile(made)
        for _ in range(5):
            compiled.run(x)
        runs.append(lambda compiled=compiled: compiled.run(x))  # type: ignore[misc]  # bound now
    alone, both = [], []
    for turn in range(ROUNDS):
        alone.append(_rate([runs[turn % 2]]))
        both.append(_rate(runs))
    ratio = max(both) / max(alone)
    return {"runs_per_s_one": alone, "runs_per_s_two": both, "speed_up": round(ratio, 3), "least": LEAST}


def _rate(runs: list[Callable[[], object]]) -> float:
    counts = [0] * len(runs)
    until = time.perf_counter() + SECONDS / ROUNDS

    def loop(at: int) -> None:
        while time.perf_counter() < until:
            runs[at]()
            counts[at] += 1

    start = time.perf_counter()
    threads = [threading.Thread(target=loop, args=(at,)) for at in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return round(sum(counts) / (time.perf_counter() - start), 2)


if __name__ == "__main__":
    sys.exit(main())
