"""Faults of the WebGPU plugin: each is refused by the capability and still there, so that a repair is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from rlx_ort import CompiledGraph, Device, EngineError, Graph, GraphDevices, PlacementError, Session, from_onnx
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.selection.support import support_of

pytestmark = pytest.mark.webgpu

PLUGIN = "0.4.0"
"""The version of onnxruntime-ep-webgpu that the reproductions were measured with, on SwiftShader."""

RUN = """
import json, sys
import numpy as np
import onnxruntime as ort
import test_webgpu_faults as faults
from rlx_ort.providers.registry import provider_of
from rlx_ort.device import Device

provider_of(Device("webgpu")).probe(Device("webgpu"))
device = next(each for each in ort.get_ep_devices() if each.ep_name == "WebGpuExecutionProvider")
sessions = []

def session(model, gpu):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if gpu:
        options.add_provider_for_devices([device], {})
    sessions.append(ort.InferenceSession(model, options))
    return sessions[-1]

for name in sys.argv[1:]:
    fault = faults.BY_NAME[name]
    for each in fault.before:
        session(each.model(), True).run(None, each.inputs)
    try:
        got = session(fault.model(), True).run(None, fault.inputs)[0]
        wanted = np.asarray(fault.expected if fault.expected is not None
                            else session(fault.model(), False).run(None, fault.inputs)[0])
        right = got.shape == wanted.shape and np.allclose(got, wanted, rtol=1e-3, atol=1e-3, equal_nan=True)
        print(json.dumps([name, "right" if right else "wrong"]), flush=True)
    except Exception as err:
        print(json.dumps([name, "error"]), flush=True)
