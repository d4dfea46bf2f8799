"""Compiled graphs that a runner lends, and the last run of a graph, whichever way it ran."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rlx_ort import BucketedCompileCache, CompileCache, CompiledGraph, Graph, GraphDevices, PlacementRule, Session
from rlx_ort.errors import PlacementError, RunError

ONES = np.ones((4, 3), np.float32)
X = np.arange(8, dtype=np.float32).reshape(2, 4)
Y = X @ ONES
Build = Callable[..., Graph]


@pytest.fixture
def runner(providers: Any, matmul_graph: Build) -> GraphDevices:
    """Return a runner of `x @ ones` on the fake devices, of which CUDA is the fastest."""
    return GraphDevices(matmul_graph(ONES))


def _views(runner: GraphDevices) -> tuple[CompiledGraph, CompiledGraph]:
    """Return the graph on CUDA as it is named, and as it is chosen."""
    named, chosen = runner.compile("cuda"), runner.compile_fastest()
    assert (named.rule, chosen.rule) == (PlacementRule.STRICT, PlacementRule.ASSISTED)
    return named, chosen


@pytest.mark.parametrize(
    "run",
    [
        lambda runner: runner.run("cuda", {"x": X})[0],
        lambda runner: runner.run_try(["cuda"], {"x": X})[1][0],
        lambda runner: runner.run_fastest({"x": X})[0],
        lambda runner: runner.compile("cuda").run_slots([X])[0],
        lambda runner: runner.warm_all() and runner.run("cuda", {"x": X})[0],
    ],
    ids=["run", "run_try", "run_fastest", "compile", "warm_all"],
)
def test_a_runner_runs_on_after_what_it_lent_is_closed(
    providers: Any, runner: GraphDevices, run: Callable[[GraphDevices], Any]
) -> None:
    """Every way to run answers as before, in the session that was open."""
    with runner.compile("cuda") as lent:
        lent.run({"x": X})
    np.testing.assert_array_equal(run(runner), Y)
    assert providers["cuda"].opened == 1


def test_a_lent_graph_that_was_closed_refuses_to_run(runner: GraphDevices) -> None:
    """The closed object raises, and the runner lends another one, without the handles of the first."""
    lent = runner.compile("cuda")
    lent.bind_handle("x", X)
    lent.close()
    lent.close()
    with pytest.raises(RunError, match="closed"):
        lent.run({"x": X})
    fresh = runner.compile("cuda")
    assert lent.closed
    assert not fresh.closed
    assert fresh.read_handle("x") is None


def test_closing_one_view_closes_the_other(runner: GraphDevices) -> None:
    """The named and the chosen graph are the same one; the runner lends both again."""
    named, chosen = _views(runner)
    named.close()
    assert chosen.closed
    for fresh in _views(runner):
        np.testing.assert_array_equal(fresh.run({"x": X})[0], Y)


def test_a_runner_that_closes_ends_what_it_lent(providers: Any, runner: GraphDevices) -> None:
    """The sessions are the runner's: they are closed with it, whatever is still lent."""
    lent = runner.compile("cuda")
    runner.close()
    assert providers["cuda"].sessions == 0
    with pytest.raises(RunError, match="closed"):
        lent.run({"x": X})


def test_a_closed_clone_leaves_the_runner_alone(providers: Any, runner: GraphDevices) -> None:
    """A clone owns what it has, and closes no session that others use."""
    runner.compile("cuda").clone().close()
    np.testing.assert_array_equal(runner.run("cuda", {"x": X})[0], Y)
    assert providers["cuda"].opened == 1


def test_a_clone_outlives_the_runner_that_closes(providers: Any, runner: GraphDevices) -> None:
    """The lent graph ends at once, and the session with the clone, the last that has it."""
    lent = runner.compile("cuda")
    clone = lent.clone()
    runner.close()
    with pytest.raises(RunError, match="closed"):
        lent.run({"x": X})
    np.testing.assert_array_equal(clone.run({"x": X})[0], Y)
    clone.close()
    assert (providers["cuda"].opened, providers["cuda"].sessions) == (1, 0)


