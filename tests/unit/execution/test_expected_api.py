"""What people who know ONNX Runtime expect of a runner: descriptions, names, bytes, tensors of other libraries."""

from __future__ import annotations

import asyncio
import logging
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

import rlx_ort
from rlx_ort.device import Device
from rlx_ort.errors import CancelledRunError, InputError, PackageError, TimeLimitError
from rlx_ort.execution.session import Session
from rlx_ort.ir.dtype import DType

MODEL = """
<ir_version: 8, opset_import: ["": 18]>
two (float[rows, 2] x, float[2] b) => (float[rows, 2] y, float[rows, 2] z)
<float[2] one = {1.0, 1.0}> { y = Add (x, b)  z = Mul (y, one) }
"""
X, B = np.array([[1, 2], [3, 4]], np.float32), np.array([10, 20], np.float32)
INPUTS = {"x": X, "b": B}


class Foreign:
    """A tensor of another library, which offers nothing but DLPack."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **given: Any) -> Any:
        return self._array.__dlpack__(**given)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


@pytest.fixture
def proto() -> onnx.ModelProto:
    """Return a model with two inputs and two outputs."""
    return parser.parse_model(MODEL)


@pytest.fixture
def runner(proto: onnx.ModelProto) -> Any:
    """Return a runner of the model that may use the CPU alone."""
    with rlx_ort.load(proto, rlx_ort.DevicePolicy.only("cpu")) as made:
        yield made


def test_inputs_and_outputs_are_described(runner: Any) -> None:
    """Name, dtype and dims of each, on the runner and on a compiled graph."""
    expected = [("x", DType.F32, ("rows", 2)), ("b", DType.F32, (2,))]
    compiled = runner.compile("cpu")
    assert runner.inputs == compiled.inputs == expected
    assert runner.outputs == compiled.outputs == [("y", DType.F32, ("rows", 2)), ("z", DType.F32, ("rows", 2))]
    assert runner.inputs[0].dims == ("rows", 2)


def test_a_runner_is_called_with_its_inputs_by_name(runner: Any) -> None:
    """As keywords or as a dict; a compiled graph too."""
    for outputs in (runner(x=X, b=B), runner(INPUTS), runner({"x": X}, b=B), runner.compile("cpu")(x=X, b=B)):
        np.testing.assert_array_equal(outputs["y"], X + B)


def test_outputs_have_names_and_are_a_list(runner: Any) -> None:
    """Both ways of every run; an unknown name lists the known ones."""
    runs = [
        runner.run("cpu", INPUTS),
        runner.run_resolved(INPUTS),
        runner.run_fastest(INPUTS),
        runner.run_resolved_with_inputs(INPUTS),
        runner.run_chosen(INPUTS)[1],
        runner.run_try("cpu", INPUTS)[1],
        runner.run_chain(INPUTS)[1],
        runner.run("cpu", INPUTS, timeout_s=30.0),
    ]
    for outputs in runs:
        assert isinstance(outputs, list)
        y, z = outputs
        assert (outputs["y"] is y, outputs["z"] is z, outputs[-1] is z) == (True, True, True)
        assert list(dict(outputs)) == ["y", "z"]
    with pytest.raises(InputError, match="no output 'Y'; known are 'y', 'z'"):
        runs[0]["Y"]


def test_outputs_cross_a_process_pool(runner: Any) -> None:
    """They are pickled with their names."""
    again = pickle.loads(pickle.dumps(runner(x=X, b=B)))  # our own bytes
    np.testing.assert_array_equal(again["y"], X + B)
    assert again.keys() == ["y", "z"]


def test_a_runner_is_awaited(runner: Any) -> None:
    """`run_async` gives what a run does."""
    outputs = asyncio.run(runner.run_async(INPUTS, timeout_s=30.0))
    np.testing.assert_array_equal(outputs["z"], X + B)


def test_a_run_has_a_time_limit_and_is_cancelled_without_resilience(runner: Any) -> None:
    """Any runner takes limits; a limit that makes no sense is refused."""
    token = rlx_ort.CancelToken()
    token.cancel()
    with pytest.raises(CancelledRunError):
        runner.run("cpu", INPUTS, cancel=token)
    with pytest.raises(ValueError, match="limit"):
        runner.run_resolved(INPUTS, timeout_s=-1.0)
    assert issubclass(TimeLimitError, rlx_ort.RunError)


def test_tensors_of_other_libraries_come_in_and_out(runner: Any) -> None:
    """Anything with `__dlpack__` is an input, and outputs of `run_dlpack` are read by other libraries."""
    np.testing.assert_array_equal(runner(x=Foreign(X), b=Foreign(B))["y"], X + B)
    outputs = runner.run_dlpack({"x": Foreign(X), "b": B})
    np.testing.assert_array_equal(np.from_dlpack(outputs["y"]), X + B)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("CPUExecutionProvider", "cpu"),
        ("CUDAExecutionProvider", "cuda"),
        ("CUDAExecutionProvider:1", "cuda:1"),
        ("DmlExecutionProvider", "directx"),
        ("CoreMLExecutionProvider", "ane"),
        ("WebGpuExecutionProvider", "webgpu"),
        ("TensorrtExecutionProvider", "tensorrt"),
        ("NvTensorRtRtxExecutionProvider", "nv-tensorrt-rtx"),
        ("MIGraphXExecutionProvider", "rocm"),
        ("OpenVINOExecutionProvider", "openvino"),
        ("QNNExecutionProvider", "qnn"),
    ],
)
def test_names_of_execution_providers_are_devices(name: str, device: str) -> None:
    """Wherever a device is given."""
    assert Device(name) == Device(device)
    assert rlx_ort.parse_device_list(f"{name},cpu")[0] == Device(device)


def test_the_names_are_those_of_the_providers() -> None:
    """Each built-in provider's own name means one of its kinds."""
    from rlx_ort.providers.registry import default_registry

    for provider in default_registry().providers():
        if provider.ep_name.endswith("ExecutionProvider"):
            assert Device(provider.ep_name).kind in provider.kinds, provider.ep_name