"""


@dataclass(frozen=True)
class Fault:
    """One node, what WebGPU makes of it ("wrong", "error" or "dies"), and the nodes that must have run before."""

    name: str
    outcome: str
    op: str
    inputs: dict[str, np.ndarray]
    constants: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    expected: Any = None
    before: tuple[Fault, ...] = ()
    domain: str = ""

    def model(self) -> bytes:
        """Return the ONNX model of the node."""
        from onnx import helper, numpy_helper

        names = [*self.inputs, *self.constants]
        node = helper.make_node(self.op, names, ["out"], domain=self.domain, **self.attributes)
        graph = helper.make_graph(
            [node],
            "g",
            [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
                for name, array in self.inputs.items()
            ],
            [helper.make_empty_tensor_value_info("out")],
            [numpy_helper.from_array(np.asarray(value), name) for name, value in self.constants.items()],
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString())

    def graph(self) -> Graph:
        """Return the node as an imported graph."""
        import onnx

        return from_onnx(onnx.shape_inference.infer_shapes(onnx.load_from_string(self.model())))


def floats(*shape: int) -> np.ndarray:
    """Return distinct small numbers of a shape."""
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def _normal(epsilon: float) -> dict[str, Any]:
    return {
        "inputs": {"x": floats(2, 3, 8), "s": np.ones(3, np.float32), "b": np.zeros(3, np.float32)},
        "attributes": {"epsilon": epsilon},
    }


def _index(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


def _masks(*shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name: floats(*shape) > 0 for name, shape in zip("xy", shapes, strict=True)}


_ROTARY = {"c": floats(4, 2), "s": floats(4, 2)}

FAULTS = [
    Fault(
        "Slice backwards from inside",
        "wrong",
        "Slice",
        {"x": floats(6)},
        {"starts": [3], "ends": [-99], "axes": [0], "steps": [-1]},
    ),
    Fault(
        "ConvTranspose of groups of one output channel",
        "wrong",
        "ConvTranspose",
        {"x": floats(1, 4, 5, 5), "w": floats(4, 1, 3, 3)},
        attributes={"group": 2},
    ),
    Fault(
        "InstanceNormalization with another epsilon",
        "wrong",
        "InstanceNormalization",
        **_normal(0.5),
        before=(Fault("", "", "InstanceNormalization", **_normal(1e-5)),),
    ),
    Fault(
        "And of shapes that are repeated in another way than before",
        "wrong",
        "And",
        _masks((3, 1, 12, 12), (3, 1, 1, 1)),
        before=(Fault("", "", "And", _masks((1, 1, 12, 12), (3, 1, 1, 12))),),
    ),
    *(
        Fault(f"Conv of {channels} channels", "wrong", "Conv", {"x": floats(1, channels, 7, 7)}, {"w": weight})
        for channels in (6, 15)
        for weight in (floats(4, channels, 3, 3),)
    ),
    Fault("Conv of 9 channels along one axis", "wrong", "Conv", {"x": floats(2, 9, 8)}, {"w": floats(4, 9, 3)}),
    Fault(
        "Conv of 6 channels with uneven padding",
        "wrong",
        "Conv",
        {"x": floats(1, 6, 7, 7)},
        {"w": floats(4, 6, 3, 3), "b": floats(4)},
        {"pads": [0, 1, 1, 0], "strides": [1, 2]},
    ),
    Fault("Pow along the last axis", "error", "Pow", {"x": abs(floats(1, 4)), "y": floats(3, 1)}),
    Fault("Tile of a scalar", "error", "Tile", {"x": np.array(3, np.float32)}, {"r": np.zeros(0, np.int64)}),
    *(
        Fault(f"{op_type} of nothing", "error", op_type, {"x": floats(0, 2)}, {"a": [1]})
        for op_type in ("ReduceMax", "ReduceMin")
    ),
    Fault("ReduceMean of nothing", "wrong", "ReduceMean", {"x": floats(2, 0)}, {"a": [1]}, expected=[[np.nan]] * 2),
    Fault(
        "ReduceMean of large integers",
        "wrong",
        "ReduceMean",
        {"x": np.array([[2**30, 2**30 + 6, 2**30]], np.int32)},
        {"a": [1]},
        expected=[[2**30 + 2]],
    ),
    Fault("MatMul of nothing", "dies", "MatMul", {"x": floats(2, 0), "y": floats(0, 3)}, expected=np.zeros((2, 3))),
    Fault("Gather from nothing", "dies", "Gather", {"x": floats(0, 3), "i": _index(0, 0)}),
    Fault("ScatterND into nothing", "dies", "ScatterND", {"x": floats(0, 3), "i": _index([1]), "u": floats(1, 3)}),
    Fault("Softmax of nothing", "dies", "Softmax", {"x": floats(3, 0)}, expected=floats(3, 0)),
    Fault(
        "RotaryEmbedding of nothing",
        "dies",
        "RotaryEmbedding",
        {"x": floats(1, 0, 8), "p": np.zeros((1, 0), np.int64), **_ROTARY},
        attributes={"num_heads": 2},
        domain="com.microsoft",
    ),
    Fault("Einsum of nothing", "dies", "Einsum", {"x": floats(2, 0), "y": floats(0, 3)}, {}, {"equation": "ij,jk->ik"}),
]
AVOIDED = {
    *("Conv of 6 channels", "Conv of 15 channels", "Conv of 9 channels along one axis"),
    "Conv of 6 channels with uneven padding",
    *("InstanceNormalization with another epsilon", "ReduceMean of nothing"),
    "And of shapes that are repeated in another way than before",
}
"""Faults whose nodes are exported in another form."""
BY_NAME = {fault.name: fault for fault in FAULTS}


def run(*names: str) -> tuple[int, dict[str, str]]:
    """Run faults in plain ONNX Runtime in a process of its own; return its exit status and the outcomes."""
    here = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-P", "-c", RUN, *names],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert done.returncode != 1, done.stderr
    return done.returncode, dict(lines)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_fault_is_refused_or_avoided(name: str) -> None:
    """Another device answers, or another form does without a word and is right."""
    options, fault = CompileOptions(placement=PlacementRule.STRICT), BY_NAME[name]
    graph = fault.graph()
    found = support_of(Device.WEBGPU, graph, options)
    assert found.supported == (name in AVOIDED)
    if not found.supported:
        assert "has no kernel for" in str(found.blocker)
        return
    expected = fault.expected
    if expected is None:
        (expected,) = ReferenceEvaluator(fault.model()).run(None, fault.inputs)
    for _ in range(2):
        (got,) = Session("webgpu", options).compile(graph).run(fault.inputs)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", sorted(BY_NAME.keys() - AVOIDED))
@pytest.mark.parametrize("rule", PlacementRule)
def test_a_fault_is_refused_where_webgpu_is_named(name: str, rule: PlacementRule) -> None:
    """Who names the device gets an error, not the wrong results of its kernel; nor may the CPU help with it."""
    with pytest.raises(PlacementError):
        Session("webgpu", CompileOptions(placement=rule)).compile(BY_NAME[name].graph())


def test_the_kernels_that_are_wrong_still_are() -> None:
    """A repaired kernel has to be taken off the limits of the provider."""
    wanted = {fault.name: fault.outcome for fault in FAULTS if fault.outcome != "dies"}
    assert run(*wanted) == (0, wanted), PLUGIN


@pytest.mark.parametrize("name", [fault.name for fault in FAULTS if fault.outcome == "dies"])
def test_the_kernels_that_end_the_process_still_do(name: str) -> None:
    """A repaired kernel has to be taken off the limits of the provider."""
    status, outcomes = run(name)
    assert status != 0, outcomes


def test_neighbours_of_the_faults_are_taken() -> None:
    """The limits are no wider than the faults."""
    options = CompileOptions(placement=PlacementRule.STRICT)
    backwards = {"starts": [-1], "ends": [-99], "axes": [0], "steps": [-1]}
    for near in (
        Fault("", "", "Slice", {"x": floats(6)}, backwards),
        Fault("", "", "Slice", {"x": floats(6)}, {**backwards, "starts": [1], "ends": [6], "steps": [2]}),
        Fault("", "", "ConvTranspose", {"x": floats(1, 2, 5, 5), "w": floats(2, 1, 3, 3)}, attributes={"group": 2}),
        Fault("", "", "InstanceNormalization", **_normal(1e-5)),
        Fault("", "", "Conv", {"x": floats(1, 3, 7, 7)}, {"w": floats(4, 3, 3, 3)}),
        Fault("", "", "Conv", {"x": floats(1, 6, 7, 7)}, {"w": floats(5, 6, 3, 3)}),
        Fault("", "", "Pow", {"x": abs(floats(3, 4)), "y": floats(4)}),
        Fault("", "", "MatMul", {"x": floats(0, 4), "y": floats(4, 3)}),
        Fault("", "", "Gather", {"x": floats(2, 3)}, {"i": [1, -2]}),
    ):
        assert support_of(Device.WEBGPU, near.graph(), options).supported, near


@pytest.mark.parametrize(
    "fault",
    [
        Fault("gather", "", "Gather", {"x": floats(2, 3)}, {"i": [2]}),
        Fault("elements", "", "GatherElements", {"x": floats(2, 3)}, {"i": [[-3]]}),
        Fault("coordinates", "", "GatherND", {"x": floats(2, 3)}, {"i": [[0, 3]]}),
    ],
    ids=lambda fault: fault.name,
)
def test_constant_indices_out_of_range_are_refused(fault: Fault) -> None:
    """The kernel answers 0 for near ones and ends the process for far ones, and the CPU raises an error."""
    found = support_of(Device.WEBGPU, fault.graph(), CompileOptions(placement=PlacementRule.STRICT))
    assert "out of range" in str(found.blocker)


@pytest.mark.parametrize(
    ("build", "arrays", "expected"),
    [
        pytest.param(
            lambda g, x: g.binary("pow", x, g.constant(np.array([1 / 3, 3.0, 2.5, 0.5], np.float32))),
            [np.array([-8, -8, 4, -1], np.float32)],
            [np.nan, -512, 32, np.nan],
            id="Pow of negative numbers",
        ),
        pytest.param(
            lambda g, x, y: g.binary("pow", x, y),
            [np.array([-8, -8, 4], np.float32), np.array([1 / 3, 2, -0.5], np.float32)],
            [np.nan, 64, 0.5],
            id="Pow of two inputs",
        ),
        pytest.param(
            lambda g, x: g.conv2d(x, g.constant(np.ones((4, 6, 2, 2), np.float32))),
            [np.arange(24, dtype=np.float32).reshape(1, 6, 2, 2)],
            np.full((1, 4, 1, 1), 276),
            id="Conv of 6 channels",
        ),
        pytest.param(
            lambda g, x: g.group_norm(x, np.ones(4, np.float32), np.zeros(4, np.float32), 2, eps=3.75),
            [np.array([[[100, 101], [101, 102], [-1, 0], [0, 1]]], np.float32) * np.float32(np.sqrt(0.5))],
            np.array([[[-1, 0], [0, 1], [-1, 0], [0, 1]]]) * np.sqrt(0.5) / 2,
            id="GroupNorm of another epsilon",
        ),
    ],
)
def test_another_form_answers(build: Any, arrays: list[np.ndarray], expected: Any) -> None:
    """Where kernels are wrong and the lowering knows a form without them, the device takes the graph and is right."""
    graph = Graph("form")
    graph.outputs = [build(graph, *(graph.input(f"x{at}", array.shape) for at, array in enumerate(arrays)))]
    options = CompileOptions(placement=PlacementRule.STRICT)
    (got,) = Session("webgpu", options).compile(graph).run({f"x{at}": array for at, array in enumerate(arrays)})
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


EXTREMES = np.array([np.inf, -np.inf, *(np.finfo(np.float32).max * np.array([1, -1])), 0, -0.0, 1, -2.5], np.float32)


def _imported_topk(shape: list[Any], largest: bool) -> Graph:
    """Return a graph of an imported TopK of all elements."""
    node = onnx.helper.make_node("TopK", ["x", "k"], ["values", "places"], axis=-1, largest=int(largest))
    count = onnx.helper.make_node("Shape", ["x"], ["k"], start=-1)
    outputs = [onnx.helper.make_tensor_value_info(name, kind, shape) for name, kind in (("values", 1), ("places", 7))]
    inputs = [onnx.helper.make_tensor_value_info("x", 1, shape)]
    graph = onnx.helper.make_graph([count, node], "topk", inputs, outputs)
    return from_onnx(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10))


def _sorts(shape: list[Any], largest: bool) -> Graph:
    """Return a graph of a sort and an argsort."""
    graph = Graph("sorts")
    x = graph.input("x", shape)
    graph.outputs = [graph.sort(x, -1, largest), graph.argsort(x, -1, largest)]
    return graph


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("build", [_sorts, _imported_topk])
def test_infinities_are_sorted_like_other_numbers(build: Any, largest: bool) -> None:
    """Rows of every length come back in order, equal elements in order of place; infinities are beyond all others."""
    session, rng = Session("webgpu", CompileOptions(placement=PlacementRule.STRICT)), np.random.default_rng(7)
    open_sizes, fixed = session.compile(build(["rows", "n"], largest)), session.compile(build([3, 21], largest))
    for size in (*range(1, 71), 200):
        x = rng.choice(EXTREMES, (3, size))
        wanted = np.argsort(-x if largest else x, -1, kind="stable")
        for compiled in (open_sizes, fixed) if size == 21 else (open_sizes,):
            values, places = compiled.run({"x": x})
            np.testing.assert_array_equal(places, wanted)
            np.testing.assert_array_equal(values, np.take_along_axis(x, wanted, -1))


def test_the_first_axis_with_infinities_is_sorted() -> None:
    """Columns are filled as rows are, and a top-k takes what comes first."""
    graph = Graph("columns")
    x = graph.input("x", [5, 6])
    graph.outputs = [graph.argsort(x, 0), graph.topk(x, 3)]
    data = np.random.default_rng(8).choice(EXTREMES, (5, 6))
    columns, best = Session("webgpu", CompileOptions(placement=PlacementRule.STRICT)).compile(graph).run({"x": data})
    np.testing.assert_array_equal(columns, np.argsort(data, 0, kind="stable"))
    np.testing.assert_array_equal(best, np.argsort(-data, -1, kind="stable")[:, :3])


@pytest.mark.parametrize("dim", ["k", None])
@pytest.mark.parametrize("way", ["run", "run_slots"])
def test_an_open_dim_of_0_is_refused_in_the_run(way: str, dim: str | None) -> None:
    """The inner dim of a product is known when the inputs come, named or not; other sizes go on as before."""
    graph = Graph("product")
    graph.outputs = [graph.input("x", [2, dim]) @ graph.input("y", [dim, 3])]
    compiled = Session("webgpu").compile(graph)

    def product(width: int) -> Any:
        arrays = [np.ones((2, width), np.float32), np.ones((width, 3), np.float32)]
        if way == "run_slots":
            return compiled.run_slots(arrays)[0]
        return compiled.run(dict(zip("xy", arrays, strict=True)))[0]

    assert (product(4) == 4).all()
    for _ in range(2):
        with pytest.raises(EngineError, match="inner dim of 0"):
            product(0)
    assert (product(4) == 4).all()


class Exported:
    """An object with nothing but DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **kwargs: Any) -> Any:
        """Share the array."""
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        """Return that it is in host memory."""
        return self.array.__dlpack_device__()


