"""When attention in basic operators becomes one node, and when it stays as it is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
from model_corpus import user_model

import rlx_ort
from rlx_ort import CompileOptions
from rlx_ort.converters.bundle import bundle_of
from rlx_ort.converters.from_onnx import from_onnx
from rlx_ort.converters.to_onnx.dispatch import KernelSet
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.converters.transforms.fuse import fused
from rlx_ort.ir.types import TensorType
from rlx_ort.providers.claims import kernel_set
from rlx_ort.providers.cuda import CudaProvider
from rlx_ort.providers.webgpu import WebGpuProvider

EVERY = KernelSet("every kernel", None, lambda *_: True)
FUSED = CompileOptions(fusion=True)
TEXT = """
<ir_version: 9, opset_import: ["": 20]>
attention (float[b, s, 8] x) => ({outputs}) <int64[4] parts = {{0, 0, 2, 4}}, int64[3] whole = {{0, 0, 8}}> {{
    h = Reshape (x, parts)
    q = Transpose <perm = [0, 2, 1, 3]> (h)
    k = Transpose <perm = [0, 2, 3, 1]> (h)
    scores = MatMul (q, k)
    weights = Softmax <axis = {axis}> (scores)
    {tail}
    mixed = MatMul (kept, q)
    turned = Transpose <perm = [0, 2, 1, 3]> (mixed)
    y = Reshape (turned, whole)
}}
"""
Y = "float[b, s, 8] y"
Q = "float[b, 4, s, 8]"


def operators(outputs: str = Y, axis: int = -1, tail: str = "kept = Cast <to = 1> (weights)") -> Counter[str]:
    """Return the operators of an exported model."""
    model = onnx.parser.parse_model(TEXT.format(outputs=outputs, axis=axis, tail=tail))
    return Counter(node.op_type for node in export_model(from_onnx(model), FUSED, EVERY).nodes)


def test_a_pattern_becomes_one_node() -> None:
    """With the numbers of heads and the scale of its nodes."""
    found = operators()
    assert found["MultiHeadAttention"] == 1
    assert not {"Softmax", "MatMul", "Transpose"} & found.keys()


@pytest.mark.parametrize(
    ("outputs", "axis", "tail"),
    [
        (f"{Y}, float[b, 2, s, s] weights", -1, "kept = Cast <to = 1> (weights)"),
        (Y, 2, "kept = Cast <to = 1> (weights)"),
        (Y, -1, "kept = Relu (weights)"),
        (f"{Y}, float[b, 2, s, s] other", -1, "other = Relu (weights) kept = Cast <to = 1> (weights)"),
    ],
    ids=["its weights are an output", "another axis", "something in between", "something else reads its weights"],
)
def test_what_attention_does_not_compute_stays(outputs: str, axis: int, tail: str) -> None:
    found = operators(outputs, axis, tail)
    assert found["MultiHeadAttention"] == 0
    assert found["MatMul"] == 2


def standard(call: str, q: str = Q, k: str = Q, more: str = "", opset: int = 24) -> Counter[str]:
    """Return the operators of an exported model of one `Attention`."""
    text = f"""<ir_version: 10, opset_import: ["": {opset}]>
        attention ({q} q, {k} k, {k} v{more}) => (float[b, h, s, d] y) {{ {call} }}"""
    return Counter(node.op_type for node in export_model(from_onnx(onnx.parser.parse_model(text)), FUSED, EVERY).nodes)


@pytest.mark.parametrize(
    "given",
    [
        {"call": "y = Attention (q, k, v)"},
        {"call": "y = Attention <softcap = 0., is_causal = 1, qk_matmul_output_mode = 2> (q, k, v)"},
        {"call": "y = Attention <softmax_precision = 1> (q, k, v, m)", "more": ", bool[1, s] m"},
        {"call": "y = Attention (q, k, v, m)", "more": ", float[s, 1] m", "opset": 23},
        {"call": "y = Attention <left_window_size = -1> (q, k, v)", "opset": 25},
    ],
    ids=["plain", "defaults", "mask", "mask that is broadcast", "window without end"],
)
def test_attention_of_onnx_becomes_the_fused_operator(given: Any) -> None:
    found = standard(**given)
    assert found["MultiHeadAttention"] == 1
    assert found["Attention"] == 0


@pytest.mark.parametrize(
    "given",
    [
        {"call": "y = Attention (q, k, v)", "k": "float[b, 2, s, 8]"},
        {"call": "y = Attention (q, k, v)", "q": "float[b, h, s, 8]", "k": "float[b, h, s, 8]"},
        {"call": "y = Attention (q, k, v)", "q": "double[b, 4, s, 8]", "k": "double[b, 4, s, 8]"},
        {"call": "y = Attention <softcap = 3.> (q, k, v)"},
        {"call": "y = Attention <scale = 0.> (q, k, v)"},
        {"call": "y = Attention <softmax_precision = 11> (q, k, v)"},
        {"call": "y = Attention <left_window_size = 2> (q, k, v)", "opset": 25},
        {"call": "y = Attention <is_causal = 1> (q, k, v)", "k": "float[b, 4, t, 8]"},
        {"call": "y = Attention <is_causal = 1> (q, k, v, m)", "more": ", bool[s, s] m"},
        {"call": "y = Attention (q, k, v, m)", "more": ", bool[s, t] m"},
        {"call": "y = Attention (q, k, v, m)", "more": ", bool[s, 1] m"},
        {"call": "y = Attention (q, k, v, , p, p)", "more": ", float[b, 4, t, 8] p"},
        {"call": "y = Attention (q, k, v, , , , n)", "more": ", int64[b] n"},
        {"call": "y, , , scores = Attention (q, k, v) z = Neg (scores)"},
    ],
    ids=[
        *("fewer heads of keys", "heads left open", "f64", "softcap", "scale of 0", "softmax in f64", "window"),
        *("causal with other lengths", "causal with a mask", "mask of another length", "short mask"),
        *("earlier keys", "padded keys", "scores are an output"),
    ],
)
def test_attention_of_onnx_that_the_fused_operator_does_not_compute_stays(given: Any) -> None:
    found = standard(**given)
    assert found["MultiHeadAttention"] == 0
    assert found["Attention"] == 1


def test_a_scale_of_the_size_of_heads_counts_as_a_number() -> None:
    """Traced models compute it: `sqrt(1 / sqrt(size))`, as in exports of Optimum."""
    scaled = """shape = Shape (q) last = Constant <value_ints = [-1]> () end = Constant <value_ints = [9999]> ()
        size = Slice (shape, last, end) float = Cast <to = 1> (size) root = Sqrt (float)
        one = Constant <value_floats = [1.0]> () inverse = Div (one, root) half = Sqrt (inverse) q2 = Mul (q, half)
        scores = MatMul (q2, k)"""
    model = onnx.parser.parse_model(
        TEXT.format(outputs=Y, axis=-1, tail="kept = Cast <to = 1> (weights)").replace("scores = MatMul (q, k)", scaled)
    )
    nodes = export_model(from_onnx(model), FUSED, EVERY).model.graph.node
    (attention,) = [node for node in nodes if node.op_type == "MultiHeadAttention"]
    (scale,) = [each.f for each in attention.attribute if each.name == "scale"]
    assert scale == pytest.approx(4**-0.25)


JOINED = """
<ir_version: 9, opset_import: ["": 20]>
keys (float[b, 2, s, 8] x, float[b, 2, t, 8] q) => (float[b, 2, t, s] y)
<int64[1] rest = {{-1}}, int64[2] ends = {{{ends}}}, int64[4] order = {{{order}}}> {{
    sizes = Shape (x)
    kept = Gather (sizes, ends)
    flat = Concat <axis = 0> (rest, kept)
    joined = Reshape (x, flat)
    turned = Transpose <perm = [0, 2, 1]> (joined)
    parted = Gather (sizes, order)
    k = Reshape (turned, parted)
    y = MatMul (q, k)
}}
"""


def test_keys_whose_heads_are_joined_to_be_transposed_are_transposed_at_once() -> None:
    """As PyTorch's newer exporter writes attention; ONNX Runtime makes this form a part of the product."""
    model = export_model(from_onnx(onnx.parser.parse_model(JOINED.format(ends="2, 3", order="0, 1, 3, 2"))))
    assert [node.op_type for node in model.nodes] == ["Transpose", "MatMul"]
    rng = np.random.default_rng(0)
    x, q = (rng.standard_normal((3, 2, length, 8)).astype(np.float32) for length in (5, 4))
    with rlx_ort.load(model.model.SerializeToString()) as runner:
        (y,) = runner.run("cpu", {"x": x, "q": q})
    np.testing.assert_allclose(y, np.einsum("bhtd,bhsd->bhts", q, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("ends", "order"), [("3, 2", "0, 1, 3, 2"), ("2, 3", "1, 0, 3, 2"), ("2, 3", "0, 1, 2, 3")])
def test_other_shapes_around_a_transposition_stay(ends: str, order: str) -> None:
    """Rows that are cut elsewhere, other heads first, or elements in their old places."""
    model = export_model(from_onnx(onnx.parser.parse_model(JOINED.format(ends=ends, order=order))))
    assert [node.op_type for node in model.nodes].count("Reshape") == 2


def test_a_provider_without_a_kernel_gets_the_same_model() -> None:
    """WebGPU's kernel gives wrong results, and a model that any provider may get has no kernels to count on."""
    graph = from_onnx(user_model("bert-dynamo-20").model())
    kernels = kernel_set(WebGpuProvider(), graph, FUSED)
    plain = export_model(graph, None, kernels).model.SerializeToString()
    assert export_model(graph, FUSED, kernels).model.SerializeToString() == plain
    anywhere = export_model(graph).model.SerializeToString()
    assert export_model(graph, FUSED).model.SerializeToString() == anywhere


def test_a_norm_divides_by_its_root() -> None:
    """ONNX Runtime fuses an RMS norm in this form alone."""
    graph = from_onnx(user_model("llama-dynamo-20").model())
    found = Counter(node.op_type for node in export_model(graph, FUSED, EVERY).nodes)
    assert found["Div"] == found["Sqrt"] == 5
    assert found["Reciprocal"] == 0


@pytest.mark.parametrize("exporter", ["torchscript-17", "dynamo-20"])
def test_attention_is_fused_in_f16(exporter: str) -> None:
    """For CUDA, with masks in f16, and activations are cast at the boundary of the graph alone."""
    options = CompileOptions(fusion=True, precision="f16")
    graph = from_onnx(user_model(f"bert-{exporter}").model())
    model = export_model(graph, options, kernel_set(CudaProvider(), graph, options))
    attention = [node for node in model.nodes if node.op_type == "MultiHeadAttention"]
    assert len(attention) == 2
    for node in attention:
        kinds = [kind.dtype.value for kind in node.inputs if isinstance(kind, TensorType)]
        assert kinds == ["f16"] * 4
    floats = [node for node in model.nodes if node.op_type == "Cast" and "f16" in f"{node.inputs[0]}{node.outputs[0]}"]
    assert len(floats) == 2, [node.name for node in floats]  # the result, and the mask once for all layers


def test_a_mask_of_bools_that_hides_nothing_is_left_out() -> None:
    """As those that exports of ViT have; the kernel without a mask is the faster one."""
    for exporter in ("torchscript-17", "dynamo-20"):
        graph = from_onnx(user_model(f"vit-{exporter}").model())
        nodes = [node for node in export_model(graph, FUSED, EVERY).nodes if node.op_type == "MultiHeadAttention"]
        assert [len(node.inputs) for node in nodes] == [3, 3]


def test_a_file_gets_fused_attention_with_its_names() -> None:
    bundle = bundle_of(onnx.load_from_string(user_model("minilm-dynamo-20").model()))
    made, report = fused(bundle)
    operators = Counter(node.op_type for node in made.proto.graph.node)
    assert operators["MultiHeadAttention"] == len(report.attention) == 2
    assert set(report.attention) <= {node.name for node in bundle.proto.graph.node}
    assert {entry.domain: entry.version for entry in made.proto.opset_import}["com.microsoft"] == 1
    assert made.input_types().keys() == bundle.input_types().keys()
    assert np.all([name in bundle.weights for name in made.weights])
