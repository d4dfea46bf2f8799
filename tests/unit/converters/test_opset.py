"""The opset of an exported model: 21 where every node means the same there, else the best that takes all."""

from __future__ import annotations

import re
from typing import Any

import onnx
import pytest
from onnx import parser

from rlx_ort import ConversionError, DType, Graph, from_onnx
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.converters.to_onnx.opset import BREAKS, NodeForm, obsolete_attributes, obstacle
from rlx_ort.ir.types import Shape, TensorType, UnknownType

F32 = TensorType(DType.F32, Shape([2, 3]))
I64 = TensorType(DType.I64, Shape([1]))


def opset(version: int, body: str, signature: str = "(float[2,3] x) => (float[2,3] y)", weights: str = "") -> int:
    text = f'<ir_version: 8, opset_import: ["" : {version}]> g {signature} {weights} {{ {body} }}'
    model = export_model(from_onnx(parser.parse_model(text)))
    return model.opsets[""]


@pytest.mark.parametrize("version", [7, 11, 13, 17, 20, 21, 22, 24, 26, 27, 28])
def test_a_plain_model_of_any_opset_is_exported_at_21(version: int) -> None:
    """Neg and Mul mean the same since 7."""
    assert opset(version, "a = Neg (x) y = Mul (a, x)") == 21


@pytest.mark.parametrize(
    ("version", "body", "signature", "expected"),
    [
        # Axes moved from attributes to inputs at 13 (Squeeze) and 18 (ReduceL2), and move with them.
        (17, "y = ReduceL2 <axes = [1]> (x)", "(float[2,3] x) => (float[2,1] y)", 21),
        (11, "y = Squeeze <axes = [0]> (x)", "(float[1,3] x) => (float[3] y)", 21),
        (11, "y = Squeeze (x)", "(float[1,3] x) => (float[3] y)", 21),
        # Softmax flattened before 13, as nodes of its own do where a rank is open; else its sizes would not be known.
        (11, "y = Softmax <axis = 0> (x)", "(float[2,3] x) => (float[2,3] y)", 11),
        (11, "r = Reshape (x, s) y = Softmax <axis = 0> (r)", "(float[2,3] x, int64[k] s) => (float[2,3] y)", 21),
        (13, "y = Softmax <axis = 1> (x)", "(float[2,3] x) => (float[2,3] y)", 21),
        # Upsample is gone from 10 on.
        (7, 'y = Upsample <mode = "nearest", scales = [1.0, 2.0]> (x)', "(float[2,3] x) => (float[2,6] y)", 7),
        # Operators that came after 21.
        (23, "y = RMSNormalization (x, s)", "(float[2,3] x, float[3] s) => (float[2,3] y)", 23),
        (24, "y = Swish (x)", "(float[2,3] x) => (float[2,3] y)", 24),
        # GroupNormalization means something else before 21, and is gone from the set at 20 in that form.
        (18, "y = GridSample (x, g)", "(float[1,1,2,2] x, float[1,2,2,2] g) => (float[1,1,2,2] y)", 18),
        # Before 7 a node broadcast by an attribute.
        (6, "y = Add <broadcast = 1> (x, b)", "(float[2,3] x, float[3] b) => (float[2,3] y)", 21),
        (6, "y = Add <broadcast = 1, axis = 1> (x, b)", "(float[2,3] x, float[3] b) => (float[2,3] y)", 21),
        (6, "y = Add <broadcast = 1, axis = 0> (x, b)", "(float[2,3] x, float[2] b) => (float[2,3] y)", 6),
        (6, "y = Dropout <is_test = 1> (x)", "(float[2,3] x) => (float[2,3] y)", 21),
        (6, "y = Dropout (x)", "(float[2,3] x) => (float[2,3] y)", 6),
        (6, "y = PRelu (x, s)", "(float[2,3] x, float[3] s) => (float[2,3] y)", 6),
    ],
)
def test_a_node_that_means_something_else_at_21_decides(version: int, body: str, signature: str, expected: int) -> None:
    """The model stays where its nodes mean what they say."""
    assert opset(version, body, signature) == expected