def _handle(compiled: CompiledGraph, x: np.ndarray, i: np.ndarray) -> Any:
    compiled.bind_gpu_handle("x", x)
    return compiled.run({"i": i})[0]


def _committed(compiled: CompiledGraph, x: np.ndarray, i: np.ndarray) -> Any:
    compiled.commit_no_wait({"x": x, "i": i}, None)
    return compiled.sync_pending()[0][0]


WAYS: dict[str, Callable[[CompiledGraph, np.ndarray, np.ndarray], Any]] = {
    "run": lambda compiled, x, i: compiled.run({"x": x, "i": i})[0],
    "slots": lambda compiled, x, i: compiled.run_slots([x, i])[0],
    "raw": lambda compiled, x, i: compiled.run_raw({"x": x, "i": i})[0],
    "typed": lambda compiled, x, i: np.frombuffer(
        compiled.run_typed({"x": (x.tobytes(), "f32"), "i": (i.tobytes(), "i64")})[0][0], np.float32
    ).reshape(-1, 3),
    "DLPack": lambda compiled, x, i: compiled.run_dlpack({"x": Exported(x), "i": Exported(i)})[0].numpy(),
    "handle": _handle,
    "committed": _committed,
    "pipelined": lambda compiled, x, i: compiled.run_pipelined([{"x": x, "i": i}])[0][0],
}


