"""CUDA: runs with and without recorded launches against `InferenceSession.run`, and a decode loop with and without.

Ten graphs from 4 floats to a 4-layer encoder, three launch-bound ones, and a loop whose cache stays on the device. All
ways of a graph take turns in blocks, in a new order each round; a ratio is the median over rounds of a block's median
over that of `InferenceSession.run`. Without a CUDA device there are no figures. A graph that fails is named with the
reason, and the others count.
"""

from __future__ import annotations

import functools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnxruntime

from figures.graphs import Maker
from figures.record import Figure
from rlx_ort.converters.to_onnx import to_onnx
from rlx_ort.execution.session import Session
from rlx_ort.ir.graph import Graph, Value
from rlx_ort.numerics import relative_error
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.providers.registry import is_available

SECONDS = 3.5  # a graph
BLOCK = 10
RUN_LIMIT, SLOTS_LIMIT, LAUNCH_BOUND_LIMIT, OTHERS_LIMIT, LOOP_LIMIT = 1.0, 0.95, 0.5, 1.02, 1.0
BASE = "InferenceSession.run"
_PLAIN, _RECORDED = "loop", "loop, auto"

Made = tuple[Graph, list[dict[str, Any]]]
Rows = dict[str, dict[str, Any]]


def measure() -> Iterator[Figure]:
    """Yield the figures, after a line for each graph on stderr."""
    if not is_available("cuda"):
        return
    rows, failed = Rows(), ""
    for name, make in (GRAPHS | LAUNCH_BOUND | LOOPS).items():
        try:
            rows[name] = (_measured_loop if name in LOOPS else _measured)(*make())
        except Exception as err:  # the other graphs are worth measuring
            failed += f"; {name} FAILED: {type(err).__name__}: {err}"
        print(f"  {name}: {json.dumps(rows.get(name, failed))}", file=sys.stderr, flush=True)
    ten = [name for name in GRAPHS if name in rows]
    for way, target in (("run", RUN_LIMIT), ("run_slots", SLOTS_LIMIT), ("run, auto", None), ("run_slots, auto", None)):
        ratios = {name: rows[name]["ratios"][way] for name in ten}
        worst = max(ratios, key=lambda name: ratios[name])
        detail = f"geometric mean of {len(ten)} graphs, most {ratios[worst]:.3f} ({worst}){failed}"
        yield Figure(f"cuda: {way} over {BASE}", statistics.geometric_mean(ratios.values()), "times", target, detail)
    most = max(ten, key=lambda name: rows[name]["ratios"]["run, auto"])
    ratio = rows[most]["ratios"]["run, auto"]
    yield Figure(f"cuda: run, auto over {BASE}, the worst graph", ratio, "times", OTHERS_LIMIT, most)
    for name in (name for name in LAUNCH_BOUND if name in rows):
        us, ratio = rows[name]["us"], rows[name]["ratios"]["run, auto"]
        detail = f"{us['run, auto']:.1f} us against {us[BASE]:.1f}"
        yield Figure(f"cuda: {name}, run, auto", ratio, "times", LAUNCH_BOUND_LIMIT, detail)
    for name in (name for name in LOOPS if name in rows):
        us, ratio = rows[name]["us"], rows[name]["ratios"][_RECORDED]
        detail = f"{us[_RECORDED]:.1f} us a step against {us[_PLAIN]:.1f}; {rows[name]['why_not'] or 'recorded'}"
        yield Figure(f"cuda: {name}, recorded over not recorded", ratio, "times", LOOP_LIMIT, detail)


