"""Handles, slots, background runs and extents on providers that compute in numpy, without an engine's own memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx_ort import CompiledGraph, Graph, InputError, Session
from rlx_ort.providers.engine.binding import HostTensor

ONES = np.ones((4, 3), np.float32)
X = np.arange(8, dtype=np.float32).reshape(2, 4)
Y = X @ ONES
Build = Callable[..., Graph]


@pytest.fixture
def compiled(providers: Any, matmul_graph: Build) -> CompiledGraph:
    """Return `y = x @ w` compiled on a provider without device memory."""
    return Session("cpu").compile(matmul_graph(ONES))


def test_a_handle_is_the_value_of_its_input(compiled: CompiledGraph) -> None:
    """Runs that do not supply the input take it from the handle; those that do leave the handle alone."""
    compiled.bind_handle("x", X)
    np.testing.assert_array_equal(compiled.run({})[0], Y)
    np.testing.assert_array_equal(compiled.run({"x": X * 2})[0], Y * 2)
    found = compiled.read_handle("x")
    np.testing.assert_array_equal(found, X)


def test_binding_again_replaces_the_handle(compiled: CompiledGraph) -> None:
    """The value of the last call counts."""
    compiled.bind_handle("x", X)
    compiled.bind_handle("x", X * 3)
    np.testing.assert_array_equal(compiled.run({})[0], Y * 3)


@pytest.mark.parametrize("side", ["handle", "gpu_handle"])
def test_slots_and_raw_runs_ignore_handles(compiled: CompiledGraph, side: str) -> None:
    """They take all inputs from the call, refuse to run without one, and leave the handle as it was."""
    getattr(compiled, f"bind_{side}")("x", X)
    np.testing.assert_array_equal(compiled.run_slots([X * 2])[0], Y * 2)
    np.testing.assert_array_equal(compiled.run_raw({"x": X * 4})[0], Y * 4)
    for call in (lambda: compiled.run_slots([]), lambda: compiled.run_raw({})):
        with pytest.raises(InputError):
            call()
    np.testing.assert_array_equal(getattr(compiled, f"read_{side}")("x"), X)


def test_a_handle_is_a_copy(compiled: CompiledGraph) -> None:
    """Neither the array it was bound from nor the one it was read into is its memory."""
    mine = X.copy()
    compiled.bind_handle("x", mine)
    mine[:] = 0
    read = compiled.read_handle("x")
    assert read is not None
    read[:] = 0
    np.testing.assert_array_equal(compiled.run({})[0], Y)


def test_a_numbered_handle_holds_that_output(compiled: CompiledGraph) -> None:
    """A handle named `out0` is overwritten by every run, though no input has the name."""
    compiled.bind_handle("out0", np.zeros((2, 3), np.float32))
    compiled.run({"x": X})
    np.testing.assert_array_equal(compiled.read_handle("out0"), Y)


def test_a_feed_says_the_output(providers: Any) -> None:
    """A handle of any input is fed by the output its feed names, on the host and on the device."""
    for bind, feed, read in (
        ("bind_handle", "set_handle_feed", "read_handle"),
        ("bind_gpu_handle", "set_gpu_handle_feed", "read_gpu_handle"),
    ):
        graph = Graph("square")
        x = graph.input("x", [4, 4])
        w = graph.param("w", [4, 4], data=np.eye(4, dtype=np.float32) * 2)
        graph.outputs = [x @ w]
        compiled = Session("cuda").compile(graph)
        getattr(compiled, bind)("x", np.eye(4, dtype=np.float32))
        getattr(compiled, feed)("x", 0)
        for _ in range(3):
            compiled.run({})
        np.testing.assert_array_equal(getattr(compiled, read)("x"), np.eye(4) * 8)


def test_a_feed_that_a_run_set_stays(providers: Any) -> None:
    """`run_feed_gpu_handle` returns its output, and the plain runs after it feed the handle as well."""
    graph = Graph("square")
    x = graph.input("x", [4, 4])
    graph.outputs = [x @ graph.param("w", [4, 4], data=np.eye(4, dtype=np.float32) * 2)]
    compiled = Session("cuda").compile(graph)
    compiled.bind_gpu_handle("x", np.eye(4, dtype=np.float32))
    np.testing.assert_array_equal(compiled.run_feed_gpu_handle({}, "x", 0), np.eye(4) * 2)
    compiled.run({})
    np.testing.assert_array_equal(compiled.read_gpu_handle("x"), np.eye(4) * 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.bind_handle("y", X), "'x'"),
        (lambda c: c.bind_handle("out1", X), "out0"),
        (lambda c: c.bind_handle("out01", X), "out0"),
        (lambda c: c.bind_handle("x", X.astype(np.float64)), "cast"),
        (lambda c: c.bind_handle("x", X[:, :3]), "shape"),
        (lambda c: c.bind_gpu_handle("y", X), "'x'"),
        (lambda c: c.bind_gpu_handle("x", HostTensor(X[:, :3])), "float32"),
        (lambda c: c.bind_gpu_handle("x", HostTensor(X.astype(np.int32))), "int32"),
        (lambda c: c.set_handle_feed("x", 0), "bind_handle"),
        (lambda c: c.set_gpu_handle_feed("x", 0), "bind_gpu_handle"),
        (lambda c: c.run_feed_gpu_handle({"x": X}, "x", 0), "bind_gpu_handle"),
        (lambda c: (c.bind_gpu_handle("x", X), c.set_gpu_handle_feed("x", 1)), "no output 1"),
        (lambda c: (c.bind_handle("x", X), c.set_handle_feed("x", -1)), "no output -1"),
        (lambda c: c.run_slots([]), "1 inputs"),
        (lambda c: c.run_slots([X, X]), "1 inputs"),
        (lambda c: c.run_raw({}), "'x'"),
        (lambda c: c.set_active_extent((0, 4)), "actual"),
        (lambda c: c.set_active_extent((9, 8)), "actual"),
    ],
)
def test_what_was_silent_is_a_typed_error(
    compiled: CompiledGraph, call: Callable[[CompiledGraph], object], message: str
) -> None:
    """Unknown names, other types and outputs that are not there are refused by name."""
    with pytest.raises(InputError, match=message):
        call(compiled)


def test_handles_that_are_not_there_read_as_none(compiled: CompiledGraph) -> None:
    """Reading is a question, not a mistake."""
    assert compiled.read_handle("x") is None
    assert compiled.read_gpu_handle("x") is None
    assert not compiled.has_gpu_handle("x")


def test_a_handle_lives_on_one_side(compiled: CompiledGraph) -> None:
    """Binding on the other side replaces the handle and its feed."""
    compiled.bind_handle("x", X)
    compiled.bind_gpu_handle("x", X * 2)
    assert compiled.read_handle("x") is None
    np.testing.assert_array_equal(compiled.run({})[0], Y * 2)
    compiled.bind_handle("x", X)
    assert not compiled.has_gpu_handle("x")


def test_handles_survive_a_new_session(compiled: CompiledGraph) -> None:
    """A parameter that changes opens the session again, and both kinds of handles keep their values."""
    for bind in (compiled.bind_handle, compiled.bind_gpu_handle):
        compiled.set_param("w", ONES)
        bind("x", X)
        np.testing.assert_array_equal(compiled.run({})[0], Y)
        compiled.set_param("w", ONES * 3)
        np.testing.assert_array_equal(compiled.run({})[0], Y * 3)


def test_committed_runs_are_in_order_and_copy_their_inputs(compiled: CompiledGraph) -> None:
    """The last one's output is in the handle, and arrays may be reused at once."""
    compiled.bind_handle("out0", np.zeros((2, 3), np.float32))
    reused = np.empty_like(X)
    for scale in range(1, 6):
        reused[:] = X * scale
        compiled.commit_no_wait({"x": reused})
    np.testing.assert_array_equal(compiled.read_handle("out0"), Y * 5)
    compiled.sync_pending()


