"""Parameters that change often: no new session, one copy on a device, and never a mixture of versions."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rlx_ort import Device, Graph, InputError, ParamError, Session
from rlx_ort.execution.weights import WeightStore
from rlx_ort.ir.serde import from_json, to_json

X = np.arange(8, dtype=np.float32).reshape(2, 4)


def _graph() -> Graph:
    graph = Graph("mutable")
    x = graph.input("x", ["n", 4])
    w = graph.param("w", [4, 3], data=np.ones((4, 3), np.float32))
    b = graph.param("b", [3], data=np.zeros(3, np.float32), mutable=True)
    graph.outputs = [x @ w + b]
    return graph


def test_a_mutable_parameter_changes_without_a_new_session(device: Device) -> None:
    """The run after the change has the new value, in the session that was open before."""
    compiled = Session(device).compile(_graph())
    np.testing.assert_allclose(compiled.run({"x": X})[0], X @ np.ones((4, 3)), rtol=1e-6)
    engine = compiled._slot.current
    compiled.set_param("b", [1.0, 2.0, 3.0])
    np.testing.assert_allclose(compiled.run({"x": X})[0], X @ np.ones((4, 3)) + [1, 2, 3], rtol=1e-6)
    assert compiled._slot.current is engine


def test_a_frozen_parameter_still_opens_a_new_session(device: Device) -> None:
    """And the new session is fed the mutable one as well."""
    compiled = Session(device).compile(_graph())
    compiled.set_param("b", [1.0, 2.0, 3.0])
    compiled.run({"x": X})
    compiled.set_param("w", np.full((4, 3), 2, np.float32))
    np.testing.assert_allclose(compiled.run({"x": X})[0], 2 * X @ np.ones((4, 3)) + [1, 2, 3], rtol=1e-6)


def test_a_mutable_parameter_is_no_input_of_a_run() -> None:
    """The caller neither sees nor may feed it."""
    compiled = Session("cpu").compile(_graph())
    assert list(compiled.input_specs) == ["x"]
    with pytest.raises(InputError, match="no input 'b'"):
        compiled.run({"x": X, "b": np.zeros(3, np.float32)})


def test_an_unset_mutable_parameter_is_named() -> None:
    """A run without its data raises."""
    graph = Graph("unset")
    graph.outputs = [graph.input("x", [3]) + graph.param("bias", [3], mutable=True)]
    compiled = Session("cpu").compile(graph)
    with pytest.raises(ParamError, match="'bias' is not set"):
        compiled.run({"x": np.zeros(3, np.float32)})


def test_mutability_survives_json() -> None:
    """A graph that is written and read again keeps the declaration."""
    text, tensors = to_json(_graph())
    params = {value.name: value.node.op for value in from_json(text, tensors).params}
    assert [getattr(op, "mutable", None) for op in params.values()] == [False, True]


def test_an_exported_file_holds_mutable_parameters_as_weights() -> None:
    """Only sessions of this library take them as inputs; a model file contains them."""
    from rlx_ort.converters.to_onnx import to_onnx

    model = to_onnx(_graph())
    assert [value.name for value in model.graph.input] == ["x"]
    assert {tensor.name for tensor in model.graph.initializer} >= {"w", "b"}


def test_two_sessions_of_a_device_share_the_uploaded_tensor() -> None:
    """Two graphs over one store see the same change."""
    graph = _graph()
    store = WeightStore.for_graph(graph)
    first, second = (Session("cpu").compile(graph, store) for _ in range(2))
    store.set("b", [5.0, 5.0, 5.0])
    np.testing.assert_array_equal(first.run({"x": X})[0], second.run({"x": X})[0])


@pytest.mark.parametrize("frozen_changes", [False, True], ids=["mutable", "both"])
def test_no_run_mixes_versions(frozen_changes: bool) -> None:
    """With 8 threads running while versions change, each result is that of one version."""
    graph = Graph("storm")
    x = graph.input("x", [1])
    first = graph.param("first", [1], data=np.zeros(1, np.float32), mutable=True)
    second = graph.param("second", [1], data=np.zeros(1, np.float32), mutable=not frozen_changes)
    graph.outputs = [x * 0.0 + first, x * 0.0 + second]
    compiled = Session("cpu").compile(graph)
    ended = threading.Event()
    seen: list[tuple[float, float]] = []

    def run() -> None:
        while not ended.is_set():
            left, right = compiled.run({"x": np.zeros(1, np.float32)})
            seen.append((float(left[0]), float(right[0])))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    updates = 40 if frozen_changes else 1000
    for version in range(1, updates + 1):
        with compiled.update_params():
            compiled.set_param("first", [float(version)])
            compiled.set_param("second", [float(version)])
    ended.set()
    for thread in threads:
        thread.join()
    mixed = [pair for pair in seen if pair[0] != pair[1]]
    assert seen
    assert not mixed
    assert [float(out[0]) for out in compiled.run({"x": np.zeros(1, np.float32)})] == [updates, updates]


def test_a_clone_shares_the_session_and_outlives_the_original(device: Device) -> None:
    """Closing one leaves the other open, and both see changes of the weights."""
    compiled = Session(device).compile(_graph())
    compiled.run({"x": X})
    clone = compiled.clone()
    assert clone._slot.current is compiled._slot.current
    compiled.close()
    clone.set_param("b", [1.0, 1.0, 1.0])
    np.testing.assert_allclose(clone.run({"x": X})[0], X @ np.ones((4, 3)) + 1, rtol=1e-6)
