"""Every way to run a graph gives what a plain run gives: bit for bit on the CPU, within 1e-6 elsewhere."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rlx_ort.device import Device
from rlx_ort.errors import EngineError, InputError, RlxError
from rlx_ort.execution.device_tensor import DeviceTensor
from rlx_ort.execution.options import CompileOptions
from rlx_ort.execution.session import Session
from rlx_ort.ir.graph import Graph
from rlx_ort.providers import registry

RNG = np.random.default_rng(11)
W = RNG.standard_normal((4, 4)).astype(np.float32)


def _step() -> Graph:
    """Return a recurrent step: `out0` is the new state `tanh(state @ w + x)`, out1 its double."""
    graph = Graph("step")
    x = graph.input("x", ["n", 4])
    state = graph.input("out0", ["n", 4])
    w = graph.param("w", [4, 4], data=W)
    new = graph.tanh(state @ w + x)
    graph.outputs = [new, new + new]
    return graph


def _growing() -> Graph:
    """Return a cache that grows: the first output is `cache` with `row` behind it, the second its sum by column."""
    graph = Graph("growing")
    cache = graph.input("cache", ["past", 4])
    row = graph.input("row", [1, 4])
    both = graph.concat([cache, row], 0)
    graph.outputs = [both, both.sum([0])]
    return graph


def _inputs(count: int = 1, rows: int = 3) -> list[dict[str, Any]]:
    return [{name: RNG.standard_normal((rows, 4)).astype(np.float32) for name in ("x", "out0")} for _ in range(count)]


def _same(device: Device, found: Any, expected: Any) -> None:
    if device == Device.CPU:
        np.testing.assert_array_equal(found, expected)
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_slots_and_raw_runs_equal_plain_ones(device: Device) -> None:
    """Runs through bound buffers give the same, at the first call, the second, and after a change of shape."""
    compiled = Session(device).compile(_step())
    for rows in (3, 3, 5, 3):
        (inputs,) = _inputs(rows=rows)
        expected = compiled.run(inputs)
        for found in (compiled.run_slots(list(inputs.values())), compiled.run_raw(inputs)):
            for got, want in zip(found, expected, strict=True):
                _same(device, got, want)
    assert compiled.supports_run_slots
    assert "run_slots" in compiled.capabilities()


def test_slots_write_to_the_same_buffers() -> None:
    """On the CPU the arrays returned are the bound ones, and a plain run leaves them alone."""
    compiled = Session("cpu").compile(_step())
    first, second, third = _inputs(3)
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
    compiled = Session("cpu").compile(_step())
    (inputs,) = _inputs()
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
    from rlx_ort.ir.dtype import DType
    from rlx_ort.ir.shape import Shape
    from rlx_ort.ir.types import TensorType

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
    compiled = Session("cpu").compile(_step())
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

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_slots_follow_a_change_of_parameters(device: Device) -> None:
    """Buffers are bound anew when the session is opened again."""
    compiled = Session(device).compile(_step())
    (inputs,) = _inputs()
    compiled.run_slots(list(inputs.values()))
    compiled.run_slots(list(inputs.values()))
    compiled.set_param("w", W * 2)
    found = compiled.run_slots(list(inputs.values()))[0].copy()
    _same(device, found, compiled.run(inputs)[0])


def test_host_handles_equal_a_loop_by_hand(device: Device) -> None:
    """A handle named `out0` feeds the input of that name with output 0 of the run before."""
    compiled = Session(device).compile(_step())
    steps = _inputs(4)
    state = steps[0]["out0"]
    expected = []
    for step in steps:
        state = compiled.run({"x": step["x"], "out0": state})[0]
        expected.append(state)
    compiled.bind_handle("out0", steps[0]["out0"])
    for step, want in zip(steps, expected, strict=True):
        _same(device, compiled.run({"x": step["x"]})[0], want)
    _same(device, compiled.read_handle("out0"), expected[-1])


def test_device_handles_equal_a_loop_by_hand(device: Device) -> None:
    """A state that stays on the device gives what one fed from the host gives, parameters changing in between."""
    compiled = Session(device).compile(_step())
    steps = _inputs(6)
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
        _same(device, compiled.run_feed_gpu_handle({"x": step["x"]}, "out0", 0), want)
    _same(device, compiled.read_gpu_handle("out0"), expected[-1])


def test_a_device_handle_may_grow(device: Device) -> None:
    """A cache grows by a row in each run, on the device, and holds all rows in the end."""
    compiled = Session(device).compile(_growing())
    rows = RNG.standard_normal((5, 1, 4)).astype(np.float32)
    compiled.bind_gpu_handle("cache", rows[0])
    compiled.set_gpu_handle_feed("cache", 0)
    for count, row in enumerate(rows[1:], start=2):
        (total,) = compiled.run_read_outputs({"row": row}, [1])
        np.testing.assert_allclose(
            total.reshape(-1), rows[:count, 0].sum(axis=0, dtype=np.float64), rtol=1e-5, atol=1e-6
        )
    np.testing.assert_array_equal(compiled.read_gpu_handle("cache"), rows[:, 0])


def test_a_run_never_writes_to_the_handle_it_reads(device: Device) -> None:
    """A tensor bound as a handle keeps its elements while outputs move into the handle."""
    first = Session(device).compile(_step())
    (inputs,) = _inputs()
    tensor = first.run_dlpack(inputs)[0]
    before = tensor.numpy()
    second = Session(device).compile(_step())
    second.bind_gpu_handle("out0", tensor)
    second.set_gpu_handle_feed("out0", 0)
    for _ in range(3):
        second.run({"x": inputs["x"]})
    np.testing.assert_array_equal(tensor.numpy(), before)
    assert not np.array_equal(second.read_gpu_handle("out0"), before)


def test_an_input_that_is_given_wins_over_its_handle(device: Device) -> None:
    """The call's own value counts, and the handle is what it was."""
    compiled = Session(device).compile(_growing())
    compiled.bind_gpu_handle("cache", np.ones((2, 4), np.float32))
    given = {"cache": np.zeros((1, 4), np.float32), "row": np.zeros((1, 4), np.float32)}
    assert compiled.run(given)[0].shape == (2, 4)
    np.testing.assert_array_equal(compiled.read_gpu_handle("cache"), np.ones((2, 4), np.float32))


