"""Inputs are read in every run, whichever memory the provider reads them from."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx_ort import CompiledGraph, CompileOptions, Device, DType, Graph, PlacementRule, Session
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.providers.engine.session import OrtEngineSession

X = np.arange(8, dtype=np.float32).reshape(2, 4)


def _reshaped() -> Graph:
    """Return `reshape(x + x, sizes)`, whose sizes a device with its own memory reads on the host."""
    graph = Graph("reshaped")
    x, sizes = graph.input("x", ["n", 4]), graph.input("sizes", [2], "i64")
    kind = TensorType(DType.F32, Shape(["rows", "columns"]))
    graph.outputs = list(graph.onnx_node("Reshape", [x + x, sizes], types=[kind], name="reshape"))
    return graph


def _ways(compiled: CompiledGraph) -> dict[str, Callable[[dict[str, Any]], list[Any]]]:
    """Return the ways to run that keep inputs bound."""

    def step(inputs: dict[str, Any]) -> list[Any]:
        if not compiled.has_gpu_handle("x"):
            compiled.bind_gpu_handle("x", X)
        return compiled.run({"sizes": inputs["sizes"]})

    return {
        "run_slots": lambda inputs: compiled.run_slots(list(inputs.values())),
        "run_raw": compiled.run_raw,
        "handles": step,
    }


@pytest.mark.parametrize("way", ["run_slots", "run_raw", "handles"])
def test_an_input_that_the_host_reads_is_not_stale(device: Device, way: str) -> None:
    """A bound shape that changes from run to run counts in each of them."""
    compiled = Session(device, CompileOptions(placement=PlacementRule.ASSISTED)).compile(_reshaped())
    run = _ways(compiled)[way]
    for sizes in ((2, 4), (4, 2), (8, 1), (1, 8), (2, 4)):
        found = run({"x": X, "sizes": np.array(sizes, np.int64)})[0]
        np.testing.assert_array_equal(found, (X * 2).reshape(sizes))


class _Info:
    """The memory info of an input, as ONNX Runtime has it with the OpenVINO plugin."""

    name = "OpenVINO_shared_CPU"


class _CopyingBinding:
    """An IOBinding that copies what is bound, as ONNX Runtime does for inputs that are not in plain host memory."""

    def __init__(self, io: Any, engine: Any) -> None:
        self._io = io
        self._engine = engine
        self._kept: list[Any] = []

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        """Bind a copy of a value."""
        self._kept.append(value.numpy().copy())
        self._io.bind_ortvalue_input(name, self._engine.OrtValue.ortvalue_from_numpy(self._kept[-1]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._io, name)


@pytest.mark.parametrize("way", ["run_slots", "run_raw", "handles"])
def test_inputs_are_bound_again_where_binding_copies_them(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """On a provider with input memory of its own behind a recipe of host memory, no run sees an older input."""
    compiled = Session("cpu").compile(_reshaped())
    session = compiled._slot.engine(compiled.rule).session
    assert isinstance(session, OrtEngineSession)
    bind = session.raw.io_binding
    monkeypatch.setattr(session.raw, "io_binding", lambda: _CopyingBinding(bind(), session.engine))
    monkeypatch.setattr(session.raw, "get_input_memory_infos", lambda: [_Info(), _Info()])
    run = _ways(compiled)[way]
    for sizes in ((2, 4), (4, 2), (8, 1)):
        np.testing.assert_array_equal(run({"x": X, "sizes": np.array(sizes)})[0], (X * 2).reshape(sizes))


def test_slots_take_arrays_in_any_order_of_memory(device: Device) -> None:
    """A transposed array is read by its indices, by bound buffers too."""
    graph = Graph("double")
    x = graph.input("x", [4, 4])
    graph.outputs = [x + x]
    compiled = Session(device).compile(graph)
    square = np.arange(16, dtype=np.float32).reshape(4, 4)
    for array in (square, square.T, square):
        np.testing.assert_array_equal(compiled.run_slots([array])[0], array * 2)


def _handing_on() -> Graph:
    """Return a graph whose outputs are its input, a weight and their sum."""
    graph = Graph("handing on")
    x, weight = graph.input("x", ["rows", 4]), graph.param("w", [4], "f32", X[1])
    graph.outputs = [x, weight, x + weight]
    return graph


@pytest.mark.parametrize("way", ["run", "run_slots", "run_raw", "run_dlpack", "handles"])
def test_an_output_that_is_an_input_or_a_weight_has_memory_of_its_own(device: Device, way: str) -> None:
    """Each run returns its own input, which later writes to the array and the end of the session leave alone."""
    rows = 500  # above what is small enough to be copied anyway

    def stepped(compiled: CompiledGraph, array: Any) -> list[Any]:
        compiled.bind_handle("x", array)
        return compiled.run({})

    runs: dict[str, Callable[[CompiledGraph, Any], list[Any]]] = {
        "run": lambda compiled, array: compiled.run({"x": array}),
        "run_slots": lambda compiled, array: [found.copy() for found in compiled.run_slots([array])],
        "run_raw": lambda compiled, array: [found.copy() for found in compiled.run_raw({"x": array})],
        "run_dlpack": lambda compiled, array: list(compiled.run_dlpack({"x": array})),
        "handles": stepped,
    }
    kept = []
    compiled = Session(device).compile(_handing_on())
    for value in (1.0, 2.0, 3.0):
        array = np.full((rows, 4), value, np.float32)
        kept.append(runs[way](compiled, array))
        array[:] = 0
    compiled.close()
    del compiled, array
    gc.collect()
    for value, results in zip((1.0, 2.0, 3.0), kept, strict=True):
        handed, weight, total = (found.numpy() if hasattr(found, "numpy") else found for found in results)
        np.testing.assert_array_equal(handed, np.full((rows, 4), value))
        np.testing.assert_array_equal(weight, X[1])
        np.testing.assert_array_equal(total, np.full((rows, 4), value) + X[1])
