"""Check what only a GPU machine can show: tensors that stay on the device, device graphs, memory limits, DLPack.

    python scripts/device_runs.py              CUDA
    python scripts/device_runs.py webgpu       another device; what it has not is skipped with the reason

One line for each check: ok, skipped or FAILED, with what was measured. The exit code is 1 when one failed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rlx_ort.device import Device
from rlx_ort.errors import EngineError, RlxError
from rlx_ort.execution.session import Session
from rlx_ort.ir.graph import Graph
from rlx_ort.options.compile_options import CompileOptions

RNG = np.random.default_rng(3)


class Skipped(Exception):  # noqa: N818  # it is an outcome, not an error
    """The check has nothing to show here; the message says why."""


def main() -> int:
    """Run every check and return 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", nargs="?", default="cuda")
    device = Device(parser.parse_args().device)
    failed = False
    for check in (_handles, _slots, _device_graph, _memory_limit, _dlpack):
        title = (check.__doc__ or "").splitlines()[0].rstrip(".")
        try:
            line = f"ok       {title}: {check(device)}"
        except Skipped as reason:
            line = f"skipped  {title}: {reason}"
        except (RlxError, AssertionError, RuntimeError, BufferError) as err:
            failed = True
            line = f"FAILED   {title}: {type(err).__name__}: {err}"
        print(line, flush=True)
    return int(failed)


def _step(rows: int | str, width: int) -> Graph:
    """Return a graph that feeds its first output back: `tanh(state @ w + x)`, and the sum of it."""
    graph = Graph("step")
    x = graph.input("x", [rows, width])
    state = graph.input("state", [rows, width])
    w = graph.param("w", [width, width], data=(RNG.standard_normal((width, width)) / width).astype(np.float32))
    new = graph.tanh(state @ w + x)
    graph.outputs = [new, new.sum([1])]
    return graph


def _inputs(rows: int, width: int) -> dict[str, np.ndarray[Any, Any]]:
    return {name: RNG.standard_normal((rows, width)).astype(np.float32) for name in ("x", "state")}


def _handles(device: Device) -> str:
    """A state that stays on the device equals one over the host."""
    graph, inputs = _step("n", 1024), _inputs(256, 1024)
    compiled, cpu = Session(device).compile(graph), Session("cpu").compile(graph)
    state = inputs["state"]
    for _ in range(5):
        state = cpu.run({"x": inputs["x"], "state": state})[0]
    compiled.bind_gpu_handle("state", inputs["state"])
    compiled.set_gpu_handle_feed("state", 0)
    for _ in range(5):
        compiled.run_read_outputs({"x": inputs["x"]}, [1])
    error = _error(compiled.read_gpu_handle("state"), state)
    assert error < 1e-4, error
    kept = _median(lambda: compiled.run_read_outputs({"x": inputs["x"]}, [1]))
    over = Session(device).compile(graph)
    trip = _median(lambda: over.run(inputs))
    return f"error {error:.1e}; {kept * 1e6:.0f} us a step against {trip * 1e6:.0f} us over the host"


def _slots(device: Device) -> str:
    """Runs through fixed buffers equal plain ones."""
    compiled = Session(device).compile(_step("n", 256))
    inputs = _inputs(8, 256)
    expected = compiled.run(inputs)
    for _ in range(3):
        found = compiled.run_slots(list(inputs.values()))
    error = max(_error(got, want) for got, want in zip(found, expected, strict=True))
    assert error < 1e-6, error
    plain = _median(lambda: compiled.run(inputs))
    slots = _median(lambda: compiled.run_slots(list(inputs.values())))
    return f"error {error:.1e}; {slots * 1e6:.0f} us against {plain * 1e6:.0f} us"


def _device_graph(device: Device) -> str:
    """Recorded launches give the same for new inputs."""
    graph = _step(32, 1024)
    plain = Session(device).compile(graph)
    recorded = Session(device, CompileOptions(device_graph=True)).compile(graph)
    for _ in range(6):  # the third run is recorded on CUDA
        inputs = _inputs(32, 1024)
        error = _error(recorded.run(inputs)[0], plain.run(inputs)[0])
        assert error < 1e-6, error
    for compiled in (plain, recorded):
        compiled.bind_gpu_handle("state", inputs["state"])
        compiled.set_gpu_handle_feed("state", 0)
        for _ in range(3):
            compiled.run_read_outputs({"x": inputs["x"]}, [1])
    error = _error(recorded.read_gpu_handle("state"), plain.read_gpu_handle("state"))
    assert error < 1e-6, error
    times = [
        _median(lambda each=each: each.run_read_outputs({"x": inputs["x"]}, [1]))  # type: ignore[misc]  # bound now
        for each in (recorded, plain)
    ]
    return f"{times[0] * 1e6:.0f} us against {times[1] * 1e6:.0f} us without"


def _memory_limit(device: Device) -> str:
    """A run beyond the memory limit is a typed error and the graph stays usable."""
    if device.kind != "cuda":
        raise Skipped("only CUDA has a limit")
    graph = Graph("large")
    x = graph.input("x", ["n", 1024])
    graph.outputs = [(x @ graph.transpose(x, [1, 0])).sum([1])]
    options = CompileOptions(device_memory_limit_bytes=64 << 20)
    compiled = Session(device, options).compile(graph)
    small = RNG.standard_normal((16, 1024)).astype(np.float32)
    expected = compiled.run({"x": small})[0]
    try:
        compiled.run({"x": np.zeros((16384, 1024), np.float32)})
    except EngineError as err:
        text = str(err)
    else:
        raise AssertionError("a gigabyte fitted into 64 MiB")
    np.testing.assert_array_equal(compiled.run({"x": small})[0], expected)
    return text[:100]


def _dlpack(device: Device) -> str:
    """A tensor of torch goes in and comes out where it is."""
    if device.kind != "cuda":
        raise Skipped("only CUDA memory can be shared")
    try:
        import torch
    except ImportError as err:
        raise Skipped("torch is not installed") from err
    compiled = Session(device).compile(_step("n", 256))
    inputs = _inputs(8, 256)
    given = {name: torch.from_numpy(array).to(f"cuda:{device.index}") for name, array in inputs.items()}
    tensor = compiled.run_dlpack(given)[0]
    shared = torch.from_dlpack(tensor)
    assert shared.device.type == "cuda"
    assert shared.data_ptr() == torch.from_dlpack(tensor).data_ptr()
    error = _error(shared.cpu().numpy(), compiled.run(inputs)[0])
    assert error < 1e-6, error
    return f"error {error:.1e}"


def _error(found: Any, expected: Any) -> float:
    scale = max(float(np.abs(expected).max()), 1e-30)
    return float(np.abs(np.asarray(found, np.float64) - expected).max()) / scale


def _median(action: Callable[[], object], runs: int = 30) -> float:
    for _ in range(5):
        action()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
