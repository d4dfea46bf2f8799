"""Which form a node is written in, for a kernel set that the test makes up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlx_ort import CompileOptions, ConversionError, DType, Graph, KernelDispatch, KernelDispatchPolicy
from rlx_ort.converters.to_onnx import exporter, to_onnx
from rlx_ort.converters.to_onnx.dispatch import COMMON, NATIVE, KernelSet
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.ir.types import Shape, TensorType, ValueType

FORCE_NATIVE = CompileOptions(kernel_dispatch=KernelDispatch(KernelDispatchPolicy.FORCE_NATIVE))
FORCE_COMMON = CompileOptions(kernel_dispatch=KernelDispatch(KernelDispatchPolicy.FORCE_COMMON))


def kernels(*op_types: str, dtype: DType = DType.F32) -> KernelSet:
    def takes(
        domain: str,
        op_type: str,
        version: int,
        inputs: Sequence[ValueType | None],
        outputs: Sequence[ValueType | None],
    ) -> bool:
        first = inputs[0]
        return op_type in op_types and isinstance(first, TensorType) and first.dtype is dtype

    return KernelSet("TestEP", (op_types, dtype), takes)


def block(mask: str = "none", q_len: int | str = 4, k_len: int | str = 4) -> Graph:
    g = Graph("block")
    q = g.input("q", [2, q_len, 16])
    k = g.input("k", [2, k_len, 16])
    g.outputs = [g.silu(g.attention_kind(q, k, k, 2, 8, mask, name="mix"))]
    return g


def op_types(graph: Graph, options: CompileOptions | None = None, claimed: KernelSet | None = None) -> set[str]:
    return {node.op_type for node in exporter.export_model(graph, options, claimed).nodes}


def test_without_kernels_the_basic_form_is_written() -> None:
    """A file may go to any provider."""
    assert not {"MultiHeadAttention", "QuickGelu"} & op_types(block())
    assert "MultiHeadAttention" not in {node.op_type for node in to_onnx(block()).graph.node}


def test_forced_native_writes_fused_ops_into_a_file() -> None:
    """Whoever asks for it knows where the file goes."""
    assert {node.op_type for node in to_onnx(block(), FORCE_NATIVE).graph.node} == {"MultiHeadAttention", "QuickGelu"}


def test_each_op_goes_by_its_own_kernel() -> None:
    """One kernel is there, the other one is not."""
    model = exporter.export_model(block(), None, kernels("QuickGelu"))
    assert {"QuickGelu", "Softmax"} <= {node.op_type for node in model.nodes}
    assert {model.origin_names[index]: set(forms) for index, forms in model.forms.items()} == {
        "mix": {COMMON},
        "silu": {NATIVE},
    }


def test_a_kernel_for_another_dtype_does_not_count() -> None:
    """The provider has the operator in f16 only, the graph is f32."""
    assert "QuickGelu" not in op_types(block(), None, kernels("QuickGelu", dtype=DType.F16))


@pytest.mark.parametrize(
    ("mask", "q_len", "k_len", "fused"),
    [
        ("none", 4, 4, True),
        ("none", "n", "m", True),
        ("causal", 4, 4, True),
        ("causal", 2, 4, False),
        ("causal", "n", "n", False),
        ("sliding:1", 4, 4, False),
    ],
)
def test_attention_is_fused_where_the_kernel_is_known_to_be_right(
    mask: str, q_len: int | str, k_len: int | str, fused: bool
) -> None:
    """Other masks differ from the IR's, so they keep the basic form."""
    found = op_types(block(mask, q_len, k_len), None, kernels("MultiHeadAttention"))
    assert ("MultiHeadAttention" in found) is fused


@pytest.mark.parametrize(
    ("made_by", "claimed", "kept"), [("softmax", "", False), ("softmax", "IsNaN", True), ("relu", "", True)]
)
def test_a_row_of_softmax_is_tested_by_its_largest_value_where_no_kernel_tests_for_nan(
    made_by: str, claimed: str, kept: bool
) -> None:
    """For values that no Softmax makes there is no other form, so the node stays and the device refuses it."""
    g = Graph("safe")
    made = getattr(g, made_by)(g.input("x", ["n", 4]))
    g.outputs = g.onnx_node("IsNaN", [made], types=[TensorType(DType.BOOL, made.type.shape)])
    found = op_types(g, None, kernels("Softmax", claimed))
    assert ("IsNaN" in found, {"ReduceMax", "Expand"} <= found) == (kept, not kept)


