"""`read_output_row` reads the last run, whichever way it ran, and a run through buffers runs once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.execution.session import Session
from rlx_ort.ir.graph import Graph

ONES = np.ones((4, 3), np.float32)
X = np.arange(8, dtype=np.float32).reshape(2, 4)
Y = X @ ONES
Build = Callable[..., Graph]


@pytest.fixture
def compiled(providers: Any, matmul_graph: Build) -> CompiledGraph:
    """Return `y = x @ w` compiled on a provider that computes in numpy, after a run on zeros."""
    made = Session("cpu").compile(matmul_graph(ONES))
    made.run({"x": X * 0})
    return made


def _committed(compiled: CompiledGraph, x: npt.NDArray[Any]) -> None:
    compiled.commit_no_wait({"x": x}, None)
    compiled.sync_pending()


WAYS: dict[str, Callable[[CompiledGraph, npt.NDArray[Any]], object]] = {
    "run": lambda compiled, x: compiled.run({"x": x}),
    "run_slots": lambda compiled, x: compiled.run_slots([x]),
    "run_raw": lambda compiled, x: compiled.run_raw({"x": x}),
    "run_async": lambda compiled, x: asyncio.run(compiled.run_async({"x": x})),
    "run_pipelined": lambda compiled, x: compiled.run_pipelined([{"x": x * 5}, {"x": x}]),
    "run_read_outputs": lambda compiled, x: compiled.run_read_outputs({"x": x}, [0]),
    "commit_no_wait": _committed,
}


@pytest.mark.parametrize("way", WAYS)
def test_rows_are_those_of_the_last_run(compiled: CompiledGraph, way: str) -> None:
    """Each way to run counts, at its first call and its second."""
    for factor in (1, 2):
        WAYS[way](compiled, X * factor)
        np.testing.assert_array_equal(compiled.read_output_row(0, 1, 3), Y[1] * factor)


@pytest.mark.parametrize("way", ["run_slots", "run_raw", "run_async", "run_pipelined"])
def test_what_a_caller_does_with_the_returned_list_stays_with_the_caller(compiled: CompiledGraph, way: str) -> None:
    """Emptying the list of outputs takes no row away."""
    returned: Any = WAYS[way](compiled, X)
    (returned[-1] if way == "run_pipelined" else returned).clear()
    np.testing.assert_array_equal(compiled.read_output_row(0, 1, 3), Y[1])


def test_outputs_left_on_the_device_have_no_rows(compiled: CompiledGraph) -> None:
    """After `run_dlpack` there is no row, rather than one of an older run."""
    compiled.run_dlpack({"x": X})
    assert compiled.read_output_row(0, 0, 3) is None


def test_the_first_run_through_buffers_runs_once(providers: Any, compiled: CompiledGraph) -> None:
    """The engine runs as often as it is asked to, also for new shapes, and the first call's arrays are the buffers."""
    session = compiled._slot.engine(compiled.rule).session
    before = session.runs  # type: ignore[attr-defined]  # the fake session counts
    (first,) = compiled.run_slots([X])
    np.testing.assert_array_equal(first, Y)
    (second,) = compiled.run_slots([X + 1])
    assert second is first
    compiled.run_slots([X[:1]])
    assert session.runs - before == 3  # type: ignore[attr-defined]
