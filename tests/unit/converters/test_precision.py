"""What a precision policy does to a graph: which values it touches, and which it must not."""

from __future__ import annotations

import numpy as np
import pytest

from rlx_ort import CompileOptions, ConversionError, DType, Graph, Precision, op_kinds, verify
from rlx_ort.converters.precision_pass import KIND_CLASSES, ONNX_CLASSES, apply_precision
from rlx_ort.converters.to_onnx import exporter, to_onnx
from rlx_ort.execution.weights import WeightStore
from rlx_ort.ir.tensor import TensorData, narrowed
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.options.precision import OpClass, PrecisionPolicy

F16 = PrecisionPolicy.auto_mixed()


def dtypes(graph: Graph) -> dict[str, DType]:
    """Return name -> dtype of every value."""
    kinds = ((name, kind) for node in graph.nodes for name, kind in zip(node.output_names, node.types, strict=True))
    return {name: kind.dtype for name, kind in kinds if isinstance(kind, TensorType)}


def casts(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes if node.op.kind == "Cast"]


def mlp() -> Graph:
    g = Graph("mlp")
    x = g.input("x", ["n", 4])
    hidden = g.relu(g.matmul(x, g.param("w", [4, 4], data=np.eye(4, dtype=np.float32)), name="product"))
    g.outputs = [g.softmax(hidden, name="result")]
    return g


def test_the_policy_that_changes_nothing_returns_the_graph() -> None:
    """f32 is free."""
    g = mlp()
    assert apply_precision(g, PrecisionPolicy.always_f32()).graph is g


def test_mixed_f16_computes_inside_in_f16_and_keeps_the_interface() -> None:
    """Inputs and outputs stay f32, under their names, with one cast at each end."""
    narrow = apply_precision(mlp(), F16)
    found = dtypes(narrow.graph)
    assert (found["x"], found["product"], found["relu"], found["w"]) == (DType.F32, DType.F16, DType.F16, DType.F16)
    assert [value.dtype for value in narrow.graph.outputs] == [DType.F32]
    assert narrow.graph.output_names == ["result"]
    assert casts(narrow.graph) == ["x/f16", "result/f32"]
    assert verify(narrow.graph) == []


@pytest.mark.parametrize(
    ("policy", "wanted", "added"),
    [
        pytest.param(PrecisionPolicy.always_f16(), "f16 f16 f16 f16 f16", [], id="f16 at the boundary too"),
        pytest.param(
            PrecisionPolicy.auto_mixed_conservative(),
            "f32 f16 f16 f16 f32",
            ["x/f16", "relu/f32"],
            id="reductions in f32, with a cast before softmax and none after",
        ),
        pytest.param(
            PrecisionPolicy.custom({OpClass.COMPUTE: "bf16"}),
            "f32 bf16 bf16 f32 f32",
            ["x/bf16", "product/f32"],
            id="classes that are left out in f32",
        ),
    ],
)
def test_a_policy_says_what_each_class_computes_in(policy: PrecisionPolicy, wanted: str, added: list[str]) -> None:
    """Casts stand where a reader wants another type than the node before gives."""
    graph = apply_precision(mlp(), policy).graph
    found = dtypes(graph)
    assert [found[name].value for name in ("x", "w", "product", "relu", "result")] == wanted.split()
    assert casts(graph) == added


def test_a_policy_of_integers_is_refused() -> None:
    """Only floating-point types make sense."""
    with pytest.raises(ConversionError, match="f32, f16 or bf16; compute"):
        PrecisionPolicy.custom({OpClass.COMPUTE: "i8"})


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (Precision.F32, DType.F32),
        (Precision.TF32, DType.F32),
        (Precision.F16, DType.F16),
        (Precision.BF16, DType.BF16),
    ],
)
def test_the_precision_option_stands_for_a_policy(precision: Precision, dtype: DType) -> None:
    """The boundary is f32 in all of them."""
    policy = CompileOptions(precision=precision).effective_precision
    assert (policy.compute, policy.reduction, policy.boundary) == (dtype, dtype, DType.F32)