def _measured(graph: Graph, inputs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return times and ratios of one graph, after every way has given the right results."""
    plain = Session("cuda", CompileOptions(device_graph=False)).compile(graph)
    auto = Session("cuda").compile(graph)
    options = [("CUDAExecutionProvider", {"use_tf32": "0"})]
    engine = onnxruntime.InferenceSession(to_onnx(graph).SerializeToString(), providers=options)
    names = [output.name for output in engine.get_outputs()]
    arrays = [list(each.values()) for each in inputs]
    ways: dict[str, Callable[[int], Any]] = {
        BASE: lambda i: engine.run(names, inputs[i]),
        "run": lambda i: plain.run(inputs[i]),
        "run_slots": lambda i: plain.run_slots(arrays[i]),
        "run, auto": lambda i: auto.run(inputs[i]),
        "run_slots, auto": lambda i: auto.run_slots(arrays[i]),
    }
    for _ in range(3):  # the third run of a signature is recorded
        for i in range(len(inputs)):
            wanted = engine.run(names, inputs[i])
            for name, way in ways.items():
                _check(name, way(i), wanted)
    return _timed(ways, len(inputs)) | _recorded(auto)


def _measured_loop(graph: Graph, inputs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the times of a step whose cache stays on the device, after both ways have given the same."""
    both = {
        _PLAIN: Session("cuda", CompileOptions(device_graph=False)).compile(graph),
        _RECORDED: Session("cuda").compile(graph),
    }
    cache = [name for name in inputs[0] if name != "x"]
    for compiled in both.values():
        for place, name in enumerate(cache, 1):
            compiled.bind_gpu_handle(name, inputs[0][name])
            compiled.set_gpu_handle_feed(name, place)
    given = [{"x": each["x"]} for each in inputs]

    def step(compiled: Any, index: int) -> Any:
        return compiled.run_read_outputs(given[index], [0])

    for number in range(12):
        wanted, got = (step(compiled, number % len(given)) for compiled in both.values())
        _check(_RECORDED, got, wanted)
    for name in cache:
        _check(name, *([compiled.read_gpu_handle(name)] for compiled in both.values()))
    ways = {name: functools.partial(step, compiled) for name, compiled in both.items()}
    return _timed(ways, len(given)) | _recorded(both[_RECORDED])


def _recorded(compiled: Any) -> dict[str, Any]:
    report = compiled.device_graph_report()
    return {"recorded": len(report.recorded), "why_not": report.reason or "; ".join(report.refused.values())}


def _timed(ways: Mapping[str, Callable[[int], Any]], count: int) -> dict[str, Any]:
    """Return medians in microseconds of ways that take turns, and the median over rounds of each over the first."""
    now, order, pick = time.perf_counter_ns, list(ways), random.Random(5)  # noqa: S311  # an order, no secret
    rounds: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        pick.shuffle(order)
        for name in order:
            way, took = ways[name], []
            way(0)
            for call in range(BLOCK):
                start = now()
                way(call % count)
                took.append(now() - start)
            rounds[name].append(statistics.median(took) / 1e3)
    base = next(iter(rounds.values()))
    return {
        "us": {name: round(statistics.median(took), 2) for name, took in rounds.items()},
        "ratios": {
            name: round(statistics.median(ours / theirs for ours, theirs in zip(took, base, strict=True)), 4)
            for name, took in rounds.items()
        },
    }


def _check(way: str, got: Any, wanted: Any) -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        if (error := relative_error(ours, theirs)) > 1e-4:
            raise AssertionError(f"{way} is wrong by {error:.1e}")


# --- graphs


def _made(build: Callable[..., list[Value]], *sizes: int, **shapes: tuple[int, ...]) -> Made:
    """Return a graph over inputs of fixed shapes, and three sets of inputs."""
    make, draw = Maker("g"), np.random.default_rng(0)
    values = [make.graph.input(name, list(shape)) for name, shape in shapes.items()]
    make.graph.outputs = build(make, *values, *sizes)
    feeds = [{name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()} for _ in range(3)]
    return make.graph, feeds


def _chain(make: Maker, x: Value, width: int, count: int) -> list[Value]:
    for _ in range(count):
        x = x @ make.weight(width, width)
    return [x]


def _mlp(make: Maker, x: Value, width: int, count: int) -> list[Value]:
    for _ in range(count):
        x = make.graph.relu(make.dense(x, width, width))
    return [x]


def _convolutions(make: Maker, x: Value) -> list[Value]:
    for _ in range(3):
        x = make.graph.relu(make.graph.conv2d(x, make.weight(8, 8, 3, 3)))
    return [x]


def _encoder(tokens: int, width: int, heads: int, layers: int) -> Made:
    return _made(lambda make, x: [make.encoder(x, width, heads, layers)], x=(1, tokens, width))


def _decode(width: int, heads: int, layers: int, past: int, *, whole: bool = False) -> Made:
    """Return a step of a decoder over a cache; its new rows are outputs, or the whole cache without its oldest rows."""
    size = width // heads

    def build(make: Maker, x: Value, *cache: Value) -> list[Value]:
        g, rows = make.graph, []
        for keys, values in zip(cache[::2], cache[1::2], strict=True):
            q, k, v = (
                g.transpose(g.reshape(make.dense(x, width, width), [1, 1, heads, size]), [0, 2, 1, 3]) for _ in range(3)
            )
            keys, values = g.concat([keys, k], 2), g.concat([values, v], 2)
            scores = g.softmax(q @ g.transpose(keys, [0, 1, 3, 2]) * size**-0.5)
            mixed = g.reshape(g.transpose(scores @ values, [0, 2, 1, 3]), [1, 1, width])
            x = make.norm(x + make.dense(mixed, width, width), width)
            x = make.norm(x + make.dense(g.silu(make.dense(x, width, 4 * width)), 4 * width, width), width)
            rows += [g.narrow(each, 2, 1, past) for each in (keys, values)] if whole else [k, v]
        return [x, *rows]

    caches = {f"{kind}{layer}": (1, heads, past, size) for layer in range(layers) for kind in "kv"}
    return _made(build, x=(1, 1, width), **caches)


GRAPHS: dict[str, Callable[[], Made]] = {
    "add of 4 floats": lambda: _made(lambda _, a, b: [a + b], a=(4,), b=(4,)),
    "3 products of 96": lambda: _made(_chain, 96, 3, x=(1, 96)),
    "softmax and sum, 64 x 512": lambda: _made(lambda make, x: [make.graph.softmax(x), x.sum([1])], x=(64, 512)),
    "elementwise, 4 MB": lambda: _made(lambda make, x: [make.graph.tanh(x) * x], x=(1 << 20,)),
    "3 convolutions, 64 x 64": lambda: _made(_convolutions, x=(1, 8, 64, 64)),
    "2-layer perceptron, 32 x 256": lambda: _made(_mlp, 256, 2, x=(32, 256)),
    "4-layer perceptron, 256 x 1024": lambda: _made(_mlp, 1024, 4, x=(256, 1024)),
    "product, 512 x 2048": lambda: _made(_chain, 2048, 1, x=(512, 2048)),
    "1-layer encoder, 64 x 256": lambda: _encoder(64, 256, 4, 1),
    "4-layer encoder, 128 x 512": lambda: _encoder(128, 512, 8, 4),
}
LAUNCH_BOUND: dict[str, Callable[[], Made]] = {
    "8 products of 768": lambda: _made(_chain, 768, 8, x=(1, 768)),
    "3-layer encoder of width 192": lambda: _encoder(32, 192, 3, 3),
    "decode step, 4 layers of 192": lambda: _decode(192, 3, 4, 32),
}
LOOPS: dict[str, Callable[[], Made]] = {
    f"decode loop over handles, 4 layers of {width}": functools.partial(_decode, width, heads, 4, past, whole=True)
    for width, heads, past in ((192, 3, 32), (512, 8, 512))
}
