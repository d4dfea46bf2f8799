"""`Session` and `CompiledGraph` on a provider that computes in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlx_ort import Device, DeviceUnavailableError, DType, Graph, InputError, ParamError, PlacementError, Session

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


def test_a_set_param_that_touches_another_model_rebuilds_nothing(providers: Any, matmul_graph: Build) -> None:
    """Only weights that the model uses make its session stale."""
    graph = matmul_graph(ONES)
    graph.param("unused", [1])
    compiled = Session("cpu").compile(graph)
    compiled.set_param("unused", [1.0])
    compiled.run({"x": X})
    assert providers["cpu"].opened == 1


def test_strict_refuses_at_the_first_run_when_params_came_late(providers: Any, matmul_graph: Build) -> None:
    """A graph compiled without its weights is judged when its session opens."""
    providers["cuda"].takes = lambda node: False
    compiled = Session("cuda").compile(matmul_graph())
    compiled.set_param("w", ONES)
    for _ in range(2):
        with pytest.raises(PlacementError):
            compiled.run({"x": X})
    assert (providers["cuda"].opened, providers["cuda"].sessions) == (1, 0)


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
