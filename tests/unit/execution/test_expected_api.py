"""What people who know ONNX Runtime expect of a runner: descriptions, names, bytes, tensors of other libraries."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import enum
import logging
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import pytest
from onnx import parser

import rlx_ort
from rlx_ort import Device, DType, GraphDevices, Session, to_onnx
from rlx_ort.conversion.convert import ConvertOptions
from rlx_ort.deploy.create import create_package
from rlx_ort.deploy.package import Package
from rlx_ort.errors import (
    CancelledRunError,
    ConversionError,
    DeviceParseError,
    GraphVerifyError,
    InputError,
    PackageError,
)
from rlx_ort.options import compile_options
from rlx_ort.options.compile_options import PrecisionName

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


def test_a_run_takes_device_and_inputs_in_either_order(runner: Any) -> None:
    """Or by name, or without a device, as ONNX Runtime's `run(None, inputs)`; the inputs of a call may be in order."""
    runs = [
        runner.run("cpu", INPUTS),
        runner.run(INPUTS, "cpu"),
        runner.run(INPUTS, device="cpu"),
        runner.run(INPUTS, device=Device.CPU, timeout_s=30.0),
        runner.run(inputs=INPUTS, device="cpu"),
        runner.run("cpu", inputs=INPUTS),
        runner.run(INPUTS),
        runner.run(None, INPUTS),
        runner(X, B),
        runner(X, b=B),
        runner.compile("cpu")(X, B),
    ]
    for outputs in runs:
        np.testing.assert_array_equal(outputs["y"], X + B)
    for wrong in (lambda: runner("cpu"), lambda: runner(X, B, B), lambda: runner(X, x=X), lambda: runner.run("cpu")):
        with pytest.raises(InputError, match="x"):
            wrong()
    with pytest.raises(InputError, match="got str as well"):
        runner.run(INPUTS, "cpu", device="cpu")


def test_outputs_say_where_they_were_made(runner: Any) -> None:
    """The device and the placement of every way to run; the device crosses a process pool."""
    resilient = GraphDevices(runner.graph, runner.policy, resilience=rlx_ort.Resilience())
    for used in (runner, resilient):
        for outputs in (
            used.run("cpu", INPUTS),
            used.run_fastest(INPUTS),
            used.run_try("cpu", INPUTS)[1],
            used.run_dlpack(INPUTS, "cpu"),
            used(INPUTS),
            used.compile("cpu")(INPUTS),
            used.run("cpu", INPUTS, timeout_s=30.0),
        ):
            assert outputs.device == Device.CPU
            assert outputs.placement is used.placement("cpu")
            assert outputs.placement.requested_share == 1.0
    again = pickle.loads(pickle.dumps(outputs))  # our own bytes
    assert (again.device, again.placement, again.keys()) == (Device.CPU, None, ["y", "z"])
    np.testing.assert_array_equal(again["y"], X + B)
    del runner, used, resilient
    assert outputs.placement.strays == ()


def test_outputs_are_shown_with_their_names(runner: Any) -> None:
    """`items` pairs them, and their text has the names and the device."""
    outputs = runner(INPUTS)
    assert [(name, value is outputs[name]) for name, value in outputs.items()] == [("y", True), ("z", True)]
    assert repr(outputs).startswith("Outputs(y=array([[11., 22.]")
    assert str(outputs).endswith("device='cpu')")


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


def test_a_runner_is_awaited(runner: Any) -> None:
    """`run_async` gives what a run does."""
    outputs = asyncio.run(runner.run_async(INPUTS, timeout_s=30.0))
    np.testing.assert_array_equal(outputs["z"], X + B)


