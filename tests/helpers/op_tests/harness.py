"""Runs a small graph on a device and compares it with the reference interpreter, which computes in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import device_facts
import numpy as np
import numpy.typing as npt
import pytest
from interpreter import evaluate, wide

from rlx_ort import CompileOptions, Device, DType, Graph, GraphDevices, PlacementRule, Value, first_unsupported_op

__all__ = ["Array", "check", "compare", "rand", "run"]

Array = npt.NDArray[Any]


def rand(*shape: int, seed: int = 0) -> Array:
    """Return normally distributed f32 numbers, the same for the same shape and seed."""
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def graph_of(
    build: Callable[..., Any], arrays: Sequence[npt.ArrayLike], shapes: Sequence[Sequence[Any] | None] = ()
) -> tuple[Graph, dict[str, Array]]:
    """Return the graph that `build` makes of one input per array, and its inputs by name; `shapes` is that of `run`."""
    feeds = {f"x{index}": np.asarray(array) for index, array in enumerate(arrays)}
    graph = Graph("case")
    inputs = []
    for index, (name, array) in enumerate(feeds.items()):
        shape = shapes[index] if index < len(shapes) else None
        inputs.append(graph.input(name, array.shape if shape is None else shape, DType.from_numpy(array.dtype)))
    made = build(graph, *inputs)
    graph.outputs = [made] if isinstance(made, Value) else list(made)
    return graph, feeds


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
    graph, feeds = graph_of(build, arrays, shapes)
    refused = first_unsupported_op(device, graph) if strict and device != Device.CPU else None
    if refused is not None:
        pytest.skip(f"{device.display} does not take {refused}")
    rule = PlacementRule.STRICT if strict else PlacementRule.ASSISTED
    runner = GraphDevices(graph, options=CompileOptions(placement=rule))
    results = runner.run(device, feeds)
    for result, value in zip(results, graph.outputs, strict=True):
        assert DType.from_numpy(result.dtype) is value.dtype
        assert len(result.shape) == value.rank
        for size, dim in zip(result.shape, value.shape, strict=True):
            assert not isinstance(dim, int) or size == dim
    return results


def check(
    device: Device,
    build: Callable[..., Any],
    *arrays: npt.ArrayLike,
    shapes: Sequence[Sequence[Any] | None] = (),
    strict: bool = True,
    bound: float | None = None,
    reference: Callable[..., npt.ArrayLike] | None = None,
) -> None:
    """Compare the results of `build` with those of the reference interpreter, with floats widened to f64.

    `reference` takes its place where the interpreter cannot know the result, and gets the arrays.
    """
    results = run(device, build, *arrays, shapes=shapes, strict=strict)
    if reference is not None:
        expected = [np.asarray(reference(*map(wide, arrays)))]
    else:
        graph, feeds = graph_of(build, arrays, shapes)
        sizes = {
            dim: size
            for value in graph.inputs
            for dim, size in zip(value.shape, feeds[value.name].shape, strict=True)
            if isinstance(dim, str)
        }
        expected = evaluate(graph.bind(sizes), feeds)
    for result, wanted in zip(results, expected, strict=True):
        compare(result, wanted, device_facts.bound(device) if bound is None else bound)


def compare(result: Array, expected: Array, bound: float) -> None:
    """Compare within a bound that is relative to each element and, for elements near 0, to the largest one."""
    assert result.shape == expected.shape
    if not DType.from_numpy(result.dtype).is_float:
        np.testing.assert_array_equal(result, expected)
        return
    finite = np.abs(expected[np.isfinite(expected)])
    floor = bound * float(finite.max()) if finite.size else 0.0
    np.testing.assert_allclose(result.astype(np.float64), expected, rtol=bound, atol=floor)
