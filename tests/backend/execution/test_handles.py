"""Handles in host memory and on the device give what a loop written by hand gives."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from sample_models.step_graphs import W, assert_same, growing_graph, step_graph, step_inputs

from rlx_ort import Device, Graph, InputError, RlxError, Session

RNG = np.random.default_rng(11)


def test_host_handles_equal_a_loop_by_hand(device: Device) -> None:
    """A handle named `out0` feeds the input of that name with output 0 of the run before."""
    compiled = Session(device).compile(step_graph())
    steps = step_inputs(4)
    state = steps[0]["out0"]
    expected = []
    for step in steps:
        state = compiled.run({"x": step["x"], "out0": state})[0]
        expected.append(state)
    compiled.bind_handle("out0", steps[0]["out0"])
    for step, want in zip(steps, expected, strict=True):
        assert_same(device, compiled.run({"x": step["x"]})[0], want)
    assert_same(device, compiled.read_handle("out0"), expected[-1])


def test_device_handles_equal_a_loop_by_hand(device: Device) -> None:
    """A state that stays on the device gives what one fed from the host gives, parameters changing in between."""
    compiled = Session(device).compile(step_graph())
    steps = step_inputs(6)
    state = steps[0]["out0"]
    expected = []
    for number, step in enumerate(steps):
        compiled.set_param("w", W * (1 + number // 3))
        state = compiled.run({"x": step["x"], "out0": state})[0]
        expected.append(state)
    compiled.bind_gpu_handle("out0", steps[0]["out0"])
    assert compiled.has_gpu_handle("out0")
    for number, (step, want) in enumerate(zip(steps, expected, strict=True)):
        compiled.set_param("w", W * (1 + number // 3))
        assert_same(device, compiled.run_feed_gpu_handle({"x": step["x"]}, "out0", 0), want)
    assert_same(device, compiled.read_gpu_handle("out0"), expected[-1])


def test_a_device_handle_may_grow(device: Device) -> None:
    """A cache grows by a row in each run, on the device, and holds all rows in the end."""
    compiled = Session(device).compile(growing_graph())
    rows = RNG.standard_normal((5, 1, 4)).astype(np.float32)
    compiled.bind_gpu_handle("cache", rows[0])
    compiled.set_gpu_handle_feed("cache", 0)
    for count, row in enumerate(rows[1:], start=2):
        (total,) = compiled.run_read_outputs({"row": row}, [1])
        np.testing.assert_allclose(
            total.reshape(-1), rows[:count, 0].sum(axis=0, dtype=np.float64), rtol=1e-5, atol=1e-6
        )
    np.testing.assert_array_equal(compiled.read_gpu_handle("cache"), rows[:, 0])


def test_a_loop_whose_inputs_grow_is_planned_once(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that grows with the cache, as decoders have it, gives each step its sum, over one prepared run."""
    graph = Graph("masked")
    cache, row = graph.input("cache", ["past", 4]), graph.input("row", [1, 4])
    mask = graph.input("mask", ["total", 1])
    both = graph.concat([cache, row], 0)
    graph.outputs = [both, (both * mask).sum([0])]
    compiled = Session(device).compile(graph)
    prepared = []
    binder = type(compiled.engine().binder)
    make = binder.loop
    monkeypatch.setattr(binder, "loop", lambda *given: prepared.append(1) or make(*given))
    rows = np.random.default_rng(5).standard_normal((9, 1, 4)).astype(np.float32)
    compiled.bind_gpu_handle("cache", rows[0])
    compiled.set_gpu_handle_feed("cache", 0)
    for count in range(2, 10):
        weights = np.arange(1, count + 1, dtype=np.float32)[:, None]
        (total,) = compiled.run_read_outputs({"row": rows[count - 1], "mask": weights}, [1])
        expected = (rows[:count, 0].astype(np.float64) * weights).sum(axis=0)
        np.testing.assert_allclose(total.reshape(-1), expected, rtol=1e-5, atol=1e-5)
    assert len(prepared) == 1
    with pytest.raises(RlxError):
        compiled.run_read_outputs({"row": rows[0], "mask": np.ones((3, 2), np.float32)}, [1])


