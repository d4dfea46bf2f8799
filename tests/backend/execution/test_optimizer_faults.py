"""Models that ONNX Runtime's optimisers do not survive run, each in a child process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from rlx_ort import Device, DType, Graph, Session, load, supports_graph
from rlx_ort.execution.session import working_provider
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.numerics import relative_error

_PROGRAM = """
import itertools
import sys
import numpy as np
import rlx_ort
from rlx_ort import CompileOptions, Graph, Session

for perm, how in itertools.product([(1, 0, 2), (0, 2, 1)], ["cast", "precision"]):
    print(perm, how, file=sys.stderr, flush=True)
    shape = [0, 0, 0]
    for place, size in zip(perm, (4, 2, 3)):
        shape[place] = size
    x = np.arange(24, dtype=np.float32).reshape(shape)
    w = np.ones((3, 5), np.float32)
    g = Graph()
    value = g.input("x", shape)
    if how == "cast":
        value = g.transpose(value.cast("f16"), perm) @ g.constant(w.astype(np.float16))
        g.outputs = [value.cast("f32")]
        options = CompileOptions()
    else:
        g.outputs = [g.transpose(value, perm) @ g.constant(w)]
        options = CompileOptions(precision=rlx_ort.Precision.F16)
    (result,) = Session("cpu", options).compile(g).run({"x": x})
    np.testing.assert_allclose(result, x.transpose(perm) @ w, rtol=1e-2)
"""


def test_an_f16_product_of_transposed_data_runs() -> None:
    """Cast, Transpose and MatMul in f16 are right at full optimisation, and the process lives."""
    _run("-c", _PROGRAM)


_LOAD = """
import sys
import numpy as np
import rlx_ort

with np.load(sys.argv[2], allow_pickle=False) as arrays, rlx_ort.load(sys.argv[1]) as runner:
    (result,) = runner.run("cpu", {"x": arrays["x"]})
    np.testing.assert_allclose(result, arrays["y"], rtol=2e-2, atol=2e-3)
