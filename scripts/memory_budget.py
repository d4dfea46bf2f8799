"""Serve ten models that together need three times a device's memory budget, and compare the budget with real memory.

    python scripts/memory_budget.py --device cpu --megabytes 24 --cache off
    python scripts/memory_budget.py --count resnet50.onnx vit.onnx --dim batch=8

Models are opened without a limit to learn their memory; then the budget is a third of that, beside the device's
memory without them. Requests draw a model and an input at random, and results are compared with the CPU's. Threads
read real and counted memory every two milliseconds. Fails if a result is wrong, or if real memory exceeds the budget
by more than `--slack`. With --count, the real memory of one session a process is compared with the counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from figures.record import fresh, peak_bytes, sampled  # noqa: E402
from rlx_ort import CompileOptions, Device, Graph, GraphDevices, Session, environment, load, memory_use, to_onnx  # noqa: E402
from rlx_ort.execution.residency import residency  # noqa: E402
from rlx_ort.made_up import random_inputs  # noqa: E402
from rlx_ort.numerics import relative_error  # noqa: E402
from rlx_ort.providers.engine.compiled.models import watched  # noqa: E402
from rlx_ort.providers.hardware import private_bytes, release_free_heap  # noqa: E402
from rlx_ort.providers.registry import provider_of, require_available  # noqa: E402
from rlx_ort.selection.memory import memory_need  # noqa: E402
from rlx_ort.selection.predict import dims_of  # noqa: E402

MODELS, INPUTS, LAYERS, ROWS = 10, 4, 6, 8
UNLIMITED, SAMPLED_S = 1 << 50, 0.002
TOLERANCE = 1e-4  # of the largest value


def model(number: int, megabytes: float) -> GraphDevices:
    """Return a runner of six matrix products whose weights take about `megabytes`, by 60 % more in the last model."""
    scale = 0.7 + 0.6 * number / (MODELS - 1)
    width = int((megabytes * scale * 2**20 / 4 / LAYERS) ** 0.5)
    draw = np.random.default_rng(number)
    graph = Graph(f"model_{number}")
    y = graph.input("x", (ROWS, width))
    for layer in range(LAYERS):
        weight = draw.standard_normal((width, width), np.float32) * np.float32(width**-0.5)
        y = graph.tanh(y @ graph.param(f"w{layer}", (width, width), data=weight))
    graph.outputs = [y]
    return GraphDevices(graph)


def inputs_of(runner: GraphDevices, number: int) -> dict[str, Any]:
    """Return one of the inputs of a model."""
    shape = runner.graph.inputs[0].shape.static()
    return {"x": np.random.default_rng(100 + number).standard_normal(shape, np.float32)}


def counted(path: str, label: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Return the real peak of a model on a device above that of a process with a tiny one, and the counted peak."""
    device, marks = Device(label), Path("/proc/self/clear_refs")

    def read() -> int:
        reading = provider_of(device).memory(device)  # type: ignore[union-attr]
        return reading.nbytes if reading is not None and reading.whole else psutil.Process().memory_info().rss

    with tempfile.TemporaryDirectory() as folder:
        (tiny := Path(folder) / "tiny.onnx").write_bytes(to_onnx(model(0, 0.1).graph).SerializeToString())
        Session(device).compile(load(tiny).graph).run(inputs_of(load(tiny), 0))
    release_free_heap()
    before, runner = read(), load(path)
    release_free_heap()
    feeds, _ = random_inputs(runner.graph.input_types, sizes)
    if on_host := device == Device.CPU and marks.exists():
        marks.write_text("5", encoding="ascii")  # the highest mark begins anew
    with sampled(read, SAMPLED_S) as samples:
        compiled = Session(device, CompileOptions(sized_sessions=0)).compile(runner.graph)
        for _ in range(3):
            compiled.run(feeds)
    real = (peak_bytes() - sum(each.nbytes for each in feeds.values()) if on_host else max(samples)) - before
    total = memory_need(runner.graph, device, None, dims_of(runner.graph, feeds)).session  # type: ignore[union-attr]
    return {"model": Path(path).stem, **sizes, "real": real, "counted": total, "ratio": round(total / real, 3)}