def test_integers_bools_and_f64_are_never_touched() -> None:
    """Indices, masks and comparisons keep their dtype; so does what is declared f64."""
    g = Graph()
    ids = g.input("ids", [3], "i64")
    wide = g.input("wide", [3, 2], "f64")
    table = g.param("table", [10, 2])
    rows = g.gather(table, ids, axis=0)
    flag = g.compare("lt", rows, 0.5)
    g.outputs = [g.where_(flag, rows, rows * 2.0), ids + 1, wide * 2.0, flag]
    graph = apply_precision(g, F16).graph
    found = dtypes(graph)
    assert (found["ids"], found["wide"], found["gather"]) == (DType.I64, DType.F64, DType.F16)
    assert [value.dtype for value in graph.outputs] == [DType.F32, DType.I64, DType.F64, DType.BOOL]
    assert not any(name.startswith(("ids", "wide")) for name in casts(graph))
    assert verify(graph) == []


def test_a_value_is_cast_once_for_all_its_readers() -> None:
    """Three readers, one cast."""
    g = Graph()
    x = g.input("x", [2, 2])
    g.outputs = [g.relu(x) + g.tanh(x) + g.sigmoid(x)]
    assert casts(apply_precision(g, F16).graph)[:1] == ["x/f16"]
    assert len(casts(apply_precision(g, F16).graph)) == 2


def test_every_new_node_stands_for_a_node_of_the_user() -> None:
    """Reports name the user's nodes, casts included."""
    g = mlp()
    narrow = apply_precision(g, F16)
    names = {node.name: g.nodes[narrow.origins[node.id]].name for node in narrow.graph.nodes}
    assert names == {
        "x": "x", "w": "w", "product": "product", "relu": "relu", "result": "result",
        "x/f16": "product", "result/f32": "result",
    }  # fmt: skip
    model = exporter.export_model(g, CompileOptions(precision=Precision.F16))
    assert {model.origin_names[node.origin] for node in model.nodes} == {"product", "relu", "result"}


def test_a_parameter_that_is_read_in_f32_too_stays_f32() -> None:
    """It is stored narrow only when all its readers want that."""
    g = Graph()
    x = g.input("x", [2, 4])
    w = g.param("w", [4, 4])
    only = g.param("only", [4, 4])
    g.outputs = [x @ w, g.cumsum(w, 0), x @ only]
    narrow = apply_precision(g, PrecisionPolicy.auto_mixed_conservative())
    assert dict(narrow.stored_as) == {"only": DType.F16}
    assert "w/f16" in casts(narrow.graph)


def test_parameters_are_set_in_the_declared_dtype_and_rounded_for_the_session() -> None:
    """The store takes f32, gives the f16 that the model wants, and makes it once."""
    store = WeightStore({"w": TensorType(DType.F32, Shape([2]))})
    store.set("w", np.array([1.0, 1.0 + 2**-12], np.float32))
    _, first = store.snapshot(["w"], {"w": DType.F16})
    _, again = store.snapshot(["w"], {"w": DType.F16})
    _, plain = store.snapshot(["w"])
    assert first["w"] is again["w"]
    np.testing.assert_array_equal(first["w"].numpy(), np.array([1, 1], np.float16))
    assert plain["w"].dtype is DType.F32
    store.set("w", np.array([2.0, 3.0], np.float32))
    _, newer = store.snapshot(["w"], {"w": DType.F16})
    np.testing.assert_array_equal(newer["w"].numpy(), np.array([2, 3], np.float16))


def test_a_written_model_has_its_weights_in_the_dtype_it_wants() -> None:
    """The file is half as large."""
    (weight,) = to_onnx(mlp(), CompileOptions(precision=Precision.F16)).graph.initializer
    assert (weight.name, weight.data_type) == ("w", 10)  # TensorProto.FLOAT16


