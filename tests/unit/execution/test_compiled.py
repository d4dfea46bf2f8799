"""`Session` and `CompiledGraph` on a provider that computes in numpy."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx_ort.device import Device
from rlx_ort.errors import DeviceUnavailableError, EngineError, InputError, ParamError, PlacementError, RunError
from rlx_ort.execution.session import Session
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.options.compile_options import CompileOptions, PlacementRule

ONES = np.ones((4, 3), np.float32)
X = np.arange(8, dtype=np.float32).reshape(2, 4)
Y = X @ ONES
Build = Callable[..., Graph]


@pytest.mark.usefixtures("providers")
def test_a_session_knows_its_device_and_precision() -> None:
    """A name becomes a device; the default precision is f32."""
    session = Session("cuda")
    assert (session.device, session.precision.value) == (Device.CUDA, "f32")


def test_a_session_on_a_device_that_does_not_work_is_refused(providers: Any) -> None:
    """The error has the device, the reason of the probe and its remedy, at construction."""
    providers["cuda"].probe_failure = "no driver"
    with pytest.raises(DeviceUnavailableError, match="CUDA is not available: no driver"):
        Session("cuda")


@pytest.mark.usefixtures("providers")
def test_a_session_on_a_device_nobody_serves_is_refused() -> None:
    """A known kind without a provider is unavailable, with a remedy."""
    with pytest.raises(DeviceUnavailableError, match="register_provider"):
        Session("tpu")


def test_the_engine_opens_at_compile_when_every_param_is_set(providers: Any, matmul_graph: Build) -> None:
    """With all data there, compile opens the session, and runs open no other."""
    compiled = Session("cpu").compile(matmul_graph(ONES))
    assert providers["cpu"].opened == 1
    np.testing.assert_array_equal(compiled.run({"x": X})[0], Y)
    compiled.run({"x": X})
    assert providers["cpu"].opened == 1


def test_the_engine_opens_at_the_first_run_otherwise(providers: Any, matmul_graph: Build) -> None:
    """An unset parameter is an error that names it; once set, the run opens the session."""
    compiled = Session("cpu").compile(matmul_graph())
    with pytest.raises(ParamError, match="'w' is not set"):
        compiled.run({"x": X})
    with pytest.raises(ParamError, match="'w' is not set"):
        _ = compiled.placement
    compiled.set_param("w", ONES)
    np.testing.assert_array_equal(compiled.run({"x": X})[0], Y)
    assert providers["cpu"].opened == 1


def test_a_param_set_after_a_run_counts_from_the_next_run_on(providers: Any, matmul_graph: Build) -> None:
    """The stale session is replaced, and the old one is closed."""
    compiled = Session("cpu").compile(matmul_graph(ONES))
    compiled.run({"x": X})
    compiled.set_param("w", ONES * 2)
    np.testing.assert_array_equal(compiled.run({"x": X})[0], Y * 2)
    compiled.set_param_typed("w", (ONES * 3).tobytes(), "f32")
    np.testing.assert_array_equal(compiled.run({"x": X})[0], Y * 3)
    assert (providers["cpu"].opened, providers["cpu"].sessions) == (3, 1)


def test_several_params_in_a_block_open_one_session(providers: Any, matmul_graph: Build) -> None:
    """A block of changes opens one session, and a block that fails opens none."""
    compiled = Session("cpu").compile(matmul_graph(ONES))
    with compiled.update_params():
        compiled.set_param("w", ONES * 5)
        compiled.set_param("w", ONES * 2)
    np.testing.assert_array_equal(compiled.run({"x": X})[0], Y * 2)
    with pytest.raises(ParamError), compiled.update_params():  # noqa: PT012  # the first call must succeed
        compiled.set_param("w", ONES * 9)
        compiled.set_param("w", ONES[:1])
    np.testing.assert_array_equal(compiled.run({"x": X})[0], Y * 2)
    assert providers["cpu"].opened == 2


def test_no_run_sees_a_mixture_of_versions(providers: Any, matmul_graph: Build) -> None:
    """While weights change, every result belongs to one version, and sessions close after their last run."""
    compiled = Session("cpu").compile(matmul_graph(ONES))
    stop = threading.Event()
    wrong: list[Any] = []

    def run_on() -> None:
        try:
            while not stop.is_set():
                result = compiled.run({"x": X})[0]
                if not np.array_equal(result, Y * (result[0, 0] / Y[0, 0])):
                    wrong.append(result)
        except (RunError, AssertionError) as err:
            wrong.append(err)

    threads = [threading.Thread(target=run_on) for _ in range(3)]
    for thread in threads:
        thread.start()
    for factor in range(1, 60):
        compiled.set_param("w", ONES * factor)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    np.testing.assert_array_equal(compiled.run({"x": X})[0], Y * 59)
    gc.collect()
    assert providers["cpu"].sessions == 1


def test_a_set_param_that_touches_another_model_rebuilds_nothing(providers: Any, matmul_graph: Build) -> None:
    """Only weights that the model uses make its session stale."""
    graph = matmul_graph(ONES)
    graph.param("unused", [1])
    compiled = Session("cpu").compile(graph)
    compiled.set_param("unused", [1.0])
    compiled.run({"x": X})
    assert providers["cpu"].opened == 1


def test_weights_in_use_cannot_be_released(providers: Any, matmul_graph: Build) -> None:
    """An open session pins its weights; a closed one does not."""
    compiled = Session("cpu").compile(matmul_graph(ONES))
    with pytest.raises(ParamError, match="in use"):
        compiled.weights.release("w")
    compiled.close()
    compiled.weights.release("w")
    assert providers["cpu"].sessions == 0


def test_strict_refuses_nodes_elsewhere_at_compile(providers: Any, matmul_graph: Build) -> None:
    """A named device is strict by default: the stray is named, and the refused session is closed."""
    providers["cuda"].takes = lambda node: False
    with pytest.raises(PlacementError, match="'mm'"):
        Session("cuda").compile(matmul_graph(ONES))
    assert providers["cuda"].sessions == 0


def test_strict_refuses_at_the_first_run_when_params_came_late(providers: Any, matmul_graph: Build) -> None:
    """A graph compiled without its weights is judged when its session opens."""
    providers["cuda"].takes = lambda node: False
    compiled = Session("cuda").compile(matmul_graph())
    compiled.set_param("w", ONES)
    for _ in range(2):
        with pytest.raises(PlacementError):
            compiled.run({"x": X})
    assert (providers["cuda"].opened, providers["cuda"].sessions) == (1, 0)


def test_assisted_is_an_option_of_a_named_device(providers: Any, matmul_graph: Build) -> None:
    """Under the assisted rule a graph that is partly on the CPU runs, and the placement lists its nodes there."""
    graph = matmul_graph(ONES)
    graph.outputs = [graph.outputs[0], *graph.onnx_node("Relu", [graph.outputs[0]], types=[graph.outputs[0].type])]
    providers["cuda"].takes = lambda node: node.op_type == "MatMul"
    compiled = Session("cuda", CompileOptions(placement=PlacementRule.ASSISTED)).compile(graph)
    assert (compiled.placement.requested_share, compiled.placement.boundary_copies) == (0.5, 1)


def test_outputs_can_be_picked(providers: Any, matmul_graph: Build) -> None:
    """The listed outputs come in the listed order, duplicates kept; None is all and a wrong index is refused."""
    graph = matmul_graph(ONES)
    graph.set_outputs([graph.outputs[0]] * 3, ["a", "b", "c"])
    compiled = Session("cpu").compile(graph)
    assert len(compiled.run_read_outputs({"x": X})) == 3
    assert len(compiled.run_read_outputs({"x": X}, [2, 0, 2])) == 3
    assert compiled.run_read_outputs({"x": X}, []) == []
    for index in (3, -1):
        with pytest.raises(InputError, match=f"no output {index}"):
            compiled.run_read_outputs({"x": X}, [0, index])


@pytest.mark.usefixtures("providers")
def test_rows_of_the_last_run_can_be_read(matmul_graph: Build) -> None:
    """Rows are counted in elements of the last run's output; what was not read or does not exist is None."""
    graph = matmul_graph(ONES)
    graph.set_outputs([graph.outputs[0]] * 2, ["a", "b"])
    compiled = Session("cpu").compile(graph)
    assert compiled.read_output_row(0, 0, 3) is None
    compiled.run({"x": X})
    np.testing.assert_array_equal(compiled.read_output_row(1, 1, 3), Y[1])
    for out, row, inner in ((0, 2, 3), (2, 0, 3), (0, -1, 3), (0, 0, 0), (0, 0, 7), (-1, 0, 3)):
        assert compiled.read_output_row(out, row, inner) is None
    compiled.run_read_outputs({"x": X + 1}, [1])
    assert compiled.read_output_row(0, 0, 3) is None
    np.testing.assert_array_equal(compiled.read_output_row(1, 0, 3), (X + 1)[0] @ ONES)