def test_a_tensor_of_another_dtype_is_refused(compiled: CompiledGraph) -> None:
    """Tensors on the device are checked like arrays."""
    with pytest.raises(InputError, match="int64"):
        compiled.run({"x": HostTensor(X.astype(np.int64))})
    with pytest.raises(InputError, match="shape"):
        compiled.run({"x": HostTensor(X[:, :2])})


def test_any_host_object_with_dlpack_is_an_input(compiled: CompiledGraph) -> None:
    """Objects of other libraries are shared; those on a device that is not the graph's are refused by name."""

    class Foreign:
        def __init__(self, device: int) -> None:
            self.device = device

        def __dlpack_device__(self) -> tuple[int, int]:
            return (self.device, 0)

        def __dlpack__(self, **kwargs: Any) -> Any:
            return X.__dlpack__(**kwargs)

    np.testing.assert_array_equal(compiled.run({"x": Foreign(1)})[0], Y)
    with pytest.raises(InputError, match="copy it to the host"):
        compiled.run({"x": Foreign(2)})


def test_the_extent_cuts_rows_until_it_is_taken_back(compiled: CompiledGraph) -> None:
    """Only the rows that matter are run; inputs of another size are left alone."""
    compiled.set_active_extent((1, 2))
    np.testing.assert_array_equal(compiled.run({"x": X})[0], Y[:1])
    np.testing.assert_array_equal(compiled.run({"x": np.tile(X, (2, 1))})[0], np.tile(Y, (2, 1)))
    compiled.set_active_extent(None)
    np.testing.assert_array_equal(compiled.run({"x": X})[0], Y)