@pytest.mark.parametrize(
    "run",
    [
        lambda runner, **limits: runner.run("cpu", INPUTS, **limits),
        lambda runner, **limits: runner.run_resolved(INPUTS, **limits),
        lambda runner, **limits: runner.run_try("cpu", INPUTS, **limits)[1],
        lambda runner, **limits: runner.run_chain(INPUTS, **limits)[1],
        lambda runner, **limits: runner.run_chain(INPUTS, "cpu", **limits)[1],
        lambda runner, **limits: runner.run_dlpack(INPUTS, **limits),
    ],
    ids=["run", "run_resolved", "run_try", "run_chain", "run_chain on a device", "run_dlpack"],
)
def test_every_run_of_a_runner_has_limits(runner: Any, run: Any) -> None:
    """Without resilience too: a limit that is kept gives the outputs; a cancelled token ends the run."""
    np.testing.assert_array_equal(np.from_dlpack(run(runner, timeout_s=30.0)["y"]), X + B)
    token = rlx_ort.CancelToken()
    token.cancel()
    with pytest.raises(CancelledRunError):
        run(runner, cancel=token)
    with pytest.raises(ValueError, match="limit"):
        run(runner, timeout_s=-1.0)


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
    """ONNX Runtime's name of a built-in provider means a kind that this execution provider serves."""
    from rlx_ort.providers.registry import default_registry

    kinds: dict[str, set[str]] = {}
    for provider in default_registry().providers():
        kinds.setdefault(provider.ep_name, set()).update(provider.kinds)
    named = {name: Device(name).kind for name in kinds if name.endswith("ExecutionProvider")}
    assert named
    assert [name for name, kind in named.items() if kind not in kinds[name]] == []


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


def test_representations_of_large_things_are_short(proto: onnx.ModelProto, tmp_path: Path) -> None:
    """Neither the ops of a graph, nor its weights, nor the defaults are listed."""
    from rlx_ort.calibration.model import REQUIRED, MeasuredCostModel
    from rlx_ort.calibration.profile import CalibrationProfile, ProfileKey, Row
    from rlx_ort.ir.tensor import TensorData

    large = rlx_ort.Graph("large")
    value = large.input("x", ("rows", 64), "f32")
    for _ in range(1000):
        value = large.relu(value)
    large.set_outputs([value])
    only = rlx_ort.DevicePolicy.only("cpu")
    onnx.save(proto, tmp_path / "m.onnx")
    create_package(rlx_ort.from_onnx(proto), tmp_path / "m.ortpackage")
    key = ProfileKey("cpu", "CPUExecutionProvider", "")
    sizes = {"MatMul": (8, 64), "Add": (64,)}
    profile = CalibrationProfile(key, tuple(Row(name, sizes.get(name, ()), 1.0) for name in REQUIRED))
    token, package = rlx_ort.CancelToken(), Package(tmp_path / "m.ortpackage")
    settings = {f"name {number} of a key": "v" * 99 for number in range(99)}
    things = [
        rlx_ort.explain(large, "cpu"),
        rlx_ort.dispatch_report_for_device(large, "cpu"),
        *rlx_ort.device_report(large),
        rlx_ort.CompileOptions(),
        rlx_ort.CompileOptions(session_config=settings),
        rlx_ort.convert(tmp_path / "m.onnx", tmp_path / "n.onnx"),
        TensorData.from_array(np.arange(1000.0)),
        rlx_ort.CompileCache("cpu"),
        rlx_ort.BucketedCompileCache([(1, 9)], "cpu"),
        rlx_ort.start_package(tmp_path / "m.ortpackage"),
        token,
        package,
        rlx_ort.FlexibleSession(),
        rlx_ort.DeviceRouter(large, only),
        MeasuredCostModel(Device.CPU, profile),
    ]
    texts = [repr(thing) for thing in things]
    assert [text for text in texts if len(text) > 200 or "\n" in text or " at 0x" in text] == []
    assert repr(rlx_ort.CompileOptions(dims={"n": 3})) == "CompileOptions(dims={'n': 3})"