def test_a_clone_shares_the_session_of_new_weights(providers: Any, matmul_graph: Build) -> None:
    """A frozen weight that changes opens one session for both."""
    runner = GraphDevices(matmul_graph())
    runner.set_param("w", ONES)
    lent = runner.compile("cuda")
    clone = lent.clone()
    runner.set_param("w", 2 * ONES)
    for compiled in (lent, clone):
        np.testing.assert_array_equal(compiled.run({"x": X})[0], 2 * Y)
    assert (providers["cuda"].opened, providers["cuda"].sessions) == (2, 1)


def test_a_handle_is_in_both_views_of_a_device(runner: GraphDevices) -> None:
    """What is bound through the graph that was named feeds the one that was chosen, and the other way round."""
    named, chosen = _views(runner)
    named.bind_handle("x", X)
    np.testing.assert_array_equal(chosen.run({})[0], Y)
    chosen.bind_handle("x", X + 1)
    np.testing.assert_array_equal(named.read_handle("x"), X + 1)


def test_the_extent_and_the_last_run_are_those_of_both_views(runner: GraphDevices) -> None:
    """An extent set through one cuts the other's inputs, whose rows the first can read."""
    named, chosen = _views(runner)
    named.set_active_extent((1, 2))
    np.testing.assert_array_equal(chosen.run({"x": X})[0], Y[:1])
    np.testing.assert_array_equal(named.read_output_row(0, 0, 3), Y[0])


def test_a_view_that_must_be_strict_stays_strict(providers: Any, matmul_graph: Build) -> None:
    """Sharing state does not let a device that was named be helped, whichever was compiled first."""
    graph = matmul_graph()
    graph.outputs = [graph.outputs[0], *graph.onnx_node("Relu", [graph.outputs[0]], types=[graph.outputs[0].type])]
    providers["cuda"].takes = lambda node: node.op_type == "MatMul"
    runner = GraphDevices(graph)
    named, chosen = _views(runner)  # no session yet: a parameter is not set
    runner.set_param("w", ONES)
    np.testing.assert_array_equal(chosen.run({"x": X})[0], Y)
    with pytest.raises(PlacementError, match="relu"):
        named.run({"x": X})
    np.testing.assert_array_equal(chosen.run({"x": X})[0], Y)


def test_measuring_leaves_handles_as_they_are(runner: GraphDevices) -> None:
    """The runs of a benchmark feed no handle of the graph that the runner lends."""
    lent = runner.compile("cuda")
    lent.bind_handle("out0", np.zeros((2, 3), np.float32))
    runner.benchmark({"x": X}, 2)
    np.testing.assert_array_equal(lent.read_handle("out0"), np.zeros((2, 3)))


def test_a_cache_compiles_again_what_was_closed(providers: object, matmul_graph: Build) -> None:
    """A closed graph is no hit; its parameters stay as they were set."""
    cache = CompileCache("cpu", 2)
    with cache.get_or_compile("a", matmul_graph) as lent:
        lent.set_param("w", ONES)
    np.testing.assert_array_equal(cache.get_or_compile("a", matmul_graph).run({"x": X})[0], Y)


def test_a_cache_of_ranges_compiles_again_what_was_closed(providers: object, matmul_graph: Build) -> None:
    """A closed graph of a range is no hit; the parameters that all ranges share stay."""
    cache = BucketedCompileCache([(1, 9)], "cpu")
    for _ in range(2):
        found = cache.get_or_compile(4, lambda upper: matmul_graph(ONES))
        assert found is not None
        with found[1] as lent:
            np.testing.assert_array_equal(lent.run({"x": X})[0], Y)


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


@pytest.mark.parametrize("way", ["run", "run_slots", "run_raw", "run_async", "run_pipelined"])
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
