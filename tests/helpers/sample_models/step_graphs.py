"""Small graphs with state, and inputs for them, for the tests of the ways to run."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx_ort import Device, Graph

__all__ = ["W", "assert_same", "growing_graph", "step_graph", "step_inputs"]

RNG = np.random.default_rng(11)
W = RNG.standard_normal((4, 4)).astype(np.float32)


def step_graph() -> Graph:
    """Return a recurrent step: `out0` is the new state `tanh(state @ w + x)`, out1 its double."""
    graph = Graph("step")
    x = graph.input("x", ["n", 4])
    state = graph.input("out0", ["n", 4])
    w = graph.param("w", [4, 4], data=W)
    new = graph.tanh(state @ w + x)
    graph.outputs = [new, new + new]
    return graph


def growing_graph() -> Graph:
    """Return a cache that grows: the first output is `cache` with `row` behind it, the second its sum by column."""
    graph = Graph("growing")
    cache = graph.input("cache", ["past", 4])
    row = graph.input("row", [1, 4])
    both = graph.concat([cache, row], 0)
    graph.outputs = [both, both.sum([0])]
    return graph


def step_inputs(count: int = 1, rows: int = 3) -> list[dict[str, Any]]:
    return [{name: RNG.standard_normal((rows, 4)).astype(np.float32) for name in ("x", "out0")} for _ in range(count)]


def assert_same(device: Device, found: Any, expected: Any) -> None:
    if device == Device.CPU:
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