@pytest.mark.parametrize("way", WAYS)
def test_fed_indices_out_of_range_are_refused(way: str) -> None:
    """However inputs come, a wrong one is an error in every run, and right ones go on as before."""
    graph = Graph("rows")
    graph.outputs = [graph.gather(graph.input("x", [4, 3]), graph.input("i", [2], "i64"))]
    compiled, x = Session("webgpu").compile(graph), floats(4, 3)
    for index in (3, -4, 1):
        indices = np.array([0, index], np.int64)
        np.testing.assert_array_equal(WAYS[way](compiled, x, indices), x[indices])
        for wrong in (4, -5):
            with pytest.raises(EngineError, match=f"index {wrong} of input 'i' is out of range for node 'gather'"):
                WAYS[way](compiled, x, np.array([wrong, 0], np.int64))


def test_a_handle_without_elements_is_refused_where_it_follows_others() -> None:
    """Softmax of nothing ends the process, also in a run that is like the last one but for a handle's size."""
    g = Graph("softmax")
    g.outputs = [g.softmax(g.input("x", ["n"]), 0)]
    compiled = Session(Device.WEBGPU).compile(g)
    for size in (3, 2, 3):
        compiled.bind_gpu_handle("x", np.zeros(size, np.float32))
        np.testing.assert_allclose(compiled.run({})[0], np.full(size, 1 / size), rtol=1e-5)
    compiled.bind_gpu_handle("x", np.zeros(0, np.float32))
    with pytest.raises(EngineError, match="a dim of 0"):
        compiled.run({})


