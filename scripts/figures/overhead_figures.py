"""Small graphs: what a call costs beside the arithmetic, against `InferenceSession.run` on the same model.

And what a resilient runner adds to a run for which nothing fails.
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
RESILIENT = (1.05, 0.3)
"""A resilient run may take so many times a plain one, and so many us more."""


def measure() -> Iterator[Figure]:
    """Yield `run` and `run_slots` over `InferenceSession.run` for 2, 100 and 1000 inputs of 4 floats."""
    for count, limit in RUN_LIMITS.items():
        yield from _one(count, limit)
    for count in (1, 2):
        yield _resilient(count)


def _one(count: int, limit: float) -> Iterator[Figure]:
    compiled, engine = _opened(count)
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


def _resilient(count: int) -> Figure:
    """Return what a resilient runner adds to a plain run on so many inputs of 4 floats, in us."""
    from rlx_ort.execution.session import Session
    from rlx_ort.graph_devices import GraphDevices
    from rlx_ort.options.compile_options import CompileOptions
    from rlx_ort.resilience.options import Resilience
    from rlx_ort.selection.policy import DevicePolicy

    options = CompileOptions(intra_op_threads=1)
    plain = Session("cpu", options).compile(_sum(count))
    policy = DevicePolicy(allow=("cpu",))
    runner = GraphDevices(_sum(count), policy=policy, options=options, resilience=Resilience())
    inputs = {f"in{index}": np.full(4, index, np.float32) for index in range(count)}
    np.testing.assert_array_equal(runner.run_fastest(inputs)[0], plain.run(inputs)[0])
    calls = 1000
    ours, theirs, _ = in_turns(
        _repeated(lambda: runner.run_fastest(inputs), calls), _repeated(lambda: plain.run(inputs), calls), 101, RUNS
    )
    factor, most = RESILIENT
    detail = f"{ours / calls * 1e6:.2f} us against {theirs / calls * 1e6:.2f} us"
    beyond = (ours - factor * theirs) / calls * 1e6
    return Figure(
        f"4 floats, {count} inputs on cpu, resilient run less {factor} plain ones", beyond, "us", most, detail
    )


def _sum(count: int) -> Any:
    from rlx_ort.ir.graph import Graph

    graph = Graph("sum")
    values = [graph.input(f"in{index}", [4]) for index in range(count)]
    graph.outputs = [values[0] + values[-1]]
    return graph


def _repeated(action: Callable[[], object], calls: int) -> Callable[[], None]:
    def block() -> None:
        for _ in range(calls):
            action()

    return block


def _opened(count: int) -> tuple[Any, onnxruntime.InferenceSession]:
    """Return a graph of so many inputs, compiled, and the same model in an `InferenceSession`."""
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
    return Session("cpu", CompileOptions(intra_op_threads=1)).compile(graph), engine