def test_inputs_that_change_in_kind_are_checked_again(compiled: CompiledGraph) -> None:
    """What was right once does not let through a list, another dtype, a masked array, or another order of bytes."""
    compiled.run({"x": X})
    compiled.run({"x": X})
    np.testing.assert_array_equal(compiled.run({"x": X.tolist()})[0], Y)
    np.testing.assert_array_equal(compiled.run({"x": X.astype(">f4")})[0], Y)
    for wrong in (X.astype(np.float64), np.ma.masked_array(X, X > 3), X.reshape(-1), None):
        with pytest.raises(InputError, match="'x'"):
            compiled.run({"x": wrong})
    with pytest.raises(InputError, match="'z'"):
        compiled.run({"x": X, "z": X})
    for nothing in (lambda: compiled.run({}), compiled.run):
        with pytest.raises(InputError, match="'x'"):
            nothing()


@pytest.mark.parametrize(
    "run",
    [
        lambda compiled: compiled.run({"x": X.tolist()})[0],
        lambda compiled: compiled.run({"x": list(X)})[0],
        lambda compiled: compiled.run_dlpack({"x": X})[0].numpy(),
        lambda compiled: compiled.run_slots([X])[0],
        lambda compiled: compiled.run_raw({"x": X})[0],
        lambda compiled: compiled.run_slots([X.tolist()])[0],
        lambda compiled: compiled.run_read_outputs({"x": X}, [0])[0],
        lambda compiled: asyncio.run(compiled.run_async({"x": X}))[0],
        lambda compiled: compiled.run_pipelined([{"x": X}])[0][0],
    ],
    ids=["list", "rows", "dlpack", "slots", "raw", "slots_list", "read_outputs", "async", "pipelined"],
)
def test_every_way_to_run_keeps_to_the_extent(compiled: CompiledGraph, run: Callable[[CompiledGraph], Any]) -> None:
    """Lists are cut like arrays, and every way to run returns the rows of the extent."""
    compiled.set_active_extent((1, 2))
    np.testing.assert_array_equal(run(compiled), Y[:1])


def test_rows_on_a_device_are_not_cut(compiled: CompiledGraph) -> None:
    """A tensor on the device is run in full, which the hint allows."""
    compiled.set_active_extent((1, 2))
    np.testing.assert_array_equal(compiled.run({"x": HostTensor(X)})[0], Y)


def test_inputs_that_are_no_dict_are_refused_with_an_extent_too(compiled: CompiledGraph) -> None:
    """The error is the one of a run without an extent."""
    compiled.set_active_extent((1, 2))
    with pytest.raises(InputError, match="takes a dict"):
        compiled.run([X])  # type: ignore[arg-type]  # that is the point


def test_an_output_that_is_not_there_cannot_be_committed(compiled: CompiledGraph) -> None:
    """The index is refused at once, and nothing runs."""
    with pytest.raises(InputError, match="no output 1"):
        compiled.commit_no_wait({"x": X}, [1])
    assert compiled.sync_pending() == []