@pytest.mark.parametrize(("dtype", "largest"), [(DType.F16, 65504.0), (DType.BF16, 3.3895313892515355e38)])
def test_masks_become_numbers_that_the_type_can_hold(dtype: DType, largest: float) -> None:
    """A finite number stays finite, an infinite one infinite; else a fully masked row would be NaN."""
    wide = np.array([-np.inf, np.finfo(np.float32).min, 0, 1.5, np.inf], np.float32)
    found = narrowed(TensorData.from_array(wide), dtype).numpy().astype(np.float64)
    np.testing.assert_array_equal(found, [-np.inf, -largest, 0, 1.5, np.inf])


@pytest.mark.parametrize("known", [True, False])
def test_a_batch_norm_with_a_variance_beyond_the_type_stays_f32(known: bool) -> None:
    """Clamped to 65504, it would scale a channel 39 times too much."""
    g = Graph()
    x = g.input("x", [1, 2, 3, 3])
    variance = np.array([1, 1e8], np.float32)
    scale, bias, mean = (g.param(name, [2], data=np.ones(2, np.float32)) for name in ("scale", "bias", "mean"))
    spread = g.param("variance", [2], data=variance if known else None)
    g.outputs = [g.batch_norm_inference(g.relu(x), scale, bias, mean, spread, name="norm")]
    found = dtypes(apply_precision(g, F16).graph)
    assert (found["norm"], found["relu"]) == (DType.F32 if known else DType.F16, DType.F16)


def test_constants_are_rounded_when_the_model_is_written() -> None:
    """A mask constant of -1e9 takes part as -65504, without a cast at run time."""
    g = Graph()
    x = g.input("x", [2, 4])
    g.outputs = [x + g.constant(np.float32(-1e9))]
    graph = apply_precision(g, F16).graph
    (made,) = [node for node in graph.nodes if node.name == "constant/f16"]
    assert made.op.data.numpy() == np.float16(-65504)  # type: ignore[attr-defined]  # a Constant
    assert casts(graph) == ["x/f16", "add/f32"]


def test_shape_computation_in_floats_is_untouched() -> None:
    """A size that goes through f32 would be rounded in f16: 4097 becomes 4096."""
    g = Graph()
    x = g.input("x", ["n", 4])
    (size,) = g.onnx_node("Shape", [x], types=[TensorType(DType.I64, Shape([2]))])
    scaled = g.cast(size, "f32") * 0.5
    (target,) = g.onnx_node("Floor", [scaled], types=[TensorType(DType.F32, Shape([2]))])
    g.outputs = [g.cast(target, "i64"), g.relu(x)]
    graph = apply_precision(g, F16).graph
    assert casts(graph) == ["cast", "cast_2", "x/f16", "relu/f32"]
    assert dtypes(graph)["mul"] is DType.F32


def test_imported_sines_of_positions_are_computed_in_f32() -> None:
    """In f16 position 2049 is 2048; sines of what the model has computed follow the policy."""
    f32 = TensorType(DType.F32, Shape(["n", 4]))
    g = Graph()
    places, x = g.input("places", ["n", 1], "i64"), g.input("x", ["n", 4])
    rates = g.param("rates", [1, 4], data=np.ones((1, 4), np.float32))
    (floats,) = g.onnx_node("Cast", [places], {"to": 1}, types=[TensorType(DType.F32, Shape(["n", 1]))])
    (angles,) = g.onnx_node("Mul", [floats, rates], types=[f32])
    (cosines,) = g.onnx_node("Cos", [angles], types=[f32])
    (active,) = g.onnx_node("Relu", [x], types=[f32])
    (waves,) = g.onnx_node("Sin", [active], types=[f32])
    (turned,) = g.onnx_node("Add", [waves, cosines], types=[f32])
    g.outputs = [turned]
    narrowed = apply_precision(g, F16)
    found = dtypes(narrowed.graph)
    assert {found[name] for name in ("rates", "mul", "cos")} == {DType.F32}
    assert {found[name] for name in ("relu", "sin", "add")} == {DType.F16}
    kept = dict.fromkeys((value.ref.node for value in (floats, angles, cosines)), "it computes sines of positions")
    assert narrowed.kept == kept


