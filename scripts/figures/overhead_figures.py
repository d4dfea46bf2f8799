"""The costs of importing the package, of starting the command, and of a call beside the arithmetic of a small graph.

Calls are compared with `InferenceSession.run` on the same model: whatever way a runner is asked for a run, with
resilience and without.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import onnxruntime

from figures.record import Figure, in_turns, process_seconds, turns_of
from rlx_ort.converters.to_onnx import to_onnx
from rlx_ort.execution.session import Session
from rlx_ort.graph_devices import GraphDevices
from rlx_ort.ir.graph import Graph
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.resilience.options import Resilience
from rlx_ort.selection.policy import DevicePolicy

STARTS = 15
COMMANDS = (("-c", "import numpy"), ("-c", "import numpy, rlx_ort"), ("-m", "rlx_ort.cli", "--help"))
BLOCKS, RUNS, CALLS = 21, 3, 1000
RUN_LIMITS = {2: 0.95, 100: 0.6, 1000: 0.15}
SLOTS_LIMIT = 0.55
RUNNER_LIMIT = 0.95
ONE_THREAD = CompileOptions(intra_op_threads=1)
WAYS: dict[str, Callable[[GraphDevices, dict[str, Any]], object]] = {
    "run_fastest": lambda runner, inputs: runner.run_fastest(inputs),
    "run_resolved": lambda runner, inputs: runner.run_resolved(inputs),
    "runner(x=...)": lambda runner, inputs: runner(**inputs),
    "run(device)": lambda runner, inputs: runner.run("cpu", inputs),
    "run_chosen": lambda runner, inputs: runner.run_chosen(inputs)[1],
}


def measure() -> Iterator[Figure]:
    """Yield the import over numpy's own, `--help`, and the ways to run for 2, 100 and 1000 inputs of 4 floats."""
    numpy, package, shown = in_turns(*(partial(process_seconds, *command) for command in COMMANDS), rounds=STARTS)
    over = statistics.median(after - before for before, after in zip(numpy, package, strict=True))
    detail = f"numpy alone {statistics.median(numpy) * 1e3:.0f} ms"
    yield Figure("import rlx_ort, over numpy", over * 1e3, "ms", 60, detail)
    yield Figure("rlx-ort --help", statistics.median(shown), "s", 0.3)
    for count, limit in RUN_LIMITS.items():
        graph, inputs, plain = _opened(count)
        compiled = Session("cpu", ONE_THREAD).compile(graph)
        arrays = list(inputs.values())
        title = "4-float Add on cpu" if count == 2 else f"{count} inputs on cpu"
        calls = max(1, 2 * CALLS // count)
        yield _over(f"{title}, run", lambda: compiled.run(inputs), plain, limit, calls)  # noqa: B023  # used at once
        slots_limit = SLOTS_LIMIT if count == 2 else None
        yield _over(f"{title}, run_slots", lambda: compiled.run_slots(arrays), plain, slots_limit, calls)  # noqa: B023
    graph, inputs, plain = _opened(2)
    policy = DevicePolicy(allow=("cpu",))
    for kind, resilience in (("plain", None), ("resilient", Resilience())):
        runner = GraphDevices(graph, policy=policy, options=ONE_THREAD, resilience=resilience)
        for name, way in WAYS.items():
            title = f"4-float Add on cpu, {kind} {name}"
            yield _over(title, lambda: way(runner, inputs), plain, RUNNER_LIMIT, CALLS)  # noqa: B023


def _over(title: str, action: Callable[[], Any], plain: Callable[[], Any], target: float | None, calls: int) -> Figure:
    np.testing.assert_array_equal(action()[0], plain()[0])
    turns = turns_of(_repeated(action, calls), _repeated(plain, calls), BLOCKS, RUNS)
    detail = f"{turns.first / calls * 1e6:.2f} us against {turns.second / calls * 1e6:.2f} us"
    return Figure(f"{title} over InferenceSession.run", turns.ratio, "times", target, detail)


def _repeated(action: Callable[[], object], calls: int) -> Callable[[], None]:
    def block() -> None:
        for _ in range(calls):
            action()

    return block


def _opened(count: int) -> tuple[Graph, dict[str, Any], Callable[[], Any]]:
    """Return a graph of so many inputs, its inputs, and a run of the same model in an `InferenceSession`."""
    graph = Graph("overhead")
    values = [graph.input(f"in{index}", [4]) for index in range(count)]
    graph.outputs = [values[0] + values[1]] if count == 2 else [graph.concat(values, 0)]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    model = to_onnx(graph).SerializeToString()
    engine = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    inputs = {f"in{index}": np.full(4, index, np.float32) for index in range(count)}
    return graph, inputs, lambda: engine.run(None, inputs)