def test_bf16_handles_stay_on_the_device() -> None:
    """Element types that numpy does not know go into handles and come out of them."""
    graph = Graph("bf16")
    x = graph.input("x", [3], "bf16")
    graph.outputs = [x.cast("f32").cast("bf16")]
    compiled = Session("cpu").compile(graph)
    array = np.array([1, 2.5, -3], ml_dtypes.bfloat16)
    compiled.bind_gpu_handle("x", array)
    compiled.set_gpu_handle_feed("x", 0)
    np.testing.assert_array_equal(compiled.run({})[0], array)
    np.testing.assert_array_equal(compiled.read_gpu_handle("x"), array)


def test_pipelined_runs_equal_those_one_by_one(device: Device) -> None:
    """Order and results are those of single runs, overlapping or not, and an empty list gives an empty list."""
    compiled = Session(device).compile(_step())
    sets = _inputs(7)
    expected = [compiled.run(inputs) for inputs in sets]
    found = compiled.run_pipelined(sets)
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        _same(device, got[0], want[0])
        _same(device, got[1], want[1])
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
    """A graph with a state gives the states one after the other."""
    compiled = Session(device).compile(_step())
    steps = _inputs(5)
    compiled.bind_handle("out0", steps[0]["out0"])
    expected = [compiled.run({"x": step["x"]})[0] for step in steps]
    compiled.bind_handle("out0", steps[0]["out0"])
    for got, want in zip(compiled.run_pipelined([{"x": step["x"]} for step in steps]), expected, strict=True):
        _same(device, got[0], want)


def test_committed_runs_feed_handles_in_order(device: Device) -> None:
    """Runs that nobody waits for leave the state that the same runs leave when waited for."""
    compiled = Session(device).compile(_step())
    steps = _inputs(5)
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
    _same(device, compiled.read_gpu_handle("out0"), expected)


def test_errors_of_committed_runs_come_when_they_are_waited_for() -> None:
    """A wrong input in the background is an InputError of `sync_pending`, and only of the first."""
    compiled = Session("cpu").compile(_step())
    compiled.commit_no_wait({"x": np.zeros((1, 4), np.float32)})
    with pytest.raises(InputError, match="'out0'"):
        compiled.sync_pending()
    compiled.sync_pending()