"""


def _run(*arguments: object) -> None:
    child = [sys.executable, "-P", *map(str, arguments)]
    done = subprocess.run(child, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def _model(
    nodes: list[onnx.NodeProto],
    shape: list[int | str],
    weights: dict[str, np.ndarray],
    elem_type: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "transposed",
        [helper.make_tensor_value_info("x", elem_type, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(data, name) for name, data in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_converted_lstm_with_a_linear_layer_runs(tmp_path: Path) -> None:
    """As PyTorch exports one with the batch first: the command writes f16, and that runs; nothing hidden is left."""
    source = np.random.default_rng(36)
    steps, width, hidden = 5, 8, 16
    shapes = {
        "w": (1, 4 * hidden, width),
        "r": (1, 4 * hidden, hidden),
        "b": (1, 8 * hidden),
        "m": (hidden, 4),
        "a": (4,),
    }
    weights = {name: source.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    nodes = [
        helper.make_node("Transpose", ["x"], ["steps"], perm=[1, 0, 2]),
        helper.make_node("LSTM", ["steps", "w", "r", "b"], ["all"], hidden_size=hidden),
        helper.make_node("Squeeze", ["all", "axis"], ["one"]),
        helper.make_node("Transpose", ["one"], ["rows"], perm=[1, 0, 2]),
        helper.make_node("MatMul", ["rows", "m"], ["product"]),
        helper.make_node("Add", ["product", "a"], ["y"]),
    ]
    model = _model(nodes, ["batch", steps, width], {**weights, "axis": np.array([1], np.int64)})
    onnx.save(model, tmp_path / "lstm.onnx")
    x = source.normal(0, 1, (2, steps, width)).astype(np.float32)
    np.savez(tmp_path / "arrays.npz", x=x, y=ReferenceEvaluator(model).run(None, {"x": x})[0])
    _run("-m", "rlx_ort", "convert", tmp_path / "lstm.onnx", tmp_path / "half.onnx", "--precision", "f16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arrays.npz", "half.onnx", "lstm.onnx"]
    half = {tensor.data_type for tensor in onnx.load(tmp_path / "half.onnx").graph.initializer}
    assert TensorProto.FLOAT16 in half
    _run("-c", _LOAD, tmp_path / "half.onnx", tmp_path / "arrays.npz")


@pytest.mark.parametrize("elem_type", [TensorProto.FLOAT, TensorProto.FLOAT16], ids=["cast", "f16 input"])
def test_a_file_of_four_nodes_runs(tmp_path: Path, elem_type: int) -> None:
    """Cast, Transpose and MatMul in f16 from a file, also where the input is f16 already."""
    nodes = [
        helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Transpose", ["half"], ["turned"], perm=[1, 0, 2]),
        helper.make_node("MatMul", ["turned", "w"], ["product"]),
        helper.make_node("Cast", ["product"], ["y"], to=TensorProto.FLOAT),
    ]
    source = np.random.default_rng(36)
    w = source.normal(0, 0.3, (3, 5)).astype(np.float16)
    onnx.save(_model(nodes, [2, 4, 3], {"w": w}, elem_type), tmp_path / "model.onnx")
    x = source.normal(0, 1, (2, 4, 3)).astype(np.float16)
    y = x.astype(np.float64).transpose(1, 0, 2) @ w.astype(np.float64)
    np.savez(tmp_path / "arrays.npz", x=x.astype(helper.tensor_dtype_to_np_dtype(elem_type)), y=y)
    _run("-c", _LOAD, tmp_path / "model.onnx", tmp_path / "arrays.npz")


@pytest.mark.parametrize("dtype", [DType.F16, DType.F32, DType.F64])
@pytest.mark.parametrize("centred", [False, True], ids=["RMS", "layer"])
@pytest.mark.parametrize(("epsilon", "cast"), [(1e-6, False), (0.1, False), (0.125, True)])
def test_a_norm_keeps_its_epsilon(dtype: DType, centred: bool, epsilon: float, cast: bool, device: Device) -> None:
    """Written in basic operators in its own precision, as imported models have it."""
    if working_provider(device).compiles:
        pytest.skip(f"{device.label} compiles graphs, with norms and bounds of its own")
    source = np.random.default_rng(36)
    x, gamma = (source.normal(0, 0.01, shape).astype(dtype.numpy) for shape in ((2, 3, 64), (64,)))
    g = Graph("norm")
    h, scale = g.input("x", x.shape, dtype), g.param("gamma", gamma.shape, dtype, data=gamma)
    last = g.constant(np.array([-1]))

    def node(op_type: str, *inputs: Any, size: int = 64, **attributes: Any) -> Any:
        return g.onnx_node(op_type, inputs, attributes, types=[TensorType(dtype, Shape((2, 3, size)))])[0]

    if centred:
        h = node("Sub", h, node("ReduceMean", h, last, size=1, keepdims=1))
    square = node("Pow", h, g.constant(2, dtype))
    mean = node("ReduceMean", square, last, size=1, keepdims=1)
    added = g.constant(epsilon, DType.F32).cast(dtype) if cast else g.constant(epsilon, dtype)
    root = node("Sqrt", node("Add", mean, added, size=1), size=1)
    result = node("Mul", node("Div", h, root), scale)
    g.outputs = [node("Add", result, g.constant(np.zeros(64), dtype)) if centred else result]
    if not supports_graph(device, g):
        pytest.skip(f"{device.label} has no kernels for it")
    wide = x.astype(np.float64)
    wide -= wide.mean(-1, keepdims=True) * centred
    stored = float(np.array(epsilon, dtype.numpy))
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + stored) * gamma.astype(np.float64)
    (found,) = Session(device).compile(g).run({"x": x})
    assert relative_error(found.astype(np.float64), want) < {DType.F16: 5e-3, DType.F32: 1e-5, DType.F64: 1e-12}[dtype]


def test_a_norm_in_a_branch_keeps_the_epsilon_of_the_graph_around_it(tmp_path: Path) -> None:
    """ONNX Runtime reads weights of outer graphs as well."""
    source = np.random.default_rng(36)
    nodes = [
        helper.make_node("Pow", ["x", "two"], ["squares"]),
        helper.make_node("ReduceMean", ["squares"], ["mean"], axes=[-1], keepdims=1),
        helper.make_node("Add", ["mean", "epsilon"], ["total"]),
        helper.make_node("Sqrt", ["total"], ["root"]),
        helper.make_node("Div", ["x", "root"], ["normal"]),
        helper.make_node("Mul", ["normal", "gamma"], ["scaled"]),
    ]
    kind, shape = TensorProto.DOUBLE, [2, 3, 64]
    branches = [
        helper.make_graph(body, name, [], [helper.make_tensor_value_info(name, kind, shape)])
        for name, body in (("scaled", nodes), ("same", [helper.make_node("Identity", ["x"], ["same"])]))
    ]
    graph = helper.make_graph(
        [helper.make_node("If", ["chosen"], ["y"], then_branch=branches[0], else_branch=branches[1])],
        "branches",
        [
            helper.make_tensor_value_info("chosen", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", kind, shape),
        ],
        [helper.make_tensor_value_info("y", kind, shape)],
        [
            numpy_helper.from_array(data, name)
            for name, data in {"two": np.array(2.0), "epsilon": np.array(0.1), "gamma": np.ones(64)}.items()
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    x = source.normal(0, 0.01, shape)
    with load(tmp_path / "m.onnx") as runner:
        (found,) = runner.run("cpu", {"chosen": np.array(True), "x": x})
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1)
    np.testing.assert_allclose(found, want, rtol=1e-12)
