"""The recurrent layers agree with their recurrences in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from interpreter import evaluate

from rlx_ort import CompileOptions, Device, Graph, KernelDispatch, KernelDispatchPolicy, PlacementRule, Session
from rlx_ort.converters.to_onnx.dispatch import KernelSet
from rlx_ort.converters.to_onnx.exporter import export_model

Array = npt.NDArray[Any]
BATCH, WIDTH, N = 2, 3, 4


def run(
    graph: Graph, device: Device, feeds: dict[str, Array], rule: PlacementRule = PlacementRule.ASSISTED
) -> list[Array]:
    return Session(device, CompileOptions(placement=rule)).compile(graph).run(feeds)


def scan_data(length: int, dtype: str = "float32") -> dict[str, Array]:
    rng = np.random.default_rng(length)
    data = {
        "x": rng.normal(size=(BATCH, length, WIDTH)),
        "delta": rng.uniform(0.1, 1, (BATCH, length, WIDTH)),
        "a": -rng.uniform(0.1, 2, (WIDTH, N)),
        "b": rng.normal(size=(BATCH, length, N)),
        "c": rng.normal(size=(BATCH, length, N)),
    }
    return {name: value.astype(dtype) for name, value in data.items()}


def net_data(length: int) -> dict[str, Array]:
    rng = np.random.default_rng(length)
    q, k, v = rng.normal(size=(3, BATCH, length, WIDTH, N))
    data = {
        "q": q,
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": v,
        "g": -rng.uniform(0, 1, (BATCH, length, WIDTH)),
        "beta": rng.uniform(0, 1, (BATCH, length, WIDTH)),
        "state": rng.normal(size=(BATCH, WIDTH, N, N)),
    }
    return {name: value.astype(np.float32) for name, value in data.items()}


def inputs(graph: Graph, data: dict[str, Array], named: bool) -> list[Any]:
    """Add inputs for the data; with names for the batch and the length if asked."""
    result = []
    for name, value in data.items():
        dims: list[Any] = list(value.shape)
        if named and name != "a":
            dims[0] = "batch"
            dims[1] = dims[1] if name == "state" else "length"
        result.append(graph.input(name, dims, value.dtype))
    return result


def sizes(length: int) -> dict[str, int]:
    """Return the sizes of the named dims of `inputs`."""
    return {"batch": BATCH, "length": length}


def test_selective_scan_is_a_loop_only_where_there_is_a_kernel_for_loops() -> None:
    """A model for any provider has basic ops only; one for loop kernels has a loop, and both give the same."""
    data, g = scan_data(40), Graph()
    g.outputs = [g.selective_scan(*inputs(g, data, False))]
    assert "Loop" not in {node.op_type for node in export_model(g).nodes}
    looped = export_model(g, kernels=KernelSet("any", None, lambda *node: True))
    assert "Loop" in {node.op_type for node in looped.nodes}
    common = CompileOptions(kernel_dispatch=KernelDispatch(KernelDispatchPolicy.FORCE_COMMON))
    passes = Session("cpu", common).compile(g).run(data)[0]
    assert passes == pytest.approx(Session("cpu").compile(g).run(data)[0], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("length", [0, 1, 2, 8, 9, 21])
def test_selective_scan_follows_its_recurrence(device: Device, length: int, named: bool) -> None:
    """Written out, in doubling passes, and as a loop over a length known only at run time."""
    data, g = scan_data(length), Graph()
    g.outputs = [g.selective_scan(*inputs(g, data, named))]
    (result,) = run(g, device, data)
    assert result.shape == (BATCH, length, WIDTH)
    assert result == pytest.approx(evaluate(g.bind(sizes(length) if named else {}), data)[0], rel=1e-4, abs=1e-5)


def test_selective_scan_of_known_length_needs_no_help(device: Device) -> None:
    """With the length known there is no loop, so any provider runs all of it."""
    data, g = scan_data(11), Graph()
    g.outputs = [g.selective_scan(*inputs(g, data, False))]
    (result,) = run(g, device, data, PlacementRule.STRICT)
    assert result == pytest.approx(evaluate(g, data)[0], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("dtype", "error"), [("float16", 2e-2), ("float64", 1e-12)])
def test_selective_scan_keeps_the_dtype_of_its_inputs(dtype: str, error: float) -> None:
    """f16 is computed in f32 and rounded once; f64 stays f64."""
    data, g = scan_data(12, dtype), Graph()
    g.outputs = [g.selective_scan(*inputs(g, data, False))]
    (result,) = run(g, Device.CPU, data)
    assert result.dtype == np.dtype(dtype)
    assert result.astype(np.float64) == pytest.approx(evaluate(g, data)[0], rel=error, abs=error)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("length", [0, 1, 3, 9])
def test_gated_delta_net_carries_its_state(device: Device, length: int, named: bool) -> None:
    """Results and last state follow the delta rule from the given state, and from nothing."""
    data, g = net_data(length), Graph()
    values = inputs(g, data, named)
    result, last = g.gated_delta_net_carry(*values)
    g.outputs = [result, last, g.gated_delta_net(*values[:5])]
    results = run(g, device, data)
    assert results[0].shape == (BATCH, length, WIDTH, N)
    for found, expected in zip(results, evaluate(g.bind(sizes(length) if named else {}), data), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_a_carried_state_fed_back_gives_the_same_as_one_run(device: Device) -> None:
    """Two halves with the state handed over equal the whole sequence."""
    data = net_data(6)
    g = Graph()
    g.outputs = list(g.gated_delta_net_carry(*inputs(g, data, True)))
    whole, last = run(g, device, data)
    front = {name: value if name == "state" else value[:, :4] for name, value in data.items()}
    first, middle = run(g, device, front)
    back = {name: middle if name == "state" else value[:, 4:] for name, value in data.items()}
    second, end = run(g, device, back)
    assert np.concatenate([first, second], 1) == pytest.approx(whole, abs=1e-5)
    assert end == pytest.approx(last, abs=1e-5)