def test_a_run_never_writes_to_the_handle_it_reads(device: Device) -> None:
    """A tensor bound as a handle keeps its elements while outputs move into the handle."""
    first = Session(device).compile(step_graph())
    (inputs,) = step_inputs()
    tensor = first.run_dlpack(inputs)[0]
    before = tensor.numpy()
    second = Session(device).compile(step_graph())
    second.bind_gpu_handle("out0", tensor)
    second.set_gpu_handle_feed("out0", 0)
    for _ in range(3):
        second.run({"x": inputs["x"]})
    np.testing.assert_array_equal(tensor.numpy(), before)
    assert not np.array_equal(second.read_gpu_handle("out0"), before)


def test_an_input_that_is_given_wins_over_its_handle(device: Device) -> None:
    """The call's own value counts, and the handle is what it was."""
    compiled = Session(device).compile(growing_graph())
    compiled.bind_gpu_handle("cache", np.ones((2, 4), np.float32))
    given = {"cache": np.zeros((1, 4), np.float32), "row": np.zeros((1, 4), np.float32)}
    assert compiled.run(given)[0].shape == (2, 4)
    np.testing.assert_array_equal(compiled.read_gpu_handle("cache"), np.ones((2, 4), np.float32))


def test_bf16_handles_stay_on_the_device() -> None:
    """Handles keep element types that numpy does not have."""
    graph = Graph("bf16")
    x = graph.input("x", [3], "bf16")
    graph.outputs = [x.cast("f32").cast("bf16")]
    compiled = Session("cpu").compile(graph)
    array = np.array([1, 2.5, -3], ml_dtypes.bfloat16)
    compiled.bind_gpu_handle("x", array)
    compiled.set_gpu_handle_feed("x", 0)
    np.testing.assert_array_equal(compiled.run({})[0], array)
    np.testing.assert_array_equal(compiled.read_gpu_handle("x"), array)