@pytest.mark.usefixtures("providers")
def test_typed_runs_take_and_give_bytes(matmul_graph: Build) -> None:
    """The batch size is inferred from the number of bytes, and outputs have the declared or the requested dtype."""
    compiled = Session("cpu").compile(matmul_graph(ONES))
    halves = {"x": (X.astype(np.float16).tobytes(), "f16")}
    assert compiled.run_typed(halves) == [(Y.tobytes(), DType.F32)]
    assert compiled.run_typed(halves, ["u8"]) == [(Y.astype(np.uint8).tobytes(), DType.U8)]
    with pytest.raises(InputError, match="lose values"):
        compiled.run_typed({"x": (X.astype(np.float64).tobytes(), "f64")})
    with pytest.raises(InputError, match="1 outputs"):
        compiled.run_typed(halves, ["u8", "u8"])


@pytest.mark.usefixtures("providers")
def test_wrong_inputs_are_refused_before_the_engine(matmul_graph: Build) -> None:
    """A run without inputs names what is missing."""
    compiled = Session("cpu").compile(matmul_graph(ONES))
    with pytest.raises(InputError, match="'x'"):
        compiled.run()


def test_a_failed_run_leaves_the_graph_usable(providers: Any, matmul_graph: Build) -> None:
    """An engine error is raised as it is, and the next run may work."""
    compiled = Session("cpu").compile(matmul_graph(ONES))
    providers["cpu"].run_failure = "out of memory"
    with pytest.raises(EngineError, match="out of memory"):
        compiled.run({"x": X})
    providers["cpu"].run_failure = ""
    np.testing.assert_array_equal(compiled.run({"x": X})[0], Y)


