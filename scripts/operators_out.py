"""How well operators that the table of kernels lacks are predicted, before and after measuring them on demand.

    python scripts/operators_out.py --out results [--devices cpu,cuda,webgpu] [--quick] [--minutes 3]

Calibrates the devices into a folder of its own, takes every row of the operators below out of the profiles, and for
each operator and device: predicts a graph of four such nodes, measures what is unknown as the adaptive pick does,
predicts again, and runs the graph. Writes operators-out.json and prints the errors and what measuring took.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlx_ort.device import Device, parse_device_list
from rlx_ort.errors import RlxError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph, Value
from rlx_ort.ir.types import Shape, TensorType

UNARY = [
    "Abs",
    "Acos",
    "Acosh",
    "Asin",
    "Asinh",
    "Atan",
    "Ceil",
    "Celu",
    "Cos",
    "Elu",
    "Erf",
    "Exp",
    "Floor",
    "Gelu",
    "HardSigmoid",
    "HardSwish",
    "LeakyRelu",
    "Log",
    "Mish",
    "Neg",
    "Reciprocal",
    "Relu",
    "Selu",
    "Sigmoid",
    "Sin",
    "Softplus",
    "Softsign",
    "Sqrt",
]
REDUCTIONS = [
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSum",
    "ReduceSumSquare",
]
_COPIES = 4
_RUN_S = 0.04


class Case(NamedTuple):
    """A graph of some nodes of one operator, with its inputs."""

    name: str
    op_type: str
    graph: Graph
    inputs: dict[str, Any]


def cases() -> Iterator[Case]:
    """Yield the graphs."""
    for at, name in enumerate(UNARY):
        shape = [(37, 700), (300, 1100), (1500, 900)][at % 3]
        yield _case(name, shape, _node(name, shape))
    for at, name in enumerate(REDUCTIONS):
        rows, columns = shape = [(90, 1300), (1200, 700)][at % 2]
        yield _case(f"{name} last", shape, _reduced(name, 1, (rows, 1)))
        yield _case(f"{name} first", shape, _reduced(name, 0, (1, columns)))
    yield _case(
        "TopK", (60, 3000), _with("TopK", [np.array([7])], {"axis": 1}, [(60, 7), (60, 7)], [DType.F32, DType.I64])
    )
    yield _case("CumSum", (200, 900), _with("CumSum", [np.array(1)], {}, [(200, 900)]))
    sizes = np.array([2, 12, 90, 110])
    resize = {"mode": b"linear", "coordinate_transformation_mode": b"half_pixel"}
    yield _case("Resize", (2, 12, 45, 55), _with("Resize", [None, None, sizes], resize, [(2, 12, 90, 110)]))
    grid = np.random.default_rng(3).uniform(-1, 1, (2, 40, 50, 2)).astype(np.float32)
    yield _case("GridSample", (2, 6, 50, 60), _with("GridSample", [grid], {"mode": b"linear"}, [(2, 6, 40, 50)]))
    yield _case("LSTM", (20, 3, 90), _recurrent("LSTM", 4, 20, 3, 90))
    yield _case("GRU", (20, 3, 90), _recurrent("GRU", 3, 20, 3, 90))
    other = np.random.default_rng(4).standard_normal((6, 70, 50)).astype(np.float32)
    yield _case("Einsum", (6, 40, 70), _with("Einsum", [other], {"equation": b"bij,bjk->bik"}, [(6, 40, 50)]))
    index, updates = np.arange(0, 400, 4).reshape(-1, 1), np.zeros((100, 300), np.float32)
    yield _case("ScatterND", (400, 300), _with("ScatterND", [index, updates], {}, [(400, 300)]))
    yield _case("Pad", (3, 16, 60, 70), _with("Pad", [np.array([0, 0, 2, 3, 0, 0, 2, 3])], {}, [(3, 16, 64, 76)]))


LEFT_OUT = frozenset({*UNARY, *REDUCTIONS, "ReduceRows", "TopK", "LSTM", "Pad"})
"""Rows that are taken out of the profiles; the other operators have none, or share none with these."""


def main() -> int:
    """Predict, measure, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("--quick", action="store_true", help="calibrate in the short form")
    parser.add_argument("--minutes", type=float, default=5.0, help="stop starting cases after this time")
    parser.add_argument("--only", default="", help="only cases whose name has this in it")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    devices = parse_device_list(chosen.devices)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RLX_CACHE_DIR"] = folder
        _calibrate(devices, quick=chosen.quick)
        started, rows = time.monotonic(), []
        for case in cases():
            if chosen.only in case.name and time.monotonic() - started < 60 * chosen.minutes:
                rows += [_row(case, device) for device in devices]
                print(json.dumps(rows[-len(devices) :]), flush=True)
    (chosen.out / "operators-out.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    for device in devices:
        _show(device, [row for row in rows if row["device"] == device.label])
    return 0


def _calibrate(devices: Sequence[Device], *, quick: bool) -> None:
    from rlx_ort.calibration import store
    from rlx_ort.calibration.calibrate import calibrate_together
    from rlx_ort.calibration.profile import CalibrationProfile

    for device, profile in calibrate_together(devices, quick=quick).items():
        if not isinstance(profile, CalibrationProfile):
            raise profile
        rows = tuple(row for row in profile.rows if row.kernel not in LEFT_OUT)
        store.keep(device, dataclasses.replace(profile, rows=rows))


def _row(case: Case, device: Device) -> dict[str, Any]:
    from rlx_ort.execution.session import Session
    from rlx_ort.selection.predict import explain, measure_unknown

    row: dict[str, Any] = {"case": case.name, "device": device.label}
    try:
        before = explain(case.graph, device)
        start = time.perf_counter()
        row["kept"] = measure_unknown(case.graph, device)
        row["measuring_s"] = round(time.perf_counter() - start, 3)
        after = explain(case.graph, device)
        with Session(device).compile(case.graph) as compiled:
            ns = _lower_quartile(lambda: compiled.run(case.inputs))
    except RlxError as err:
        return row | {"skipped": str(err).splitlines()[0][:160]}
    if before is None or after is None:
        return row | {"skipped": "no prediction"}
    found = {"us": ns / 1e3, "before": before.total_ns / ns, "after": after.total_ns / ns}
    return row | {name: round(number, 3) for name, number in found.items()} | {"error": round(after.error, 2)}


def _lower_quartile(run: Callable[[], object]) -> float:
    for _ in range(8):  # also lets the launches be recorded
        run()
    times: list[int] = []
    begun = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begun < _RUN_S and len(times) < 2000):
        start = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - start)
    return float(sorted(times)[len(times) // 4])


def _show(device: Device, rows: Sequence[dict[str, Any]]) -> None:
    done = [row for row in rows if "after" in row]
    if not done:
        print(f"{device.label}: nothing was measured")
        return
    lines = []
    for key in ("before", "after"):
        errors = sorted(abs(row[key] - 1) for row in done)
        lines.append(f"{key} {statistics.median(errors):.0%} / {errors[int(0.9 * (len(errors) - 1))]:.0%}")
    spent = [row["measuring_s"] for row in done]
    taken = f"measuring {statistics.median(spent):.2f} s a graph, at most {max(spent):.2f}"
    print(f"{device.label}: {len(done)} of {len(rows)} operators; error, median / 90th: {', '.join(lines)}; {taken}")


# --- graphs

_Add = Callable[[Graph, Value], list[Value]]


def _case(name: str, shape: tuple[int, ...], add: _Add) -> Case:
    """Return a graph of copies of a node, each of which reads the input times a number of its own."""
    graph = Graph(name)
    x = graph.input("x", list(shape))
    graph.outputs = [value for at in range(_COPIES) for value in add(graph, x * (1.0 - 0.01 * at))[:1]]
    data = np.random.default_rng(2).uniform(0.1, 0.9, shape).astype(np.float32)
    return Case(name, name.partition(" ")[0], graph, {"x": data})


def _node(op_type: str, shape: tuple[int, ...]) -> _Add:
    def add(graph: Graph, x: Value) -> list[Value]:
        data = x + 1.0 if op_type == "Acosh" else x
        return list(graph.onnx_node(op_type, [data], types=[_f32(shape)], version=21))

    return add


def _reduced(op_type: str, axis: int, shape: tuple[int, ...]) -> _Add:
    return _with(op_type, [np.array([axis])], {"keepdims": 1}, [shape])


def _with(
    op_type: str,
    more: Sequence[Any],
    attributes: dict[str, Any],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[DType] = (),
) -> _Add:
    """Return what adds a node with constant inputs behind the first one."""
    kinds = [TensorType(dtype, Shape(shape)) for shape, dtype in zip(shapes, dtypes or [DType.F32], strict=True)]

    def add(graph: Graph, x: Value) -> list[Value]:
        constants = [None if array is None else graph.constant(array) for array in more]
        return list(graph.onnx_node(op_type, [x, *constants], attributes, types=kinds, version=21))

    return add


def _recurrent(op_type: str, gates: int, steps: int, batch: int, hidden: int) -> _Add:
    random = np.random.default_rng(5)
    weights = [random.standard_normal((1, gates * hidden, hidden)).astype(np.float32) * 0.1 for _ in range(2)]
    return _with(op_type, weights, {"hidden_size": hidden}, [(steps, 1, batch, hidden)])


def _f32(shape: tuple[int, ...]) -> TensorType:
    return TensorType(DType.F32, Shape(shape))


if __name__ == "__main__":
    raise SystemExit(main())
