"""Pipelined, committed and awaited runs give what runs one by one give, errors and order included."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import numpy as np
import pytest
from sample_models.step_graphs import assert_same, step_graph, step_inputs

from rlx_ort import CompiledGraph, CompileOptions, Device, Graph, InputError, Session
from rlx_ort.providers.engine.binding import DeviceTensor

RNG = np.random.default_rng(11)


def test_pipelined_runs_equal_those_one_by_one(device: Device) -> None:
    """Order and results are those of single runs, overlapping or not, and an empty list gives an empty list."""
    compiled = Session(device).compile(step_graph())
    sets = step_inputs(7)
    expected = [compiled.run(inputs) for inputs in sets]
    found = compiled.run_pipelined(sets)
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        assert_same(device, got[0], want[0])
        assert_same(device, got[1], want[1])
    assert compiled.run_pipelined([]) == []


def test_long_runs_overlap_with_the_same_results() -> None:
    """Runs that take long enough go two at a time and come back in order."""
    graph = Graph("long")
    x = graph.input("x", [256, 256])
    value = x
    for _ in range(6):
        value = graph.tanh(value @ x)
    graph.outputs = [value]
    compiled = Session("cpu", CompileOptions(intra_op_threads=1)).compile(graph)
    sets = [{"x": RNG.standard_normal((256, 256)).astype(np.float32)} for _ in range(6)]
    expected = [compiled.run(inputs)[0] for inputs in sets]
    for (got,), want in zip(compiled.run_pipelined(sets), expected, strict=True):
        np.testing.assert_array_equal(got, want)


def test_pipelined_runs_with_handles_are_in_order(device: Device) -> None:
    """A graph with state returns the states one after the other."""
    compiled = Session(device).compile(step_graph())
    steps = step_inputs(5)
    compiled.bind_handle("out0", steps[0]["out0"])
    expected = [compiled.run({"x": step["x"]})[0] for step in steps]
    compiled.bind_handle("out0", steps[0]["out0"])
    for got, want in zip(compiled.run_pipelined([{"x": step["x"]} for step in steps]), expected, strict=True):
        assert_same(device, got[0], want)


def test_committed_runs_feed_handles_in_order(device: Device) -> None:
    """Committed runs leave the same state as runs that are waited for."""
    compiled = Session(device).compile(step_graph())
    steps = step_inputs(5)
    compiled.bind_gpu_handle("out0", steps[0]["out0"])
    compiled.set_gpu_handle_feed("out0", 0)
    for step in steps:
        compiled.run({"x": step["x"]})
    expected = compiled.read_gpu_handle("out0")
    compiled.bind_gpu_handle("out0", steps[0]["out0"])
    compiled.set_gpu_handle_feed("out0", 0)
    reused = np.empty((3, 4), np.float32)
    for step in steps:
        reused[:] = step["x"]
        compiled.commit_no_wait({"x": reused})
    compiled.sync_pending()
    assert_same(device, compiled.read_gpu_handle("out0"), expected)


def test_errors_of_committed_runs_come_when_they_are_waited_for() -> None:
    """A wrong input in the background is an InputError of `sync_pending`, and only of the first."""
    compiled = Session("cpu").compile(step_graph())
    compiled.commit_no_wait({"x": np.zeros((1, 4), np.float32)})
    with pytest.raises(InputError, match="'out0'"):
        compiled.sync_pending()
    compiled.sync_pending()


def test_awaited_runs_equal_plain_ones(device: Device) -> None:
    """Many awaited at once give what plain runs give."""
    compiled = Session(device).compile(step_graph())
    sets = step_inputs(6)
    expected = [compiled.run(inputs)[0] for inputs in sets]

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(compiled.run_async(inputs) for inputs in sets))

    for got, want in zip(asyncio.run(all_of_them()), expected, strict=True):
        assert_same(device, got[0], want)


def test_errors_of_awaited_runs_are_typed() -> None:
    """A missing input is an InputError in the task."""
    compiled = Session("cpu").compile(step_graph())
    with pytest.raises(InputError, match="'out0'"):
        asyncio.run(compiled.run_async({"x": np.zeros((1, 4), np.float32)}))


def _endless() -> Any:
    """Return a compiled graph whose one node multiplies for as long as it is let."""
    graph = Graph("endless")
    x = graph.input("x", [256, 256])
    value = x
    for _ in range(3000):
        value = graph.tanh(value @ x)
    graph.outputs = [value]
    return Session("cpu", CompileOptions(intra_op_threads=1)).compile(graph)


async def test_cancelling_the_task_stops_the_run() -> None:
    """The run in the thread ends early, and the graph runs on afterwards."""
    compiled = _endless()
    inputs = {"x": np.zeros((256, 256), np.float32)}
    begun, ended, whole = threading.Event(), threading.Event(), []
    engine = compiled._slot.current
    original = engine.run

    def watched(*args: Any) -> Any:
        begun.set()
        try:
            whole.append(original(*args))
            return whole[-1]
        finally:
            ended.set()

    engine.run = watched
    task = asyncio.create_task(compiled.run_async(inputs))
    assert await asyncio.to_thread(begun.wait, 60.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.wait(60.0)
    assert not whole, "the run went on after it was cancelled"


@pytest.mark.parametrize("on_device", [False, True])
def test_outputs_of_committed_runs_come_when_they_are_waited_for(device: Device, on_device: bool) -> None:
    """All outputs or one, as arrays or left on the device, with handles fed all the same."""
    compiled = Session(device).compile(step_graph())
    steps = step_inputs(3)
    twin = compiled.clone()
    for graph in (compiled, twin):
        graph.bind_gpu_handle("out0", steps[0]["out0"])
        graph.set_gpu_handle_feed("out0", 0)
    expected = [twin.run({"x": step["x"]}) for step in steps]
    for step, wanted in zip(steps, (None, [1], ()), strict=True):
        compiled.commit_no_wait({"x": step["x"]}, wanted, on_device=on_device)
    first, second = compiled.sync_pending()
    for found, want in zip((*first, *second), (*expected[0], expected[1][1]), strict=True):
        assert isinstance(found, DeviceTensor) == on_device
        assert_same(device, found.numpy() if on_device else found, want)
    assert_same(device, compiled.read_gpu_handle("out0"), expected[2][0])


def _scaled() -> CompiledGraph:
    graph = Graph("scaled")
    graph.outputs = [graph.mul(graph.input("x", ["n"]), graph.param("w", [1], data=np.ones(1, np.float32)))]
    return Session("cpu").compile(graph)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_committed_run_reads_the_parameters_of_its_time(grouped: bool) -> None:
    """A parameter that is set after a commit counts for later runs only, whichever way it is set."""
    compiled = _scaled()
    x = np.full(1 << 20, 2, np.float32)
    for value in range(1, 7):
        if grouped:
            with compiled.update_params():
                compiled.set_param("w", np.array([value], np.float32))
        else:
            compiled.weights.set("w", np.array([value], np.float32))
        compiled.commit_no_wait({"x": x}, [0])
    assert [float(found[0][0]) for found in compiled.sync_pending()] == [2, 4, 6, 8, 10, 12]


def test_the_thread_of_a_dropped_graph_ends() -> None:
    """A graph that is dropped without `close` after a commit leaves no thread behind."""
    compiled = _scaled()
    compiled.commit_no_wait({"x": np.ones(2, np.float32)}, [0])
    compiled.sync_pending()
    (thread,) = [each for each in threading.enumerate() if each.name == "rlx_ort-commit" and each.is_alive()][-1:]
    del compiled
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