def test_runs_with_handles_from_many_threads_take_turns() -> None:
    """A counter that every run raises by one counts every run of every thread."""
    graph = Graph("counter")
    count = graph.input("out0", [1])
    graph.outputs = [count + graph.constant(np.ones(1, np.float32))]
    compiled = Session("cpu").compile(graph)
    compiled.bind_handle("out0", np.zeros(1, np.float32))
    threads = [threading.Thread(target=lambda: [compiled.run({}) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert compiled.read_handle("out0") == [800.0]


def test_a_failed_run_leaves_the_handles_and_the_graph_usable(device: Device) -> None:
    """A wrong input beside a handle is an InputError, and the next run gives what it would have given."""
    compiled = Session(device).compile(step_graph())
    (inputs,) = step_inputs()
    compiled.bind_gpu_handle("out0", inputs["out0"])
    compiled.set_gpu_handle_feed("out0", 0)
    with pytest.raises(RlxError):
        compiled.run({"x": np.zeros((2, 4), np.float32)})
    np.testing.assert_array_equal(compiled.read_gpu_handle("out0"), inputs["out0"])
    assert_same(device, compiled.run({"x": inputs["x"]})[0], Session(device).compile(step_graph()).run(inputs)[0])


def _grown(compiled: Any, rows: Any, start: Any) -> list[Any]:
    """Return what each step of a loop over a growing cache reads."""
    compiled.bind_gpu_handle("cache", start)
    compiled.set_gpu_handle_feed("cache", 0)
    return [compiled.run_read_outputs({"row": row}, [1])[0] for row in rows]


def test_a_loop_that_is_repeated_gives_the_same(device: Device) -> None:
    """A second loop over the same handles starts from the new values, and the outputs of the first are unchanged."""
    compiled = Session(device).compile(growing_graph())
    rows = RNG.standard_normal((6, 1, 4)).astype(np.float32)
    for start in (np.zeros((2, 4), np.float32), np.ones((5, 4), np.float32)):
        first = _grown(compiled, rows, start)
        expected = start.sum(0) + np.cumsum(rows[:, 0], axis=0)
        _grown(compiled, -rows, start)
        np.testing.assert_allclose(first, expected, rtol=1e-5, atol=1e-5)


def test_a_loop_takes_other_inputs_on_its_way(device: Device) -> None:
    """Lists, other shapes, other outputs and a handle bound in between are seen by the very next step."""
    compiled = Session(device).compile(step_graph())
    state = np.zeros((2, 4), np.float32)
    compiled.bind_gpu_handle("out0", state)
    compiled.set_gpu_handle_feed("out0", 0)
    for number, rows in enumerate((2, 2, 2, 3, 3, 2, 2)):
        if rows != len(state):
            state = np.full((rows, 4), 0.5, np.float32)
            compiled.bind_gpu_handle("out0", state)
        x = RNG.standard_normal((rows, 4)).astype(np.float32)
        wanted = [1] if number % 2 else [0, 1, 0]
        found = compiled.run_read_outputs({"x": x.tolist() if number == 2 else x}, wanted)
        state = np.tanh(state @ W + x)
        for index, out in zip(wanted, found, strict=True):
            np.testing.assert_allclose(out, state * (1 + index), rtol=1e-4, atol=1e-5)


def test_a_loop_returns_an_output_as_often_as_it_is_listed(device: Device) -> None:
    """Every step of a loop that lists an output twice returns it twice, each time in its place."""
    compiled = Session(device).compile(growing_graph())
    rows = RNG.standard_normal((4, 1, 4)).astype(np.float32)
    compiled.bind_gpu_handle("cache", rows[0])
    compiled.set_gpu_handle_feed("cache", 0)
    for count, row in enumerate(rows[1:], start=2):
        sums, cache, again = compiled.run_read_outputs({"row": row}, [1, 0, 1])
        np.testing.assert_array_equal(cache, rows[:count, 0])
        np.testing.assert_allclose(sums, rows[:count, 0].sum(0), rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(sums, again)


def test_a_loop_waits_for_the_runs_committed_on_its_way(device: Device) -> None:
    """A committed run between two steps of a loop moves the handle before the second step reads it."""
    compiled = Session(device).compile(growing_graph())
    rows = np.arange(24, dtype=np.float32).reshape(6, 1, 4)
    compiled.bind_gpu_handle("cache", rows[0])
    compiled.set_gpu_handle_feed("cache", 0)
    for row in rows[1:4]:
        compiled.run_read_outputs({"row": row}, [1])
    compiled.commit_no_wait({"row": rows[4]})
    found = compiled.run_read_outputs({"row": rows[5]}, [1])[0]
    np.testing.assert_array_equal(found, rows[:, 0].sum(0))


def test_sizes_that_stop_agreeing_in_a_loop_are_refused(device: Device) -> None:
    """A handle that a loop has made another size than its partner ends in an InputError, and no handle changes."""
    graph = Graph("two")
    fixed, cache = graph.input("fixed", ["past", 4]), graph.input("cache", ["past", 4])
    row = graph.input("row", [1, 4])
    graph.outputs = [graph.concat([cache, row], 0), fixed + 0.0]
    compiled = Session(device).compile(graph)
    for name, output in (("cache", 0), ("fixed", 1)):
        compiled.bind_gpu_handle(name, np.ones((2, 4), np.float32))
        compiled.set_gpu_handle_feed(name, output)
    row_of_ones = np.ones((1, 4), np.float32)
    compiled.run_read_outputs({"row": row_of_ones}, [])
    for _ in range(2):
        with pytest.raises(InputError, match="past"):
            compiled.run_read_outputs({"row": row_of_ones}, [])
    held = [compiled.read_gpu_handle(name) for name in ("cache", "fixed")]
    assert [array.shape for array in held if array is not None] == [(3, 4), (2, 4)]


def test_a_loop_goes_on_after_a_change_of_parameters(device: Device) -> None:
    """The step after `set_param` uses the new value, with the state of the step before."""
    compiled = Session(device).compile(step_graph())
    compiled.bind_gpu_handle("out0", np.zeros((1, 4), np.float32))
    compiled.set_gpu_handle_feed("out0", 0)
    state, x = np.zeros((1, 4), np.float32), np.full((1, 4), 0.25, np.float32)
    for number in range(6):
        w = W * (1 + number // 3)
        if number % 3 == 0:
            compiled.set_param("w", w)
        found = compiled.run_read_outputs({"x": x}, [0])[0]
        state = np.tanh(state @ w + x)
        np.testing.assert_allclose(found, state, rtol=1e-4, atol=1e-5)


def test_large_inputs_of_a_loop_may_be_written_to_between_steps() -> None:
    """An array too large to be copied is read in each step, also after its owner replaced its memory."""
    graph = Graph("large")
    total, x = graph.input("total", [1]), graph.input("x", ["n"])
    graph.outputs = [total + graph.reshape(x.sum([0]), [1])]
    compiled = Session("cpu").compile(graph)
    compiled.bind_gpu_handle("total", np.zeros(1, np.float32))
    compiled.set_gpu_handle_feed("total", 0)
    big = np.zeros(100_000, np.float32)
    for number in range(4):
        big[0] = 1 + number
        compiled.run_read_outputs({"x": big}, [])
        big.resize(100_000 + number, refcheck=False)
    np.testing.assert_array_equal(compiled.read_gpu_handle("total"), [1 + 2 + 3 + 4])


def test_a_device_handle_belongs_to_whoever_read_it() -> None:
    """Writing to what `read_gpu_handle` returned changes no state."""
    compiled = Session("cpu").compile(step_graph())
    compiled.bind_gpu_handle("out0", np.zeros((1, 4), np.float32))
    compiled.set_gpu_handle_feed("out0", 0)
    for _ in range(3):
        compiled.run_read_outputs({"x": np.ones((1, 4), np.float32)}, [0])
    held = compiled.read_gpu_handle("out0")
    assert held is not None
    kept = held.copy()
    held[...] = 7
    np.testing.assert_array_equal(compiled.read_gpu_handle("out0"), kept)


def test_calls_about_handles_say_that_they_are_supported(device: Device) -> None:
    """Code that asks whether a device has handles finds that every device has."""
    compiled = Session(device).compile(step_graph())
    state = np.zeros((1, 4), np.float32)
    assert compiled.bind_handle("out0", state)
    assert compiled.set_handle_feed("out0", 0)
    assert compiled.bind_gpu_handle("out0", state)
    assert compiled.set_gpu_handle_feed("out0", 0)
    assert {"clone", "moe", "persistent_handles", "gpu_handles", "async_pipeline"} <= compiled.capabilities()


def test_outputs_left_on_the_device_feed_handles(device: Device) -> None:
    """`run_dlpack` moves outputs into handles as every run does."""
    compiled = Session(device).compile(step_graph())
    (inputs,) = step_inputs()
    compiled.bind_gpu_handle("out0", inputs["out0"])
    compiled.set_gpu_handle_feed("out0", 0)
    (new, _) = compiled.run_dlpack({"x": inputs["x"]})
    assert_same(device, compiled.read_gpu_handle("out0"), new.numpy())
    expected = np.tanh(inputs["out0"].astype(np.float64) @ W + inputs["x"])
    np.testing.assert_allclose(new.numpy(), expected, rtol=1e-5, atol=1e-6)