def test_forced_common_ignores_the_kernels() -> None:
    """That is what it is for."""
    everything = kernels("MultiHeadAttention", "QuickGelu")
    assert not {"MultiHeadAttention", "QuickGelu"} & op_types(block(), FORCE_COMMON, everything)


def test_a_node_that_cannot_have_the_forced_form_is_named_with_the_reason() -> None:
    """Every such node is listed at once, each with its own reason."""
    with pytest.raises(ConversionError) as caught:
        exporter.export_model(block("causal", 2, 4), FORCE_NATIVE, kernels("MultiHeadAttention"))
    text = str(caught.value)
    assert "'mix' (Attention): a causal mask needs as many queries as keys" in text
    assert "'silu' (Activation): TestEP has no kernel for com.microsoft::QuickGelu" in text
    assert "force_common_kinds" in text


def test_a_kind_can_be_excepted_from_a_forced_form() -> None:
    """The remedy that the error names works."""
    config = KernelDispatch(KernelDispatchPolicy.FORCE_NATIVE, force_common_kinds=frozenset({"Attention"}))
    found = op_types(block("causal", 2, 4), CompileOptions(kernel_dispatch=config), kernels("QuickGelu"))
    assert {"QuickGelu", "Softmax"} <= found


def test_an_op_with_one_form_is_written_in_it_under_every_policy() -> None:
    """Forcing native does not refuse what has no alternative."""
    g = Graph()
    x = g.input("x", [2, 4])
    g.outputs = [g.relu(x + x)]
    assert op_types(g, FORCE_NATIVE, kernels()) == op_types(g, FORCE_COMMON, kernels()) == {"Add", "Relu"}


def test_models_are_remembered_by_what_they_are_written_for() -> None:
    """Other kernels, policies, precisions or opsets give other models; equal ones give the same."""
    graph, some, others = block(), kernels("QuickGelu"), kernels("MultiHeadAttention")
    first = exporter.exported(graph, None, some)
    assert exporter.exported(graph, None, kernels("QuickGelu")) is first
    assert exporter.exported(graph, None, others) is not first
    assert exporter.exported(graph, FORCE_COMMON, some) is not first
    assert exporter.exported(graph, CompileOptions(opset=22), some) is not first


def test_devices_share_a_model_without_choices() -> None:
    """Where no op has two forms, the kernels do not matter."""
    g = Graph()
    g.outputs = [g.relu(g.input("x", [2]))]
    assert exporter.exported(g, None, kernels("A")) is exporter.exported(g, None, kernels("B"))


def test_an_opset_that_is_asked_for_is_had() -> None:
    """The default is 21; an older one is taken where the nodes allow it."""
    g = Graph()
    g.outputs = [g.relu(g.input("x", [2]))]
    for wanted in (13, 17, 24):
        assert exporter.export_model(g, CompileOptions(opset=wanted)).opsets[""] == wanted


@pytest.mark.parametrize(
    ("wanted", "match"), [(13, "'gelu'.*ai.onnx has no Gelu in opset 13"), (99, "ONNX Runtime loads")]
)
def test_an_opset_that_cannot_be_had_is_an_error(wanted: int, match: str) -> None:
    """The message names the node that needs a newer one."""
    g = Graph()
    g.outputs = [g.gelu(g.input("x", [2]))]
    with pytest.raises(ConversionError, match=match):
        exporter.export_model(g, CompileOptions(opset=wanted))


def test_engine_operators_fit_every_opset() -> None:
    """SimplifiedLayerNormalization is in no opset of ONNX, and follows when another node needs a newer one."""
    g = Graph()
    x = g.input("x", [2, 4])
    g.outputs = [g.rms_norm(x, g.param("w", [4]))]
    model = exporter.export_model(g, CompileOptions(opset=23), kernels("SimplifiedLayerNormalization"))
    assert [node.op_type for node in model.nodes] == ["SimplifiedLayerNormalization"]
    assert model.opsets[""] == 23


def test_a_cast_like_a_known_type_is_a_cast() -> None:
    """It no longer reads the value whose type it takes, so that ONNX Runtime can fold it."""
    graph = Graph("like")
    x, like = graph.input("x", [2]), graph.input("like", [3], "i64")
    graph.outputs = graph.onnx_node("CastLike", [x, like], types=[TensorType(DType.I64, Shape((2,)))])
    (node,) = export_model(graph).model.graph.node
    assert (node.op_type, list(node.input)) == ("Cast", ["x"])
    assert {attribute.name: attribute.i for attribute in node.attribute} == {"to": 7}
