"""Runs through bound buffers give what plain ones give, and the buffers stay the caller's to read."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from onnx_text import parsed
from sample_models.step_graphs import W, assert_same, step_graph, step_inputs

from rlx_ort import Device, DType, Graph, InputError, Session, from_onnx
from rlx_ort.ir.ops.leaf import Input
from rlx_ort.ir.types import SequenceType, Shape, TensorType

RNG = np.random.default_rng(11)


def test_slots_and_raw_runs_equal_plain_ones(device: Device) -> None:
    """Runs through bound buffers return the same, at the first call, the second, and after a change of shape."""
    compiled = Session(device).compile(step_graph())
    for rows in (3, 3, 5, 3):
        (inputs,) = step_inputs(rows=rows)
        expected = compiled.run(inputs)
        for found in (compiled.run_slots(list(inputs.values())), compiled.run_raw(inputs)):
            for got, want in zip(found, expected, strict=True):
                assert_same(device, got, want)
    assert compiled.supports_run_slots
    assert "run_slots" in compiled.capabilities()


def test_slots_write_to_the_same_buffers() -> None:
    """On the CPU the arrays returned are the bound ones, and a plain run leaves them alone."""
    compiled = Session("cpu").compile(step_graph())
    first, second, third = step_inputs(3)
    compiled.run_slots(list(first.values()))
    view = compiled.run_slots(list(first.values()))[0]
    kept = view.copy()
    compiled.run(second)
    np.testing.assert_array_equal(view, kept)
    again = compiled.run_slots(list(third.values()))[0]
    assert again is view
    assert compiled.slot_views()[0] is view
    np.testing.assert_array_equal(view, compiled.run(third)[0])


def test_slots_copy_their_inputs() -> None:
    """An array that its owner writes to after the call changes nothing of the results."""
    compiled = Session("cpu").compile(step_graph())
    (inputs,) = step_inputs()
    arrays = list(inputs.values())
    compiled.run_slots(arrays)
    expected = compiled.run(inputs)[0]
    found = compiled.run_slots(arrays)[0]
    arrays[0][:] = 0
    np.testing.assert_array_equal(found, expected)


def test_large_inputs_go_through_slots_without_a_copy() -> None:
    """Inputs too large to copy are bound where they are; each run reads the array of its call."""
    graph = Graph("large")
    x = graph.input("x", ["n"])
    graph.outputs = [x + x]
    compiled = Session("cpu").compile(graph)
    for value in (1.0, 2.0, 3.0):
        array = np.full(50_000, value, np.float32)
        np.testing.assert_array_equal(compiled.run_slots([array])[0], array * 2)


def test_slots_take_outputs_of_any_size() -> None:
    """An output whose size depends on the data is not bound, and right in every run."""
    graph = Graph("nonzero")
    x = graph.input("x", [4])
    kind = TensorType(DType.I64, Shape([1, "found"]))
    graph.outputs = list(graph.onnx_node("NonZero", [x], types=[kind], name="nz"))
    compiled = Session("cpu").compile(graph)
    for values in ([1, 0, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]):
        array = np.array(values, np.float32)
        np.testing.assert_array_equal(compiled.run_slots([array])[0], [np.flatnonzero(array)])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([np.zeros((3, 4), np.float32)], "2 inputs"),
        ([np.zeros((3, 4), np.float32)] * 3, "2 inputs"),
        ([np.zeros((3, 4), np.float32), np.zeros((3, 5), np.float32)], "'out0'"),
        ([np.zeros((3, 4), np.float32), np.zeros((2, 4), np.float32)], "'n'"),
        ([np.zeros((3, 4), np.float32), np.zeros((3, 4), np.float64)], "f32"),
        ([np.zeros((3, 4), np.float32), None], "None"),
    ],
)
@pytest.mark.parametrize("warm", [False, True])
def test_wrong_slots_are_refused(arrays: list[Any], message: str, warm: bool) -> None:
    """Too few, too many, or of another type: an InputError before and after the buffers are bound."""
    compiled = Session("cpu").compile(step_graph())
    if warm:
        for _ in range(2):
            compiled.run_slots([np.zeros((3, 4), np.float32)] * 2)
    with pytest.raises(InputError, match=message):
        compiled.run_slots(arrays)


def test_many_small_inputs_give_new_outputs_every_time() -> None:
    """Above 64 inputs runs go through pooled buffers; results are right, their own, and follow shapes and weights."""
    graph = Graph("many")
    inputs = [graph.input(f"in{index}", ["n", 4]) for index in range(80)]
    w = graph.param("w", [4, 4], data=W)
    graph.outputs = [graph.concat(inputs, 0) @ w]
    compiled = Session("cpu").compile(graph)
    single = Session("cpu").compile(graph, compiled.weights)
    kept = []
    for rows, scale in ((1, 1), (1, 1), (2, 1), (2, 3), (1, 3)):
        compiled.set_param("w", W * scale)
        feeds = {f"in{index}": RNG.standard_normal((rows, 4)).astype(np.float32) for index in range(80)}
        stacked = np.concatenate(list(feeds.values()))
        found = compiled.run(feeds)[0]
        again = compiled.run(feeds)[0]
        np.testing.assert_array_equal(found, again)
        np.testing.assert_allclose(found, stacked.astype(np.float64) @ (W * scale), rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(found, single.run_raw(feeds)[0])
        kept.append((found, found.copy()))
    for found, copy in kept:
        np.testing.assert_array_equal(found, copy)


def test_many_small_inputs_from_many_threads() -> None:
    """Runs side by side, with shapes that differ, take buffers of their own."""
    graph = Graph("many")
    inputs = [graph.input(f"in{index}", ["n"]) for index in range(70)]
    graph.outputs = [graph.concat(inputs, 0)]
    compiled = Session("cpu").compile(graph)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        rows = 1 + seed % 2
        feeds = {f"in{index}": np.full(rows, seed * 100 + index, np.float32) for index in range(70)}
        expected = np.concatenate(list(feeds.values()))
        for _ in range(200):
            found = compiled.run(feeds)[0]
            if not np.array_equal(found, expected):
                wrong.append(found)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert not wrong


def test_slots_follow_a_change_of_parameters(device: Device) -> None:
    """Buffers are bound again when the session is opened again."""
    compiled = Session(device).compile(step_graph())
    (inputs,) = step_inputs()
    compiled.run_slots(list(inputs.values()))
    compiled.run_slots(list(inputs.values()))
    compiled.set_param("w", W * 2)
    found = compiled.run_slots(list(inputs.values()))[0].copy()
    assert_same(device, found, compiled.run(inputs)[0])


def test_addresses_are_those_of_the_buffers() -> None:
    """`arena_ptr` has nothing before the first run, then where each output of the last one stands."""
    compiled = Session("cpu").compile(step_graph())
    assert compiled.arena_ptr() == []
    arrays = [np.ones((3, 4), np.float32), np.ones((3, 4), np.float32)]
    views = [compiled.run_slots(arrays) for _ in range(2)][1]
    assert compiled.arena_ptr() == [(view.__array_interface__["data"][0], 48) for view in views]


def test_an_address_is_valid_until_the_next_run(device: Device) -> None:
    """It is that of the outputs of the last run, wherever the device has put them."""
    compiled = Session(device).compile(step_graph())
    for number in (1.0, 2.0, 3.0):
        found = compiled.run_slots([np.full((3, 4), number, np.float32)] * 2)
        for (address, nbytes), array in zip(compiled.arena_ptr(), found, strict=True):
            assert ctypes.string_at(address, nbytes) == array.tobytes()


@pytest.mark.parametrize("call", [lambda c: c.arena_ptr(), lambda c: c.run_dlpack({"x": np.ones(3, np.float32)})])
def test_an_output_without_a_buffer_has_no_address_and_no_capsule(call: Any) -> None:
    """A sequence is refused by name, and what else the graph returns stays readable."""
    graph = Graph("sequence")
    x = graph.input("x", [3])
    (pair,) = graph.onnx_node("SequenceConstruct", [x, x], types=[SequenceType(TensorType(DType.F32, Shape([3])))])
    graph.set_outputs([pair, x + x], ["pair", "double"])
    compiled = Session("cpu").compile(graph)
    compiled.run_slots([np.ones(3, np.float32)])
    with pytest.raises(InputError, match="output 'pair' is seq"):
        call(compiled)
    assert compiled.slot_views()[1].tolist() == [2.0] * 3


def test_the_first_run_leaves_its_outputs_in_the_buffers(device: Device) -> None:
    """What the first call returns is right, and on the CPU it is the memory that later calls write to."""
    compiled = Session(device).compile(step_graph())
    first, second = step_inputs(2)
    expected = compiled.run(first)
    found = compiled.run_slots(list(first.values()))
    for got, want in zip(found, expected, strict=True):
        assert_same(device, got, want)
    before = compiled.arena_ptr()
    compiled.run_slots(list(second.values()))
    if device == Device.CPU:
        assert compiled.arena_ptr() == before
    assert_same(device, compiled.read_output_row(1, 2, 4), compiled.run(second)[1][2])


def test_slots_keep_the_order_of_outputs_of_known_and_unknown_sizes(device: Device) -> None:
    """Whatever sizes are fixed, each result comes at the place of its output, in runs of two sizes in turns."""
    graph = Graph("mixed")
    x, start, end = graph.input("x", ["n"]), graph.input("start", [1], "i64"), graph.input("end", [1], "i64")
    kind = TensorType(DType.F32, Shape(["k"]))
    part, other = (graph.onnx_node("Slice", [of, start, end], types=[kind])[0] for of in (x, graph.neg(x)))
    graph.set_outputs([part, graph.mul(x, 10.0), other, graph.add(x, 1.0)], ["part", "ten", "other", "one"])
    compiled = Session(device).compile(graph)
    for size, count in ((4, 2), (4, 4), (4, 1), (6, 2), (6, 3), (4, 2), (4, 3)):
        array = RNG.standard_normal(size).astype(np.float32)
        given = {"x": array, "start": np.array([0]), "end": np.array([count])}
        wanted = [array[:count], array * np.float32(10), -array[:count], array + np.float32(1)]
        for found in (compiled.run_slots(list(given.values())), compiled.run_raw(given)):
            for got, want in zip(found, wanted, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-6)


def test_an_output_buffer_may_be_the_next_input() -> None:
    """A run that is fed what the last one returned reads it whole before anything is written over it."""
    graph = Graph("power")
    x = graph.input("x", [200, 200])
    graph.outputs = [graph.softmax(graph.transpose(x, [1, 0]) @ x)]
    compiled, plain = Session("cpu").compile(graph), Session("cpu").compile(graph)
    value = RNG.standard_normal((200, 200)).astype(np.float32)
    wanted = value
    for _ in range(4):
        (value,), (wanted,) = compiled.run_slots([value]), plain.run({"x": wanted})
        np.testing.assert_array_equal(value, wanted)


def test_rows_of_a_clone_stay_those_of_its_own_last_run() -> None:
    """A clone made after a run through buffers does not see what the original writes to them later."""
    graph = Graph("rows")
    x = graph.input("x", [2, 3])
    graph.outputs = [graph.mul(x, 2.0)]
    compiled = Session("cpu").compile(graph)
    for _ in range(2):
        compiled.run_slots([np.full((2, 3), 1, np.float32)])
    twin = compiled.clone()
    compiled.run_slots([np.full((2, 3), 7, np.float32)])
    np.testing.assert_array_equal(twin.read_output_row(0, 1, 3), [2, 2, 2])
    np.testing.assert_array_equal(compiled.read_output_row(0, 1, 3), [14, 14, 14])


def test_slots_take_sequences_like_plain_runs() -> None:
    """A graph whose values no buffer holds runs by position as well, and its outputs come as they do from `run`."""
    graph = Graph("sequence")
    kind = TensorType(DType.F32, Shape([None]))
    given = graph.add_node(Input("items", SequenceType(kind)), (), name="items")[0]
    graph.outputs = list(
        graph.onnx_node("SequenceInsert", [given, graph.input("x", ["n"])], types=[SequenceType(kind)])
    )
    compiled = Session("cpu").compile(graph)
    items, x = [np.ones(2, np.float32), np.zeros(3, np.float32)], np.full(1, 5, np.float32)
    for _ in range(2):
        for (found,) in (compiled.run_slots([items, x]), compiled.run_raw({"items": items, "x": x})):
            assert [array.tolist() for array in found] == [[1, 1], [0, 0, 0], [5]]
    assert not compiled.supports_run_slots


def test_slots_take_outputs_of_another_shape_than_declared() -> None:
    """Converters of classifiers declare labels `[1]` for any number of rows; all rows come, in every run."""
    text = (
        "(float[n,2] x) => (int64[1] label, float[n,2] y) { label = ArgMax <axis = 1, keepdims = 0> (x) y = Neg (x) }"
    )
    compiled = Session("cpu").compile(from_onnx(parsed(text)))
    for rows in (3, 3, 3, 1, 1, 4, 4, 3):
        x = RNG.standard_normal((rows, 2)).astype(np.float32)
        for label, y in (compiled.run_slots([x]), compiled.run_raw({"x": x})):
            np.testing.assert_array_equal(label, x.argmax(1))
            np.testing.assert_array_equal(y, -x)