def test_a_closed_graph_refuses_to_run(providers: Any, matmul_graph: Build) -> None:
    """Leaving the `with` block closes the session; closing twice is harmless."""
    with Session("cpu").compile(matmul_graph(ONES)) as compiled:
        compiled.run({"x": X})
    compiled.close()
    assert providers["cpu"].sessions == 0
    with pytest.raises(RunError, match="closed"):
        compiled.run({"x": X})
    assert "closed" in repr(compiled)


@pytest.mark.usefixtures("providers")
def test_the_returned_list_is_the_callers(matmul_graph: Build) -> None:
    """Emptying the returned list does not disturb `read_output_row`."""
    compiled = Session("cpu").compile(matmul_graph(ONES))
    compiled.run({"x": X}).clear()
    np.testing.assert_array_equal(compiled.read_output_row(0, 0, 3), Y[0])


@pytest.mark.usefixtures("providers")
def test_specs_tell_the_declared_types(matmul_graph: Build) -> None:
    """Input and output specs name the declared types, with bound dims as sizes."""
    compiled = Session("cpu", CompileOptions(dims={"n": 2})).compile(matmul_graph(ONES))
    assert {name: str(kind) for name, kind in compiled.input_specs.items()} == {"x": "f32(2, 4)"}
    with pytest.raises(InputError):
        compiled.run({"x": X[:1]})
