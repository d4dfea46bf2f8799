"""CUDA: runs with and without recorded launches against `InferenceSession.run`, and a decode loop with and without.

Ten graphs from 4 floats to a 4-layer encoder, three launch-bound ones, and a loop whose cache stays on the device.

    python scripts/bench.py cuda
    python scripts/figures/cuda_figures.py --out FOLDER    the same, with every ratio in FOLDER/cuda_figures.json

All ways of a graph take turns in blocks, in a new order each round; a ratio is the median over rounds of a block's
median over that of `InferenceSession.run`. Without a CUDA device there are no figures. A graph that fails is named with
the reason, and the others count.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from figures.record import Figure, machine, scaled

__all__ = ["measure"]

SECONDS = 3.5  # a graph
BLOCK = 10
RUN_LIMIT, SLOTS_LIMIT, LAUNCH_BOUND_LIMIT, OTHERS_LIMIT, LOOP_LIMIT = 1.0, 0.95, 0.5, 1.02, 1.0
BASE = "InferenceSession.run"
_PLAIN, _RECORDED = "loop", "loop, auto"
RNG = np.random.default_rng(0)

Inputs = dict[str, Any]


def measure() -> Iterator[Figure]:
    """Yield the figures; see `results` for what they are made from."""
    yield from figures_of(results())


def results() -> dict[str, dict[str, Any]]:
    """Return what was measured, graph by graph, or what failed; empty without a CUDA device."""
    from rlx_ort.device import Device
    from rlx_ort.providers.registry import default_registry

    if not default_registry().availability(Device.CUDA).available:
        return {}
    found = {}
    for name, make in (GRAPHS | LAUNCH_BOUND).items():
        try:
            found[name] = _measured(*make())
        except Exception as err:  # the other graphs are worth measuring
            found[name] = {"failed": f"{type(err).__name__}: {err}"}
        print(f"  {name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    for name, make in LOOPS.items():
        try:
            found[name] = _measured_loop(*make())
        except Exception as err:  # the rest counts
            found[name] = {"failed": f"{type(err).__name__}: {err}"}
        print(f"  {name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    return found


def figures_of(found: dict[str, dict[str, Any]]) -> Iterator[Figure]:
    """Yield the figures that measurements add up to."""
    ok = {name: row for name, row in found.items() if "failed" not in row}
    ten = [name for name in GRAPHS if name in ok]
    missing = "".join(f"; {name} FAILED: {found[name]['failed']}" for name in found if name not in ok)
    if not ten:
        return
    for way, target in (("run", RUN_LIMIT), ("run_slots", SLOTS_LIMIT), ("run, auto", None), ("run_slots, auto", None)):
        ratios = {name: ok[name]["ratios"][way] for name in ten}
        mean = statistics.geometric_mean(ratios.values())
        worst = max(ratios, key=lambda name: ratios[name])
        detail = f"geometric mean of {len(ten)} graphs, most {ratios[worst]:.3f} ({worst}){missing}"
        yield Figure(f"cuda: {way} over {BASE}", mean, "times", target, detail)
    most = max(ten, key=lambda name: ok[name]["ratios"]["run, auto"])
    ratio = ok[most]["ratios"]["run, auto"]
    yield Figure(f"cuda: run, auto over {BASE}, the worst graph", ratio, "times", OTHERS_LIMIT, most)
    for name in (name for name in LAUNCH_BOUND if name in ok):
        row = ok[name]
        detail = f"{row['us']['run, auto']:.1f} us against {row['us'][BASE]:.1f}; the bare replay {row['replay_us']} us"
        yield Figure(f"cuda: {name}, run, auto", row["ratios"]["run, auto"], "times", LAUNCH_BOUND_LIMIT, detail)
    for name in (name for name in LOOPS if name in ok):
        row = ok[name]
        detail = f"{row['us'][_RECORDED]:.1f} us a step against {row['us'][_PLAIN]:.1f}; {row['why_not'] or 'recorded'}"
        yield Figure(f"cuda: {name}, recorded over not recorded", row["ratio"], "times", LOOP_LIMIT, detail)
    memory = [row["memory_bytes"] for row in ok.values() if row.get("memory_bytes") is not None]
    if memory:
        detail = f"median {statistics.median(memory) / 1024:.0f} KB; buffers not shared with others"
        yield Figure("cuda: GPU memory of one recording, at most", max(memory) / 1024, "KB", None, detail)


def _measured(graph: Any, inputs: list[Inputs]) -> dict[str, Any]:
    """Return times, ratios and memory of one graph, after every way has given the right results."""
    import onnxruntime

    from rlx_ort.converters.to_onnx import to_onnx
    from rlx_ort.execution.session import Session
    from rlx_ort.options.compile_options import CompileOptions

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
    for _ in range(3):
        for i in range(len(inputs)):
            wanted = engine.run(names, inputs[i])
            for name, way in ways.items():
                _check(name, way(i), wanted)
    report = auto.device_graph_report()
    replay_us, memory, bare_why = _bare(graph, inputs[0])
    rounds = _timed(ways, len(inputs))
    base = rounds[BASE]
    return {
        "us": {name: round(statistics.median(took), 2) for name, took in rounds.items()},
        "ratios": {
            name: round(statistics.median(ours / theirs for ours, theirs in zip(took, base, strict=True)), 4)
            for name, took in rounds.items()
        },
        "recorded": len(report.recorded),
        "why_not": report.reason or "; ".join(report.refused.values()),
        "replay_us": replay_us,
        "memory_bytes": memory,
        "bare_why_not": bare_why,
        "buffers_bytes": sum(one.nbytes for one in report.recorded),
    }


def _measured_loop(graph: Any, inputs: list[Inputs]) -> dict[str, Any]:
    """Return the times of a step whose cache stays on the device, after both ways have given the same."""
    from rlx_ort.execution.session import Session
    from rlx_ort.options.compile_options import CompileOptions

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
    for step in range(12):
        wanted, found = (compiled.run_read_outputs(given[step % len(given)], [0]) for compiled in both.values())
        _check(_RECORDED, found, wanted)
    for name in cache:
        _check(name, *([compiled.read_gpu_handle(name)] for compiled in both.values()))
    report = both[_RECORDED].device_graph_report()
    ways = {name: functools.partial(_step, compiled, given) for name, compiled in both.items()}
    rounds = _timed(ways, len(given))
    return {
        "us": {name: round(statistics.median(took), 2) for name, took in rounds.items()},
        "ratio": round(statistics.median(a / b for a, b in zip(rounds[_RECORDED], rounds[_PLAIN], strict=True)), 4),
        "recorded": len(report.recorded),
        "why_not": report.reason or "; ".join(report.refused.values()),
    }


def _step(compiled: Any, given: list[Inputs], index: int) -> Any:
    return compiled.run_read_outputs(given[index], [0])


def _timed(ways: dict[str, Callable[[int], Any]], count: int) -> dict[str, list[float]]:
    """Return the median of each block in microseconds, round by round, of ways that take turns."""
    now, order, pick = time.perf_counter_ns, list(ways), random.Random(5)  # noqa: S311  # an order, no secret
    found: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + SECONDS * scaled(100) / 100
    while time.perf_counter() < end:
        pick.shuffle(order)
        for name in order:
            way, took = ways[name], []
            way(0)
            for call in range(BLOCK):
                start = now()
                way(call % count)
                took.append(now() - start)
            found[name].append(statistics.median(took) / 1e3)
    return found


def _bare(graph: Any, inputs: Inputs) -> tuple[float | None, int | None, str]:
    """Return the microseconds of a bare replay, the GPU memory that one more recording takes, or why there is none."""
    from rlx_ort.errors import EngineError
    from rlx_ort.execution.session import Session
    from rlx_ort.options.compile_options import CompileOptions
    from rlx_ort.providers.engine.cuda_driver import free_bytes

    with Session("cuda", CompileOptions(device_graph=True)).compile(graph) as compiled:
        try:
            for _ in range(3):  # the third run of a signature is recorded
                compiled.run(inputs)
            engine: Any = compiled._slot.current
            play = next(iter(engine.session.open_core().recordings._recorded.values()))._play
            before = free_bytes(0)
            for _ in range(4):  # slots have a recording of their own; the first run by them binds them
                compiled.run_slots(list(inputs.values()))
            memory = before - free_bytes(0)
        except EngineError as err:
            return None, None, str(err)
        times = []
        for _ in range(200):
            start = time.perf_counter_ns()
            play()
            times.append(time.perf_counter_ns() - start)
        return round(statistics.median(times) / 1e3, 2), memory, ""


def _check(way: str, found: Any, wanted: Any) -> None:
    for got, want in zip(found, wanted, strict=True):
        scale = max(float(np.abs(want).max()), 1e-30)
        error = float(np.abs(got - want).max()) / scale
        if not error <= 1e-4:
            raise AssertionError(f"{way} is wrong by {error:.1e}")


# --- graphs


def _weight(g: Any, *shape: int) -> Any:
    data = (RNG.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)
    return g.param(f"w{len(g.params)}", list(shape), data=data)


def _feeds(**shapes: tuple[int, ...]) -> list[Inputs]:
    return [{name: RNG.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()} for _ in range(3)]


def _graph(**shapes: tuple[int, ...]) -> tuple[Any, list[Any], list[Inputs]]:
    from rlx_ort.ir.graph import Graph

    g = Graph("g")
    return g, [g.input(name, list(shape)) for name, shape in shapes.items()], _feeds(**shapes)


def _add() -> tuple[Any, list[Inputs]]:
    g, (a, b), feeds = _graph(a=(4,), b=(4,))
    g.outputs = [a + b]
    return g, feeds


def _chain(rows: int, width: int, count: int) -> tuple[Any, list[Inputs]]:
    g, (x,), feeds = _graph(x=(rows, width))
    for _ in range(count):
        x = x @ _weight(g, width, width)
    g.outputs = [x]
    return g, feeds


def _mlp(rows: int, width: int, count: int) -> tuple[Any, list[Inputs]]:
    g, (x,), feeds = _graph(x=(rows, width))
    for _ in range(count):
        x = g.relu(x @ _weight(g, width, width) + _weight(g, width))
    g.outputs = [x]
    return g, feeds


def _softmax(rows: int, width: int) -> tuple[Any, list[Inputs]]:
    g, (x,), feeds = _graph(x=(rows, width))
    g.outputs = [g.softmax(x), x.sum([1])]
    return g, feeds


def _elementwise(count: int) -> tuple[Any, list[Inputs]]:
    g, (x,), feeds = _graph(x=(count,))
    g.outputs = [g.tanh(x) * x]
    return g, feeds


def _convolutions(side: int) -> tuple[Any, list[Inputs]]:
    g, (x,), feeds = _graph(x=(1, 8, side, side))
    for _ in range(3):
        x = g.relu(g.conv2d(x, _weight(g, 8, 8, 3, 3)))
    g.outputs = [x]
    return g, feeds


def _linear(g: Any, x: Any, rows: int, columns: int) -> Any:
    return x @ _weight(g, rows, columns) + _weight(g, columns)


def _norm(g: Any, x: Any, width: int) -> Any:
    return g.layer_norm(x, _weight(g, width), _weight(g, width))


def _encoder(tokens: int, width: int, heads: int, layers: int) -> tuple[Any, list[Inputs]]:
    g, (x,), feeds = _graph(x=(1, tokens, width))
    for _ in range(layers):
        q, k, v = (_linear(g, x, width, width) for _ in range(3))
        mixed = g.attention_kind(q, k, v, heads, width // heads, "none")
        x = _norm(g, x + _linear(g, mixed, width, width), width)
        x = _norm(g, x + _linear(g, g.gelu(_linear(g, x, width, 4 * width)), 4 * width, width), width)
    g.outputs = [x]
    return g, feeds


def _decode(width: int, heads: int, layers: int, past: int, *, whole: bool = False) -> tuple[Any, list[Inputs]]:
    """Return a step of a decoder over a cache; its new rows are outputs, or the whole cache without its oldest rows."""
    size = width // heads
    caches = {f"{kind}{layer}": (1, heads, past, size) for layer in range(layers) for kind in "kv"}
    g, (x, *cache), feeds = _graph(x=(1, 1, width), **caches)
    rows = []
    for keys, values in zip(cache[::2], cache[1::2], strict=True):
        q, k, v = (
            g.transpose(g.reshape(_linear(g, x, width, width), [1, 1, heads, size]), [0, 2, 1, 3]) for _ in range(3)
        )
        keys, values = g.concat([keys, k], 2), g.concat([values, v], 2)
        scores = g.softmax(q @ g.transpose(keys, [0, 1, 3, 2]) * size**-0.5)
        mixed = g.reshape(g.transpose(scores @ values, [0, 2, 1, 3]), [1, 1, width])
        x = _norm(g, x + _linear(g, mixed, width, width), width)
        x = _norm(g, x + _linear(g, g.silu(_linear(g, x, width, 4 * width)), 4 * width, width), width)
        rows += [g.narrow(each, 2, 1, past) for each in (keys, values)] if whole else [k, v]
    g.outputs = [x, *rows]
    return g, feeds


GRAPHS: dict[str, Callable[[], tuple[Any, list[Inputs]]]] = {
    "add of 4 floats": _add,
    "3 products of 96": lambda: _chain(1, 96, 3),
    "softmax and sum, 64 x 512": lambda: _softmax(64, 512),
    "elementwise, 4 MB": lambda: _elementwise(1 << 20),
    "3 convolutions, 64 x 64": lambda: _convolutions(64),
    "2-layer perceptron, 32 x 256": lambda: _mlp(32, 256, 2),
    "4-layer perceptron, 256 x 1024": lambda: _mlp(256, 1024, 4),
    "product, 512 x 2048": lambda: _chain(512, 2048, 1),
    "1-layer encoder, 64 x 256": lambda: _encoder(64, 256, 4, 1),
    "4-layer encoder, 128 x 512": lambda: _encoder(128, 512, 8, 4),
}
LAUNCH_BOUND: dict[str, Callable[[], tuple[Any, list[Inputs]]]] = {
    "8 products of 768": lambda: _chain(1, 768, 8),
    "3-layer encoder of width 192": lambda: _encoder(32, 192, 3, 3),
    "decode step, 4 layers of 192": lambda: _decode(192, 3, 4, 32),
}
LOOPS: dict[str, Callable[[], tuple[Any, list[Inputs]]]] = {
    "decode loop over handles, 4 layers of 192": lambda: _decode(192, 3, 4, 32, whole=True),
    "decode loop over handles, 4 layers of 512": lambda: _decode(512, 8, 4, 512, whole=True),
}


def main() -> int:
    """Measure, print the figures, write the JSON, and return 1 when a target is missed or a graph fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for cuda_figures.json")
    out = parser.parse_args().out
    found = results()
    figures = list(figures_of(found))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        rows = [asdict(figure) | {"ok": figure.ok} for figure in figures]
        text = json.dumps({"machine": machine(), "graphs": found, "figures": rows}, indent=1)
        (out / "cuda_figures.json").write_text(text, encoding="utf-8")
    for figure in figures:
        target = "" if figure.target is None else f" (target {figure.target:g})"
        print(f"{figure.figure}: {figure.value:.4g} {figure.unit}{target}  {figure.detail}")
    if not found:
        print("no CUDA device works here; rlx-ort doctor names what is missing")
    for name, row in found.items():
        if "failed" in row:
            print(f"{name} FAILED: {row['failed']}")
    return int(any(figure.ok is False for figure in figures) or any("failed" in row for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
