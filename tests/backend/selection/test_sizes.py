"""The sizes that predictions are made for follow from those of the inputs, as ONNX Runtime has them in a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from rlx_ort import CompileOptions, Device, from_onnx, load
from rlx_ort.ir.types import TensorType
from rlx_ort.selection.candidates import Candidates
from rlx_ort.selection.predict import dims_of, explain, workload_on

F32, I64 = TensorProto.FLOAT, TensorProto.INT64


def model(nodes: list[Any], dims: list[Any], **constants: Any) -> onnx.ModelProto:
    """Return a model of one f32 input `x` and one output `y`, whose inner values have dims of their own names."""
    graph = helper.make_graph(
        nodes,
        "sizes",
        [helper.make_tensor_value_info("x", F32, dims)],
        [helper.make_tensor_value_info("y", F32, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
        value_info=[
            helper.make_tensor_value_info(name, F32, [f"{name}_{axis}" for axis in range(rank)])
            for name, rank in (("heads", 4), ("turned", 4))
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def of_attention(dims: list[Any]) -> onnx.ModelProto:
    """Return what PyTorch's older exporter makes of `x.view(n, t, 4, -1).transpose(1, 2) + mask.expand(...)`."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["n"]),
        helper.make_node("Gather", ["shape", "one"], ["t"]),
        helper.make_node("Gather", ["shape", "two"], ["width"]),
        helper.make_node("Div", ["width", "four"], ["each"]),
        *(helper.make_node("Unsqueeze", [name, "axis"], [f"{name}_1"]) for name in ("n", "t", "each")),
        helper.make_node("Concat", ["n_1", "t_1", "fours", "each_1"], ["to"], axis=0),
        helper.make_node("Reshape", ["x", "to"], ["heads"]),
        helper.make_node("Transpose", ["heads"], ["turned"], perm=[0, 2, 1, 3]),
        helper.make_node("Range", ["zero", "t", "one"], ["places"]),
        helper.make_node("Cast", ["places"], ["reals"], to=F32),
        helper.make_node("Unsqueeze", ["reals", "axis_of_row"], ["mask"]),
        helper.make_node("Concat", ["n_1", "ones", "t_1", "each_1"], ["wide"], axis=0),
        helper.make_node("ConstantOfShape", ["rank"], ["all_ones"], value=numpy_helper.from_array(np.array([1]))),
        helper.make_node("Mul", ["all_ones", "minus"], ["kept"]),
        helper.make_node("Equal", ["wide", "kept"], ["keeps"]),
        helper.make_node("Where", ["keeps", "all_ones", "wide"], ["sizes"]),
        helper.make_node("Expand", ["mask", "sizes"], ["expanded"]),
        helper.make_node("Add", ["turned", "expanded"], ["y"]),
    ]
    return model(
        nodes, dims, zero=0, one=1, two=2, four=4, axis=[0], axis_of_row=[1], fours=[4], ones=[1], rank=[4], minus=-1
    )