def test_an_attribute_that_says_the_default_may_be_left_behind() -> None:
    """Cast-24 with the default round_mode is Cast-21, and the attribute goes."""
    text = """<ir_version: 11, opset_import: ["" : 24]> g (float[2] x) => (int64[2] y)
    { y = Cast <to = 7, round_mode = "up", saturate = 1> (x) }"""
    graph = from_onnx(parser.parse_model(text))
    model = export_model(graph)
    assert model.opsets[""] == 21
    assert "round_mode" not in {attribute.name for attribute in model.model.graph.node[0].attribute}


def test_types_that_an_older_opset_lacks_decide() -> None:
    """Float8 exponents came to Cast with 24."""
    text = (
        """<ir_version: 12, opset_import: ["" : 24]> g (float[2] x) => (float8e8m0[2] y) { y = Cast <to = 24> (x) }"""
    )
    model = parser.parse_model(text.replace("float8e8m0", "float"))
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT8E8M0
    assert export_model(from_onnx(model)).opsets[""] == 24


def test_a_model_too_new_for_any_engine_stays_at_its_own_opset() -> None:
    """The engine refuses it with its own words; nothing is rewritten on a guess."""
    text = """<ir_version: 13, opset_import: ["" : 27]> g (float[1,2,3] x, float[2,1,2] w) => (float y, float s)
    { y, s = CausalConvWithState (x, w) }"""
    assert export_model(from_onnx(parser.parse_model(text))).opsets[""] == 27


def test_nodes_that_no_opset_takes_together_are_named() -> None:
    """An operator gone since 10 and one that came with 22 cannot share a model."""
    graph = Graph()
    x = graph.input("x", [2, 3])
    (a,) = graph.onnx_node(
        "Upsample", [x], {"mode": "nearest", "scales": (1.0, 1.0)}, types=[F32], version=7, name="old"
    )
    (y,) = graph.onnx_node("Swish", [a], types=[F32], version=24, name="new")
    graph.outputs = [y]
    with pytest.raises(ConversionError, match=r"(?s)'(new|old)'.*'(new|old)'"):
        export_model(graph)


def test_other_domains_keep_their_version() -> None:
    """Only ai.onnx is judged."""
    text = """<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 3]> g (float[2,3] x) => (float[2,3] y)
    { y = ai.onnx.ml.Scaler <offset = [0.0], scale = [2.0]> (x) }"""
    assert export_model(from_onnx(parser.parse_model(text))).opsets == {"": 21, "ai.onnx.ml": 3}


def form(op_type: str, *inputs: Any, outputs: Any = (F32,), **attributes: Any) -> NodeForm:
    return NodeForm(op_type, attributes, inputs or (F32,), outputs)


def floats(*dims: int | str) -> TensorType:
    return TensorType(DType.F32, Shape(dims))