def serve(device: Device, requests: int, threads: int, megabytes: float, cache: str | None) -> dict[str, Any]:
    """Serve random requests within a budget, and return the outcome."""
    require_available(device)
    memory = partial(provider_of(device).memory, device)  # type: ignore[union-attr]

    def read() -> int:
        return private_bytes() if (reading := memory()) is None else reading.nbytes

    whole = (reading := memory()) is not None and reading.whole
    runners = [model(number, megabytes) for number in range(MODELS)]
    environment.set_override("DEVICE_MEMORY", f"{device.label}={UNLIMITED}")
    environment.set_override("CACHE", "off")
    wanted = [[runner.run("cpu", inputs_of(runner, number))[0] for number in range(INPUTS)] for runner in runners]
    _close(runners)
    outside = read()  # CUDA's context after the probe, or the weights in host memory
    for runner in runners:
        runner.run(device, inputs_of(runner, 0))
    needed = read() - outside
    measured = sum(each.nbytes or 0 for use in memory_use() if use.device == device for each in use.models)
    _close(runners)
    left = read()  # whatever the first runs load for good: kernels, handles
    budget = (left if whole else 0) + (needed - (left - outside)) // 3
    environment.set_override("DEVICE_MEMORY", f"{device.label}={budget}")
    environment.set_override("CACHE", cache) if cache is not None else environment.unset_override("CACHE")
    wrong: list[str] = []

    def work(seed: int) -> None:
        draw = random.Random(seed)  # noqa: S311  # no secret
        for _ in range(requests // threads):
            which, number = draw.randrange(MODELS), draw.randrange(INPUTS)
            try:
                (got,) = runners[which].run(device, inputs_of(runners[which], number))
            except Exception as err:
                wrong.append(f"model {which}: {type(err).__name__}: {err}")
                continue
            if (off := relative_error(got, wanted[which][number])) > TOLERANCE:
                wrong.append(f"model {which}: differs by {off:.2e}")

    pool, ledger = ThreadPoolExecutor(threads), partial(residency().used, device)
    with watched() as cached, sampled(read, SAMPLED_S) as samples, sampled(ledger, SAMPLED_S) as most, pool:
        list(pool.map(work, range(threads)))
    (use,) = [each for each in memory_use() if each.device == device]
    result = {
        "needed_bytes": needed,
        "measured_bytes": measured,
        "budget_bytes": budget,
        "peak_bytes": max(samples) - (0 if whole else left),
        "most_counted_bytes": max(most),
        "used_at_the_end": use.used_bytes,
        "openings": sum(each.openings for each in use.models),
        "from_cache": len(cached),
        "evictions": sum(each.evictions for each in use.models),
        "wrong": len(wrong),
        "first_wrong": wrong[:3],
    }
    _close(runners)
    environment.clear_overrides()
    return result


def _close(runners: list[GraphDevices]) -> None:
    list(map(GraphDevices.close, runners))
    release_free_heap()


def main() -> int:
    """Serve, print the outcome, and return 0 if all results are right and the budget held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=24.0, help="weights of an average model")
    parser.add_argument("--cache", choices=("on", "off"), help="by default sessions are opened again from the cache")
    parser.add_argument("--slack", type=float, default=0.0, help="share of the budget by which it may be exceeded")
    parser.add_argument("--count", nargs="+", default=[], type=os.path.abspath, help="ONNX files")
    parser.add_argument("--dim", nargs="+", default=[], help="sizes of named dims, as seq=128")
    options = parser.parse_args()
    import memory_budget  # another process imports it by this name

    for path in options.count:
        sizes = {name: int(size) for name, size in (each.split("=") for each in options.dim)}
        print(json.dumps(fresh(memory_budget.counted, path, options.device, sizes)), flush=True)
    if options.count:
        return 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment.set_override("CACHE_DIR", folder)
        result = serve(Device(options.device), options.requests, options.threads, options.megabytes, options.cache)
    print(json.dumps(result, indent=1))
    return int(result["wrong"] > 0 or result["peak_bytes"] > result["budget_bytes"] * (1 + options.slack))


if __name__ == "__main__":
    sys.exit(main())