def test_awaited_runs_equal_plain_ones(device: Device) -> None:
    """Many awaited at once give what plain runs give."""
    compiled = Session(device).compile(_step())
    sets = _inputs(6)
    expected = [compiled.run(inputs)[0] for inputs in sets]

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(compiled.run_async(inputs) for inputs in sets))

    for got, want in zip(asyncio.run(all_of_them()), expected, strict=True):
        _same(device, got[0], want)


def test_errors_of_awaited_runs_are_typed() -> None:
    """A missing input is an InputError in the task."""
    compiled = Session("cpu").compile(_step())
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


def test_cancelling_the_task_stops_the_run() -> None:
    """The run in the thread ends early, and the graph runs on afterwards."""
    compiled = _endless()
    inputs = {"x": np.zeros((256, 256), np.float32)}
    ended = threading.Event()
    original = compiled._slot.current.session.run

    def watched(*args: Any) -> Any:
        try:
            return original(*args)
        finally:
            ended.set()

    compiled._slot.current.session.run = watched

    async def cancelled() -> None:
        task = asyncio.create_task(compiled.run_async(inputs))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert ended.wait(1.0), "the run went on after it was cancelled"


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


def test_outputs_stay_on_the_device_for_other_graphs(device: Device) -> None:
    """What `run_dlpack` returns goes into another run as it is."""
    compiled = Session(device).compile(_step())
    (inputs,) = _inputs()
    expected = compiled.run(inputs)
    tensors = compiled.run_dlpack(inputs)
    assert all(isinstance(tensor, DeviceTensor) for tensor in tensors)
    _same(device, tensors[0].numpy(), expected[0])
    again = compiled.run({"x": inputs["x"], "out0": tensors[0]})[0]
    _same(device, again, compiled.run({"x": inputs["x"], "out0": expected[0]})[0])


def test_the_cpu_shares_tensors_through_dlpack() -> None:
    """Numpy reads an output where it is, and any object with `__dlpack__` is an input."""
    compiled = Session("cpu").compile(_step())
    (inputs,) = _inputs()
    (tensor, _) = compiled.run_dlpack(inputs)
    shared = np.from_dlpack(tensor)
    np.testing.assert_array_equal(shared, compiled.run(inputs)[0])
    assert np.shares_memory(shared, np.from_dlpack(tensor))


def test_torch_tensors_go_in_and_come_out_without_a_copy() -> None:
    """A CPU tensor of torch is an input as it is, and torch reads an output where it is."""
    torch = pytest.importorskip("torch")
    compiled = Session("cpu").compile(_step())
    (inputs,) = _inputs()
    given = {name: torch.from_numpy(array) for name, array in inputs.items()}
    np.testing.assert_array_equal(compiled.run(given)[0], compiled.run(inputs)[0])
    tensor = compiled.run_dlpack(given)[0]
    assert torch.from_dlpack(tensor).data_ptr() == torch.from_dlpack(tensor).data_ptr()
    np.testing.assert_array_equal(torch.from_dlpack(tensor).numpy(), compiled.run(inputs)[0])


@pytest.mark.webgpu
def test_webgpu_tensors_refuse_dlpack_and_say_how_to_read_them() -> None:
    """WebGPU's buffers have no address to share."""
    compiled = Session("webgpu").compile(_step())
    with pytest.raises(BufferError, match=r"numpy\(\)"):
        np.from_dlpack(compiled.run_dlpack(_inputs()[0])[0])


def test_the_active_extent_runs_only_what_matters(device: Device) -> None:
    """Padded inputs give the outputs of the rows that matter, until the extent is taken back."""
    compiled = Session(device).compile(_step())
    (inputs,) = _inputs(rows=8)
    expected = compiled.run({name: array[:3] for name, array in inputs.items()})[0]
    compiled.set_active_extent((3, 8))
    _same(device, compiled.run(inputs)[0], expected)
    compiled.set_active_extent(None)
    assert compiled.run(inputs)[0].shape == (8, 4)
    with pytest.raises(InputError, match="actual"):
        compiled.set_active_extent((9, 8))