@pytest.mark.parametrize(
    ("node", "written", "target", "reason"),
    [
        (form("Neg"), 13, 21, ""),
        (form("Neg"), 6, 13, ""),
        (form("Relu", __note=1), 14, 21, ""),  # of whoever wrote the model
        (form("Cast", to=1), 13, 21, ""),  # 19 added saturate, which only float8 looks at
        (form("Softmax"), 11, 13, "flattened"),
        (form("Squeeze", axes=(0,)), 11, 13, "no attribute axes"),  # the axes became an input
        (form("GroupNormalization", num_groups=1), 18, 20, ""),  # as little in force there as here
        (form("Nothing"), 13, 21, "no Nothing"),
        (form("Swish"), 24, 21, "no Swish"),
        (form("Clip", min=0.0), 6, 21, "no attribute min"),
        (form("Concat"), 1, 21, "needs attribute axis"),
        (form("Selu"), 1, 21, "another default"),
        (form("Cast", to="FLOAT"), 1, 21, "target type was a string"),
        (form("Slice"), 1, 21, "needs input starts"),
        (form("Relu", TensorType(DType.I32, Shape([2]))), 14, 13, "does not take tensor\\(int32\\)"),
        (form("Relu", UnknownType(), outputs=(UnknownType(),)), 14, 13, "unknown type"),
        (form("Relu", UnknownType(), outputs=(UnknownType(),)), 13, 14, ""),
        (form("BatchNormalization", *[F32] * 5), 9, 21, ""),
        (form("BatchNormalization", *[F32] * 5), 6, 21, "is_test"),
        (form("BatchNormalization", *[F32] * 5, is_test=1), 6, 21, ""),
        (form("BatchNormalization", *[F32] * 5, outputs=[F32] * 5), 9, 21, "running_mean|saved|no "),
        (form("AveragePool", pads=(0, 0), kernel_shape=(2,)), 6, 21, ""),
        (form("AveragePool", pads=(1, 1), kernel_shape=(2,)), 6, 21, "padding"),
        (form("Split", F32), 13, 21, "num_outputs"),
        (form("Split", F32, I64), 13, 21, ""),
        (form("DFT", F32), 17, 21, "axis"),
        (form("GroupNormalization", *[F32] * 3, num_groups=1), 18, 21, "per channel"),
        (form("Relu", consumed_inputs=(0,)), 1, 21, ""),
        (form("Add", floats(2, 3), floats(2, 1), broadcast=1), 6, 21, ""),
        (form("Add", floats(2, 1), floats(2, 3), broadcast=1), 6, 21, "shape of the first"),
        (form("Mul", floats(3), floats(2, 3)), 6, 21, "shape of the first"),
        (form("Mul", floats(3), floats(2, 3)), 7, 21, ""),
        (form("Max", floats(1, 3), floats(3, 3)), 6, 21, "shape of the first"),
        (form("Sub", floats("n"), floats("m")), 6, 21, ""),
    ],
)
def test_why_a_node_may_not_move(node: NodeForm, written: int, target: int, reason: str) -> None:
    """The reason names the operator and what differs; an empty one means that it may move."""
    found = obstacle(node, written, target)
    if reason:
        assert re.search(reason, found), found
    else:
        assert found == ""


def test_notes_at_a_node_stay() -> None:
    """Attributes that an opset lacks go, and those that no opset has are not the operator's."""
    assert obsolete_attributes("Relu", ["__note", "consumed_inputs"], 1, 21) == ["consumed_inputs"]


def test_moving_is_judged_the_same_in_both_directions() -> None:
    """A silent change of meaning blocks the way back as well."""
    assert obstacle(form("Softmax"), 13, 11)
    assert obstacle(form("GridSample", F32, F32), 20, 16)


def test_every_silent_change_names_a_version_of_its_operator() -> None:
    """A typo in the list would make an entry that never applies."""
    versions: dict[str, set[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            versions.setdefault(schema.name, set()).add(schema.since_version)
    for op_type, changes in BREAKS.items():
        for change in changes:
            assert change.version in versions[op_type], f"{op_type} has no version {change.version}"
            assert change.reason


def test_a_floored_remainder_of_floats_stays_in_opset_28() -> None:
    """Before 28 floats had fmod=1 only; remainders of integers floor in both."""
    whole = TensorType(DType.I32, F32.shape)
    assert "floors" in obstacle(NodeForm("Mod", {}, (F32, F32), (F32,)), 28, 21)
    assert not obstacle(NodeForm("Mod", {"fmod": 1}, (F32, F32), (F32,)), 28, 21)
    assert not obstacle(NodeForm("Mod", {}, (whole, whole), (whole,)), 28, 21)


def test_a_shift_that_may_be_as_wide_as_the_type_stays_in_opset_28() -> None:
    """It is 0 there; ONNX Runtime 1.24 shifts by the remainder in the older form, which leaves such shifts open."""
    whole = TensorType(DType.U64, Shape([2]))
    node = NodeForm("BitShift", {"direction": "RIGHT"}, (whole, whole), (whole,))
    assert "defined, as 0, from 28 on" in obstacle(node, 28, 21)
    assert not obstacle(node, 11, 26)
    assert not obstacle(node, 11, 28)


def test_an_opset_that_the_installed_onnx_does_not_know_is_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its schemas of older versions would be taken for those of the new one."""
    monkeypatch.setattr(onnx.defs, "onnx_opset_version", lambda: 26)
    assert "does not know opset 27" in obstacle(NodeForm("Relu", {}, (F32,), (F32,)), 21, 27)
    assert not obstacle(NodeForm("Relu", {}, (F32,), (F32,)), 21, 26)