def convolutions(dims: list[Any]) -> onnx.ModelProto:
    """Return two convolutions, the second with a stride, and a reshape to (n, steps, channels)."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Conv", ["x", "first"], ["heads"], pads=[1, 1, 1, 1]),
        helper.make_node("Conv", ["heads", "second"], ["turned"], strides=[2, 2]),
        helper.make_node("Transpose", ["turned"], ["rows"], perm=[0, 3, 1, 2]),
        helper.make_node("Reshape", ["rows", "to"], ["y"]),
    ]
    weights = {"first": (8, 3, 3, 3), "second": (4, 8, 3, 3)}
    return model(nodes, dims, **{k: rng.random(v, np.float32) for k, v in weights.items()}, to=[0, 0, -1])


def shapes_of_run(proto: onnx.ModelProto, x: np.ndarray[Any, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape that each value has in a run of plain ONNX Runtime."""
    shown = onnx.ModelProto.FromString(proto.SerializeToString())
    names = [name for node in proto.graph.node for name in node.output]
    del shown.graph.output[:]
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(shown.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return {name: array.shape for name, array in zip(names, session.run(names, {"x": x}), strict=True)}


@pytest.mark.parametrize("named", [True, False], ids=["named", "nameless"])
@pytest.mark.parametrize(
    ("made", "dims", "shape"),
    [
        (of_attention, ["batch", "time", "width"], (3, 5, 8)),
        (of_attention, ["batch", "time", "width"], (64, 7, 32)),
        (convolutions, ["batch", 3, "high", "wide"], (2, 3, 20, 41)),
    ],
)
def test_sizes_are_those_of_a_run(
    made: Callable[[list[Any]], onnx.ModelProto], dims: list[Any], shape: tuple[int, ...], named: bool
) -> None:
    """Whatever names an exporter gave the dims in between."""
    proto = made(dims if named else [dim if isinstance(dim, int) else None for dim in dims])
    graph = from_onnx(proto)
    x = np.zeros(shape, np.float32)
    work = workload_on(graph, Device.CPU, CompileOptions(), dims_of(graph, {"x": x}))
    assert work is not None
    found = {
        name: kind.shape
        for node in work.nodes
        for name, kind in zip(node.output_names, node.outputs, strict=True)
        if isinstance(kind, TensorType)
    }
    real = shapes_of_run(proto, x)
    assert {name: tuple(found[name]) for name in real if name in found} == {n: real[n] for n in real if n in found}
    assert found.keys() >= {"heads", "turned", "y"}
    assert not work.assumed
    assert not any(kernel.guessed for kernel in work.counts)


def test_dims_without_a_size_are_assumed_and_listed() -> None:
    """By name, or by place where they have none."""
    graph = from_onnx(convolutions(["batch", 3, None, 41]))
    cpu = next(row for row in Candidates(graph).rank() if row.device == Device.CPU)
    assert cpu.assumed_dims == ("batch", "x[2]")
    sized = explain(graph, "cpu", dims={"batch": 32, "x[2]": 32})
    assumed = explain(graph, "cpu")
    assert sized is not None
    assert assumed is not None
    assert (assumed.assumed, assumed.total_ns) == (("batch", "x[2]"), sized.total_ns)


def test_a_size_that_depends_on_data_makes_the_price_a_guess() -> None:
    """The stated error says that nothing better is known."""
    nodes = [
        helper.make_node("NonZero", ["x"], ["places"]),
        helper.make_node("Cast", ["places"], ["reals"], to=F32),
        helper.make_node("Exp", ["reals"], ["y"]),
    ]
    graph = from_onnx(model(nodes, ["n"]))
    estimate = explain(graph, "cpu", dims={"n": 1000})
    assert estimate is not None
    assert {term.how for term in estimate.terms if "Exp" in term.kind} == {"assumed"}


def test_larger_inputs_are_predicted_to_take_longer_through_nameless_sizes() -> None:
    """All work of this model is on values whose dims have no name of an input."""
    runner_graph = from_onnx(convolutions(["batch", 3, "high", "wide"]))
    times = [explain(runner_graph, "cpu", dims={"batch": n, "high": 64, "wide": 64}) for n in (1, 64)]
    assert all(times)
    assert times[1].total_ns > 10 * times[0].total_ns  # type: ignore[union-attr]


def test_a_loaded_model_is_predicted_for_the_inputs_that_it_gets(tmp_path: Any) -> None:
    """Through the front door."""
    onnx.save(of_attention(["batch", "time", "width"]), tmp_path / "m.onnx")
    runner = load(tmp_path / "m.onnx")
    inputs = {"x": np.zeros((3, 5, 8), np.float32)}
    assert runner.run_fastest(inputs)[0].shape == (3, 4, 5, 2)


def branched(condition: str) -> Any:
    """Return a graph of an If of 2 x 8 or 1 x 8 elements: a product with a part of a weight, or a view and a Tanh."""
    weight = ", ".join(["0.5"] * 128)
    return from_onnx(
        onnx.parser.parse_model(
            f"""<ir_version: 8, opset_import: ["": 17]> g (float[n,8] x, bool given) => (y) <
              float[16,8] w = {{{weight}}}, int64[1] zero = {{0}}, int64[1] eight = {{8}}
            > {{
              rows = Shape <start = 0, end = 1> (x)
              one = Constant <value_ints = [1]> ()
              single = Equal (rows, one)
              alone = Squeeze (single)
              y = If ({condition}) <
                then_branch = a () => (p) {{ kept = Slice (w, zero, eight) p = MatMul (x, kept) }},
                else_branch = b () => (q) {{
                  sizes = Constant <value_ints = [-1, 8]> ()
                  back = Slice (sizes, zero, eight)
                  wide = Reshape (x, back)
                  q = Tanh (wide)
                }}
              >
            }}"""
        )
    )


@pytest.mark.parametrize(("rows", "run"), [(1, {"MatMul"}), (2, {"Tanh"})])
def test_a_branch_that_sizes_rule_out_costs_nothing(rows: int, run: set[str]) -> None:
    """Nor do the constants in a branch, which are computed once, when the session is opened."""
    estimate = explain(branched("alone"), "cpu", dims={"n": rows})
    assert {term.kind for term in estimate.terms} & {"MatMul", "Slice", "Tanh"} == run


def test_branches_of_a_fed_condition_count_once_each_with_their_sizes() -> None:
    """Only loops repeat what is in them."""
    for rows in (2, 3):
        work = workload_on(branched("given"), Device.CPU, CompileOptions(), {"n": rows})
        assert work is not None
        kernels = {kernel.op_type: kernel for kernel in work.kernels if kernel is not None}
        assert kernels["Tanh"].nbytes == 2 * rows * 8 * 4
        assert {kernel.times for kernel in kernels.values()} == {1}


def test_what_a_loop_carries_is_computed_in_every_trip() -> None:
    """Its body reads no constants alone; a loop of unknown length is taken to run eight times."""
    looped = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float[2,8] x, int64 trips) => (y) {
          y = Loop (trips, , x) <
            body = b (int64 trip, bool again, float[2,8] carried) => (bool on, float[2,8] next) {
              on = Identity (again)
              next = Tanh (carried)
            }
          >
        }"""
    )
    work = workload_on(from_onnx(looped), Device.CPU, CompileOptions(), {})
    assert work is not None
    assert [kernel.times for kernel in work.kernels if kernel is not None and kernel.op_type == "Tanh"] == [8]