@pytest.mark.parametrize("over", ["Div", "Reciprocal"])
@pytest.mark.parametrize("squared", ["Pow", "Mul"])
def test_imported_rms_norms_are_computed_in_f32_and_scaled_as_the_policy_says(over: str, squared: str) -> None:
    """The square of 300 is no f16."""
    f32, thin = TensorType(DType.F32, Shape(["n", 4])), TensorType(DType.F32, Shape(["n", 1]))
    g = Graph()
    x = g.input("x", ["n", 4])
    scale = g.param("scale", [4], data=np.ones(4, np.float32))
    (h,) = g.onnx_node("Relu", [x], types=[f32])
    other = h if squared == "Mul" else g.constant(np.float32(2))
    (square,) = g.onnx_node(squared, [h, other], types=[f32], name="square")
    (mean,) = g.onnx_node("ReduceMean", [square, g.constant(np.array([-1]))], {"keepdims": 1}, types=[thin])
    (total,) = g.onnx_node("Add", [mean, g.constant(np.float32(1e-6))], types=[thin])
    (root,) = g.onnx_node("Sqrt", [total], types=[thin])
    if over == "Reciprocal":
        (root,) = g.onnx_node("Reciprocal", [root], types=[thin])
    (normal,) = g.onnx_node("Div" if over == "Div" else "Mul", [h, root], types=[f32], name="normal")
    (scaled,) = g.onnx_node("Mul", [scale, normal], types=[f32], name="scaled")
    g.outputs = [scaled]
    found = dtypes(apply_precision(g, F16).graph)
    assert {found[name] for name in ("square", "normal")} == {DType.F32}
    assert {found[name] for name in ("relu", "scale", "scaled")} == {DType.F16}


def test_imported_nodes_follow_where_their_schema_allows() -> None:
    """Resize takes f16 data and only f32 scales; a foreign operator is left alone."""
    f32 = TensorType(DType.F32, Shape([1, 1, 4, 4]))
    g = Graph()
    x = g.input("x", [1, 1, 2, 2])
    scales = g.constant(np.array([1, 1, 2, 2], np.float32), name="scales")
    (big,) = g.onnx_node("Resize", [x, None, scales], {"mode": "nearest"}, types=[f32], version=19)
    (foreign,) = g.onnx_node("Magic", [big], types=[f32], domain="test.domain", version=1)
    g.outputs = [foreign]
    graph = apply_precision(g, F16).graph
    assert (dtypes(graph)["resize"], dtypes(graph)["scales"], dtypes(graph)["magic"]) == (
        DType.F16,
        DType.F32,
        DType.F32,
    )
    assert casts(graph) == ["x/f16", "resize/f32"]


def test_an_imported_node_without_the_dtype_stays_f32() -> None:
    """MaxPool takes no bf16 at opset 12, and Relu does from 13 on."""
    f32 = TensorType(DType.F32, Shape([1, 1, 2, 2]))
    g = Graph()
    x = g.input("x", [1, 1, 2, 2])
    (pooled,) = g.onnx_node("MaxPool", [x], {"kernel_shape": (1, 1)}, types=[f32], version=12)
    (active,) = g.onnx_node("Relu", [pooled], types=[f32], version=13)
    g.outputs = [active]
    found = dtypes(apply_precision(g, PrecisionPolicy.auto_mixed_bf16()).graph)
    assert (found["maxpool"], found["relu"]) == (DType.F32, DType.BF16)


def test_ops_with_bodies_stay_f32() -> None:
    """What a loop carries would lose a little in each round."""
    g = Graph()
    x = g.input("x", [2])
    body = Graph("body")
    inner = body.input("v", [2])
    body.outputs = [inner * 2.0]
    g.outputs = [g.custom_fn([g.relu(x)], body)]
    graph = apply_precision(g, F16).graph
    assert (dtypes(graph)["relu"], dtypes(graph)["customfn"]) == (DType.F16, DType.F32)
    assert casts(graph) == ["x/f16", "relu/f32"]
    assert verify(graph) == []


def test_the_classes_name_ops_that_exist() -> None:
    """A renamed op would fall out of its class without a word."""
    import onnx

    assert set(KIND_CLASSES) <= set(op_kinds())
    assert set(ONNX_CLASSES) <= {schema.name for schema in onnx.defs.get_all_schemas()}