def test_precisions_take_names_and_values() -> None:
    """As they are written everywhere else; unknown ones are refused."""
    options = rlx_ort.CompileOptions(precisions={"CPUExecutionProvider": "f16"})
    assert options.on(Device.CPU).precision is rlx_ort.Precision.F16
    with pytest.raises(DeviceParseError, match="did you mean 'cpu'"):
        rlx_ort.CompileOptions(precisions={"cpuu": rlx_ort.Precision.F16})
    with pytest.raises(InputError, match="did you mean 'f16'"):
        rlx_ort.CompileOptions(precisions={"cpu": "f17"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("name", "value"),
    [("fp16", "f16"), ("float16", "f16"), ("FP16", "f16"), ("half", "f16"), ("bfloat16", "bf16"), ("float32", "f32")],
)
def test_a_precision_has_the_names_that_others_give_it(name: str, value: str) -> None:
    """In options, and wherever a member is made of a name; an integer is no precision of a session."""
    made = rlx_ort.CompileOptions(precision=name, precisions={"cuda": name})  # type: ignore[arg-type, dict-item]
    assert made.precision.value == made.precisions["cuda"].value == rlx_ort.Precision(name).value == value
    with pytest.raises(InputError, match="convert --quantize int8-dynamic"):
        rlx_ort.CompileOptions(precision="int8")  # type: ignore[arg-type]


def test_options_that_nobody_gave_change_nothing() -> None:
    """Results are in f32 at full optimisation, no dim is bound, and both forms of an op are open."""
    options = rlx_ort.CompileOptions()
    assert (options.precision, options.precision_policy) == (rlx_ort.Precision.F32, None)
    assert options.optimization is compile_options.OptimizationLevel.ALL
    assert (options.placement, options.cache, options.opset, options.intra_op_threads) == (None, None, None, None)
    assert [dict(each) for each in (options.dims, options.provider_options, options.session_config)] == [{}, {}, {}]
    assert options.kernel_dispatch == rlx_ort.KernelDispatch(rlx_ort.KernelDispatchPolicy.PREFER_NATIVE)


@pytest.mark.parametrize(
    ("name", "value", "typo", "hint"),
    [
        ("precision", rlx_ort.Precision.TF32, "tf23", "tf32"),
        ("placement", compile_options.PlacementRule.ASSISTED, "asisted", "assisted"),
        ("sharing", compile_options.WeightSharing.RAW, "rwa", "raw"),
        ("optimization", compile_options.OptimizationLevel.LAYOUT, "layuot", "layout"),
        ("cache", compile_options.CacheUse.FOUND, "fuond", "found"),
    ],
)
def test_options_of_an_enum_take_their_values(name: str, value: enum.Enum, typo: str, hint: str) -> None:
    """A value is its member, never ignored; what is neither is refused with the nearest one."""
    assert getattr(rlx_ort.CompileOptions(**{name: value.value}), name) is value  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"{name} is '{typo}'.*did you mean '{hint}'"):
        rlx_ort.CompileOptions(**{name: typo})  # type: ignore[arg-type]


