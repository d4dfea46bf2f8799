"""Runs a small graph on a device and compares it with a numpy reference computed in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import device_facts
import numpy as np
import numpy.typing as npt
import pytest

from rlx_ort.device import Device
from rlx_ort.graph_devices import GraphDevices
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph, Value
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.selection.support import first_unsupported_op

__all__ = ["Array", "check", "rand", "run"]

Array = npt.NDArray[Any]


def rand(*shape: int, seed: int = 0) -> Array:
    """Return normally distributed f32 numbers, the same for the same shape and seed."""
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def run(
    device: Device,
    build: Callable[..., Any],
    *arrays: npt.ArrayLike,
    shapes: Sequence[Sequence[Any] | None] = (),
    strict: bool = True,
) -> list[Array]:
    """Build a graph from one input per array, run it, and return its results.

    The test is skipped where an accelerator is known to have no kernel for the graph; the CPU has to run them all.
    `shapes` declares other shapes than the arrays have, with names for open dims; None takes the array's. The device
    may be helped by the CPU unless `strict`.
    """
    values = [np.asarray(array) for array in arrays]
    graph = Graph("case")
    inputs = []
    for index, array in enumerate(values):
        shape = shapes[index] if index < len(shapes) else None
        declared = array.shape if shape is None else shape
        inputs.append(graph.input(f"x{index}", declared, DType.from_numpy(array.dtype)))
    made = build(graph, *inputs)
    graph.outputs = [made] if isinstance(made, Value) else list(made)
    refused = first_unsupported_op(device, graph) if strict and device != Device.CPU else None
    if refused is not None:
        pytest.skip(f"{device.display} does not take {refused}")
    rule = PlacementRule.STRICT if strict else PlacementRule.ASSISTED
    runner = GraphDevices(graph, options=CompileOptions(placement=rule))
    results = runner.run(device, {f"x{index}": array for index, array in enumerate(values)})
    for result, value in zip(results, graph.outputs, strict=True):
        assert DType.from_numpy(result.dtype) is value.dtype
        assert len(result.shape) == value.rank
        for size, dim in zip(result.shape, value.shape, strict=True):
            assert not isinstance(dim, int) or size == dim
    return results


def check(
    device: Device,
    build: Callable[..., Any],
    reference: Callable[..., npt.ArrayLike],
    *arrays: npt.ArrayLike,
    shapes: Sequence[Sequence[Any] | None] = (),
    strict: bool = True,
    bound: float | None = None,
) -> None:
    """Compare the only result of `build` with `reference`, which gets the arrays with floats widened to f64.

    The bound is relative to each element and, for elements near 0, to the largest one.
    """
    (result,) = run(device, build, *arrays, shapes=shapes, strict=strict)
    wide = [array.astype(np.float64) if array.dtype.kind == "f" else array for array in map(np.asarray, arrays)]
    expected = np.asarray(reference(*wide))
    assert result.shape == expected.shape
    if result.dtype.kind != "f":
        np.testing.assert_array_equal(result, expected)
        return
    limit = device_facts.bound(device) if bound is None else bound
    finite = np.abs(expected[np.isfinite(expected)])
    floor = limit * float(finite.max()) if finite.size else 0.0
    np.testing.assert_allclose(result.astype(np.float64), expected, rtol=limit, atol=floor)