@pytest.mark.parametrize("inside", [False, True])
def test_a_part_without_elements_is_refused_where_the_sizes_of_inputs_tell(inside: bool) -> None:
    """Softmax of nothing ends the process, inside a branch too; other sizes run before and after it."""
    g = Graph("part")
    x, condition = g.input("x", ["n"]), g.input("condition", [], "bool")
    part = g.slice(x, [0], [3], [-5], [1])
    body = Graph("then")
    body.outputs = [body.softmax(body.input("part", [None]), 0)]
    other = Graph("else")
    other.outputs = [-other.input("part", [None])]
    y = g.if_(condition, body, other, [part]) if inside else g.softmax(part, 0)
    g.outputs = [y, condition]
    runner = GraphDevices(g)
    for size in (10, 4, 10, 8, 11):
        feeds = {"x": np.zeros(size, np.float32), "condition": np.array(True)}
        left = max(size - 8, 0)
        if left:
            np.testing.assert_allclose(runner.run(Device.WEBGPU, feeds)[0], np.full(left, 1 / left), rtol=1e-5)
        else:
            with pytest.raises(EngineError, match="a dim of 0"):
                runner.run(Device.WEBGPU, feeds)


def test_nodes_that_the_cpu_runs_beside_it_have_the_cpu_s_limits() -> None:
    """Unique of nothing may end the process there, and WebGPU has no kernel for it."""
    text = "(float[n,3] x) => (y) { z = Relu(x) y = Unique<axis=0>(z) }"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {text}')
    compiled = Session("webgpu", CompileOptions(placement=PlacementRule.ASSISTED)).compile(from_onnx(model))
    x = np.abs(floats(2, 3))
    np.testing.assert_array_equal(compiled.run({"x": x})[0], np.unique(x, axis=0))
    with pytest.raises(EngineError, match="CPU cannot run node 'y'"):
        compiled.run({"x": floats(0, 3)})