def test_type_checkers_see_the_values_of_each_enum() -> None:
    """The signature that they read has every field, in order, and each value of its enum as text."""
    source = ast.parse(Path(compile_options.__file__).read_text(encoding="utf-8"))
    [made] = [node for node in ast.walk(source) if isinstance(node, ast.ClassDef) and node.name == "CompileOptions"]
    [seen] = [node for node in ast.walk(made) if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    annotations = {each.arg: ast.unparse(each.annotation) for each in seen.args.args[1:] if each.annotation}
    assert list(annotations) == [each.name for each in dataclasses.fields(rlx_ort.CompileOptions)]
    for name, kind in compile_options._ENUMS.items():
        texts = get_args(PrecisionName) if name == "precision" else re.findall(r"'(\w+)'", annotations[name])
        assert {kind(text) for text in texts} == set(kind)
        assert {member.value for member in kind} <= set(texts)


def test_warming_reports_its_progress(runner: Any) -> None:
    """The callback gets each device before its turn."""
    seen: list[Device] = []
    assert runner.warm_all(progress=seen.append) == seen == [Device.CPU]


def test_choosing_and_opening_are_logged_once(runner: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The choice and the opening at level INFO, what led to them at DEBUG, and nothing of a later run."""
    with caplog.at_level(logging.DEBUG, "rlx_ort"):
        runner.run_fastest(INPUTS)
        first = [f"{record.levelname} {record.getMessage()}" for record in caplog.records]
        caplog.clear()
        runner.run_fastest(INPUTS)
    for level, *texts in (
        ("INFO", "the choice is cpu"),
        ("INFO", "opened on cpu in"),
        ("DEBUG", "'two': cpu: "),
        ("DEBUG", "'two': exported 5 nodes in"),
        ("DEBUG", "opening on cpu", "CompileOptions("),
    ):
        assert [line for line in first if line.startswith(level) and all(text in line for text in texts)], texts
    assert caplog.records == []


def test_the_compile_cache_logs_what_is_kept_and_found(
    proto: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A new entry at level INFO, one that is there at DEBUG."""
    monkeypatch.setenv("RLX_CACHE", "on")
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    found = []
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "rlx_ort.cache"), rlx_ort.load(proto) as made:
            made.run("cpu", INPUTS)
        found.append([(each.levelname, each.getMessage()) for each in caplog.records if each.name == "rlx_ort.cache"])
    [(level, kept)], [(next_level, again)] = found
    assert (level, next_level) == ("INFO", "DEBUG")
    assert "keeps entry" in kept
    assert "made in" in kept
    assert "found in" in again


def test_the_package_runs_as_a_module(tmp_path: Path) -> None:
    """`python -m rlx_ort` is the command."""
    command = [sys.executable, "-m", "rlx_ort", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "rlx-ort,")


@pytest.mark.parametrize("device", [["y"], INPUTS], ids=["names of outputs", "inputs"])
def test_a_call_in_the_order_of_onnxruntime_says_how_it_is_here(runner: Any, device: object) -> None:
    """`run(["y"], inputs)` is how sessions of ONNX Runtime run."""
    with pytest.raises(DeviceParseError, match=r"run takes \(device, inputs\)"):
        runner.run(device, INPUTS)


@pytest.mark.parametrize("inputs", [X, X.tolist()], ids=["array", "list"])
def test_inputs_without_names_are_refused_with_the_names(runner: Any, inputs: object) -> None:
    """A call in order has all of them."""
    with pytest.raises(InputError, match=r"runner\(x=\.\.\., b=\.\.\.\)"):
        runner(inputs)


def test_a_path_in_place_of_a_graph_leads_to_load() -> None:
    """Wherever a graph is taken."""
    path: Any = "model.onnx"
    for taken in (GraphDevices, Session("cpu").compile, to_onnx, lambda path: create_package(path, "x.ortpackage")):
        with pytest.raises(GraphVerifyError, match=r"rlx_ort\.load"):
            taken(path)


def test_a_device_in_place_of_a_policy_leads_to_one(proto: onnx.ModelProto) -> None:
    """`load(path, "cpu")` and `GraphDevices(graph, "cpu")`."""
    with pytest.raises(DeviceParseError, match=r"DevicePolicy\.only\('cpu'\)"):
        rlx_ort.load(proto, "cpu")  # type: ignore[arg-type]


def test_a_dict_in_place_of_options_leads_to_them(proto: onnx.ModelProto) -> None:
    """ONNX Runtime takes the options of providers as dicts."""
    with pytest.raises(InputError, match=r"CompileOptions\(dims"):
        rlx_ort.load(proto, options={"intra_op_threads": 2})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"precision": "fp16"}, {"precision": "f16"}),
        ({"precision": "float16"}, {"precision": "f16"}),
        ({"precision": "bfloat16"}, {"precision": "bf16"}),
        ({"quantize": "int8"}, {"quantize": "int8-dynamic"}),
        ({"quantize": "int8", "calibration": {"x": X}}, {"quantize": "int8-static"}),
        ({"quantize": "int4"}, {"quantize": "int4-weights"}),
    ],
)
def test_a_conversion_takes_the_names_that_others_use(given: dict[str, Any], meant: dict[str, str]) -> None:
    """They become those that the documentation has."""
    made = ConvertOptions(**given)
    assert {name: getattr(made, name) for name in meant} == meant


def test_an_integer_precision_of_a_conversion_leads_to_quantising() -> None:
    """It is no precision, and the message has the argument to use."""
    with pytest.raises(ConversionError, match="quantize='int8'"):
        ConvertOptions(precision="int8")  # type: ignore[arg-type]


def test_a_script_that_runs_twice_is_told_of_overwrite(proto: onnx.ModelProto, tmp_path: Path) -> None:
    """By every function that writes a file, and the argument works."""
    onnx.save(proto, tmp_path / "m.onnx")
    graph = rlx_ort.load(tmp_path / "m.onnx").graph
    ways: list[Any] = [
        lambda **more: rlx_ort.convert(tmp_path / "m.onnx", tmp_path / "n.onnx", dims={"rows": 2}, **more),
        lambda **more: rlx_ort.create_package(graph, tmp_path / "m.ortpackage", version="2", **more),
        lambda **more: rlx_ort.save_onnx(graph, tmp_path / "saved.onnx", **more),
    ]
    for write in ways:
        write()
        with pytest.raises((ConversionError, PackageError), match="overwrite=True"):
            write()
        write(overwrite=True)
    with pytest.warns(DeprecationWarning, match="overwrite"):
        rlx_ort.create_package(graph, tmp_path / "m.ortpackage", force=True)
    assert Package(tmp_path / "m.ortpackage").index.version == ""
    assert rlx_ort.load(tmp_path / "n.onnx").inputs[0].dims == (2, 2)