def test_a_clone_has_a_state_of_its_own(device: Device) -> None:
    """Handles are copied: what one does to its state, the other does not see."""
    compiled = Session(device).compile(_step())
    (inputs,) = _inputs()
    compiled.bind_gpu_handle("out0", inputs["out0"])
    compiled.set_gpu_handle_feed("out0", 0)
    twin = compiled.clone()
    expected = compiled.run({"x": inputs["x"]})[0]
    np.testing.assert_array_equal(twin.read_gpu_handle("out0"), inputs["out0"])
    _same(device, twin.run({"x": inputs["x"]})[0], expected)


def test_a_failed_run_leaves_the_handles_and_the_graph_usable(device: Device) -> None:
    """A wrong input beside a handle is an InputError, and the next run gives what it would have given."""
    compiled = Session(device).compile(_step())
    (inputs,) = _inputs()
    compiled.bind_gpu_handle("out0", inputs["out0"])
    compiled.set_gpu_handle_feed("out0", 0)
    with pytest.raises(RlxError):
        compiled.run({"x": np.zeros((2, 4), np.float32)})
    np.testing.assert_array_equal(compiled.read_gpu_handle("out0"), inputs["out0"])
    _same(device, compiled.run({"x": inputs["x"]})[0], Session(device).compile(_step()).run(inputs)[0])


def test_a_closed_graph_gives_typed_errors_on_every_path() -> None:
    """After close, every way to run is a typed error."""
    compiled = Session("cpu").compile(_step())
    (inputs,) = _inputs()
    compiled.run_slots(list(inputs.values()))
    compiled.close()
    for call in (
        lambda: compiled.run(inputs),
        lambda: compiled.run_slots(list(inputs.values())),
        lambda: compiled.run_raw(inputs),
        lambda: compiled.run_dlpack(inputs),
        lambda: compiled.bind_gpu_handle("out0", inputs["out0"]),
        lambda: asyncio.run(compiled.run_async(inputs)),
    ):
        with pytest.raises(RlxError, match="closed"):
            call()


@pytest.mark.webgpu
def test_a_device_graph_replays_with_new_inputs() -> None:
    """Recorded launches give new results for new inputs, on every path."""
    graph = Graph("static")
    x = graph.input("x", [2, 4])
    state = graph.input("state", [2, 4])
    graph.outputs = [graph.tanh(x + state)]
    compiled = Session("webgpu", CompileOptions(device_graph=True)).compile(graph)
    plain = Session("webgpu").compile(graph)
    for _ in range(4):
        inputs = {name: RNG.standard_normal((2, 4)).astype(np.float32) for name in ("x", "state")}
        expected = plain.run(inputs)[0]
        np.testing.assert_allclose(compiled.run(inputs)[0], expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(compiled.run_slots(list(inputs.values()))[0], expected, rtol=1e-6, atol=1e-6)
    compiled.bind_gpu_handle("state", inputs["state"])
    compiled.set_gpu_handle_feed("state", 0)
    plain.bind_gpu_handle("state", inputs["state"])
    plain.set_gpu_handle_feed("state", 0)
    for _ in range(3):
        np.testing.assert_allclose(
            compiled.run({"x": inputs["x"]})[0], plain.run({"x": inputs["x"]})[0], rtol=1e-6, atol=1e-6
        )


@pytest.mark.webgpu
def test_a_device_graph_needs_static_shapes() -> None:
    """Dims without a size are refused, with the option that binds them."""
    compiled = Session("webgpu", CompileOptions(device_graph=True)).compile(_step())
    with pytest.raises(EngineError, match="dims="):
        compiled.run(_inputs()[0])


def test_sessions_share_one_budget_of_threads() -> None:
    """All sessions together hold no more workers than there are cores for, and give them back."""
    from rlx_ort.providers.cores import core_share
    from rlx_ort.providers.threads import budget

    before = budget().granted
    graphs = [Session("cpu").compile(_step()) for _ in range(4)]
    assert budget().granted <= max(core_share().threads - 1, before)
    for compiled in graphs:
        compiled.set_param("w", W * 2)
        compiled.run(_inputs()[0])
    assert budget().granted <= max(core_share().threads - 1, before)
    for compiled in graphs:
        compiled.close()
    assert budget().granted <= before


def test_the_registry_knows_the_device(device: Device) -> None:
    """The tests above ran on the device they name."""
    assert registry.default_registry().availability(device).available
