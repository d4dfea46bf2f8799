"""Small graphs: what a call costs beside the arithmetic, against `InferenceSession.run` on the same model.

Whatever way a runner is asked for a run, with resilience and without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnxruntime

from figures.record import Figure, in_turns

__all__ = ["measure"]

BLOCKS, RUNS = 21, 3
RUN_LIMITS = {2: 0.95, 100: 0.6, 1000: 0.15}
SLOTS_LIMIT = 0.55
RUNNER_LIMIT = 0.95
WAYS: dict[str, Callable[[Any, dict[str, Any]], object]] = {
    "run_fastest": lambda runner, inputs: runner.run_fastest(inputs),
    "run_resolved": lambda runner, inputs: runner.run_resolved(inputs),
    "runner(x=...)": lambda runner, inputs: runner(**inputs),
    "run(device)": lambda runner, inputs: runner.run("cpu", inputs),
    "run_chosen": lambda runner, inputs: runner.run_chosen(inputs),
}


def measure() -> Iterator[Figure]:
    """Yield `run`, `run_slots` over `InferenceSession.run` for 2, 100 and 1000 inputs of 4 floats; a runner's for 2."""
    for count, limit in RUN_LIMITS.items():
        yield from _one(count, limit)
    for resilient in (False, True):
        yield from _runner(resilient)


def _one(count: int, limit: float) -> Iterator[Figure]:
    _, compiled, engine = _opened(count)
    inputs = {f"in{index}": np.full(4, index, np.float32) for index in range(count)}
    arrays = list(inputs.values())
    np.testing.assert_array_equal(compiled.run(inputs)[0], engine.run(None, inputs)[0])
    np.testing.assert_array_equal(compiled.run_slots(arrays)[0], engine.run(None, inputs)[0])
    calls = max(1, 2000 // count)
    title = "4-float Add" if count == 2 else f"{count} inputs"

    def measured(name: str, action: Callable[[], object], target: float | None) -> Figure:
        ours, theirs, ratio = in_turns(
            _repeated(action, calls), _repeated(lambda: engine.run(None, inputs), calls), BLOCKS, RUNS
        )
        detail = f"{ours / calls * 1e6:.2f} us against {theirs / calls * 1e6:.2f} us"
        return Figure(f"{title} on cpu, {name} over InferenceSession.run", ratio, "times", target, detail)

    yield measured("run", lambda: compiled.run(inputs), limit)
    yield measured("run_slots", lambda: compiled.run_slots(arrays), SLOTS_LIMIT if count == 2 else None)


def _runner(resilient: bool) -> Iterator[Figure]:
    """Yield each way to run on 2 inputs of 4 floats over `InferenceSession.run`."""
    from rlx_ort.graph_devices import GraphDevices
    from rlx_ort.options.compile_options import CompileOptions
    from rlx_ort.resilience.options import Resilience
    from rlx_ort.selection.policy import DevicePolicy

    graph, _, engine = _opened(2)
    inputs = {f"in{index}": np.full(4, index, np.float32) for index in range(2)}
    runner = GraphDevices(
        graph,
        policy=DevicePolicy(allow=("cpu",)),
        options=CompileOptions(intra_op_threads=1),
        resilience=Resilience() if resilient else None,
    )
    calls = 1000
    for name, way in WAYS.items():
        np.testing.assert_array_equal(runner.run_fastest(inputs)[0], engine.run(None, inputs)[0])
        ours, theirs, ratio = in_turns(
            _repeated(lambda way=way: way(runner, inputs), calls),  # type: ignore[misc]  # bound now
            _repeated(lambda: engine.run(None, inputs), calls),
            BLOCKS,
            RUNS,
        )
        detail = f"{ours / calls * 1e6:.2f} us against {theirs / calls * 1e6:.2f} us"
        kind = "resilient" if resilient else "plain"
        yield Figure(
            f"4-float Add on cpu, {kind} {name} over InferenceSession.run", ratio, "times", RUNNER_LIMIT, detail
        )


def _repeated(action: Callable[[], object], calls: int) -> Callable[[], None]:
    def block() -> None:
        for _ in range(calls):
            action()

    return block


def _opened(count: int) -> tuple[Any, Any, onnxruntime.InferenceSession]:
    """Return a graph of so many inputs, the same compiled, and the same model in an `InferenceSession`."""
    from rlx_ort.converters.to_onnx import to_onnx
    from rlx_ort.execution.session import Session
    from rlx_ort.ir.graph import Graph
    from rlx_ort.options.compile_options import CompileOptions

    graph = Graph("overhead")
    values = [graph.input(f"in{index}", [4]) for index in range(count)]
    graph.outputs = [values[0] + values[1]] if count == 2 else [graph.concat(values, 0)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    engine = onnxruntime.InferenceSession(
        to_onnx(graph).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return graph, Session("cpu", CompileOptions(intra_op_threads=1)).compile(graph), engine