def test_bytes_models_and_packages_are_loaded(proto: onnx.ModelProto, tmp_path: Path) -> None:
    """`load` takes what people have at hand."""
    from rlx_ort.deploy.create import create_package

    create_package(rlx_ort.from_onnx(proto), tmp_path / "m.ortpackage")
    create_package(rlx_ort.from_onnx(proto), tmp_path / "folder.ortpackage", folder=True)
    onnx.save(proto, tmp_path / "m.onnx")
    files = (tmp_path / "m.onnx", str(tmp_path / "m.ortpackage"), tmp_path / "folder.ortpackage")
    for source in (*files, proto, proto.SerializeToString(), bytearray(proto.SerializeToString())):
        with rlx_ort.load(source, rlx_ort.DevicePolicy.only("cpu")) as made:
            np.testing.assert_array_equal(made(x=X, b=B)["y"], X + B)
    (tmp_path / "m.ortpackage").write_bytes((tmp_path / "m.ortpackage").read_bytes()[:-1])
    with pytest.raises((PackageError, rlx_ort.ConversionError)):
        rlx_ort.load(tmp_path / "m.ortpackage")


def test_representations_are_short(runner: Any, tmp_path: Path, proto: onnx.ModelProto) -> None:
    """None prints the nodes or the weights."""
    from rlx_ort.parity.compare import compare
    from rlx_ort.parity.opening import as_model

    compiled = Session("cpu").compile(runner.graph)
    things = [runner, runner.graph, compiled, compiled.placement, compiled.exported, compiled.weights]
    things += [as_model(proto), compare(proto, proto)]
    assert [text for text in map(repr, things) if len(text) > 130 or "\n" in text] == []
    assert repr(runner.graph) == "<Graph 'two', 5 nodes, 2 inputs, 2 outputs>"


def test_warming_reports_its_progress(runner: Any) -> None:
    """The callback gets each device before its turn."""
    seen: list[Device] = []
    assert runner.warm_all(progress=seen.append) == seen == [Device.CPU]


def test_choosing_and_opening_are_logged(runner: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One record each of level INFO, and none for a later run."""
    with caplog.at_level(logging.INFO, "rlx_ort"):
        runner.run_fastest(INPUTS)
        first = [record.getMessage() for record in caplog.records]
        caplog.clear()
        runner.run_fastest(INPUTS)
    assert [text for text in first if "the choice is cpu" in text]
    assert [text for text in first if "opened on cpu in" in text]
    assert caplog.records == []


def test_the_package_runs_as_a_module(tmp_path: Path) -> None:
    """`python -m rlx_ort` is the command."""
    command = [sys.executable, "-m", "rlx_ort", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "rlx-ort,")
