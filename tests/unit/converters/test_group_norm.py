"""When a norm of groups of channels becomes ONNX Runtime's GroupNorm, and when it stays as it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from norm_nets import Net, normalised, silu
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from rlx_ort import CompileOptions
from rlx_ort.converters.bundle import bundle_of
from rlx_ort.converters.from_onnx import from_onnx
from rlx_ort.converters.onnx_types import tensor_proto
from rlx_ort.converters.to_onnx import all_weights
from rlx_ort.converters.to_onnx.dispatch import KernelSet
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.converters.transforms.fuse import fused
from rlx_ort.device import Device
from rlx_ort.ir.ops.leaf import Param
from rlx_ort.ir.types import TensorType
from rlx_ort.providers.base import Provider
from rlx_ort.providers.claims import kernel_set
from rlx_ort.providers.cpu import CpuProvider
from rlx_ort.providers.cuda import CudaProvider
from rlx_ort.providers.directml import DirectMlProvider

EVERY = KernelSet("every kernel", None, lambda *_: True)
FUSED = CompileOptions(fusion=True)
X = "float[b, 8, h, w]"
TEXT = """
<ir_version: 9, opset_import: ["": 20, "com.microsoft": 1]>
norm ({x} x, float[{channels}, 1, 1] gamma, float[{channels}, 1, 1] beta, {x} z) => ({y} y)
<int64[3] parts = {{0, 4, -1}}, float[4] ones = {{1, 1, 1, 1}}, float[4] zeros = {{0, 0, 0, 0}}> {{
    parted = Reshape (x, parts)
    normal = InstanceNormalization <epsilon = 0.25> (parted, ones, zeros)
    shape = Shape (x)
    whole = Reshape (normal, shape)
    scaled = Mul (whole, gamma)
    sum = Add (scaled, beta)
    gate = Sigmoid (sum)
    y = Mul (sum, gate)
}}
"""


def nodes(*changes: tuple[str, str], x: str = X, channels: int = 8) -> list[onnx.NodeProto]:
    """Return the exported nodes of the text with changes."""
    text = TEXT.format(x=x, y=x, channels=channels)
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return list(export_model(from_onnx(onnx.parser.parse_model(text)), FUSED, EVERY).model.graph.node)


def activations(found: list[onnx.NodeProto]) -> list[int]:
    """Return the activation of each GroupNorm."""
    norms = [node for node in found if node.op_type == "GroupNorm"]
    return [attribute.i for node in norms for attribute in node.attribute if attribute.name == "activation"]


def test_a_pattern_becomes_one_node() -> None:
    """With the numbers of its nodes, in NHWC."""
    found = nodes()
    assert activations(found) == [1]
    assert Counter(node.op_type for node in found) == {"Transpose": 2, "Reshape": 2, "GroupNorm": 1}
    (norm,) = [node for node in found if node.op_type == "GroupNorm"]
    given = {each.name: onnx.helper.get_attribute_value(each) for each in norm.attribute}
    assert given == {"activation": 1, "channels_last": 1, "epsilon": 0.25, "groups": 4}
    assert norm.domain == "com.microsoft"


@pytest.mark.parametrize(
    "changes",
    [
        [("sum = Add (scaled, beta)", "sum = Add (beta, scaled)"), ("(whole, gamma)", "(gamma, whole)")],
        [("gamma,", "other, float[1, 8, 1, 1] gamma,")],
        [("{0, 4, -1}", "{3, 4, -1}"), (X, "float[3, 8, h, w]")],
        [("shape = Shape (x)", "shape = Constant <value_ints = [0, 8, 6, -1]> ()"), (X, "float[b, 8, 6, w]")],
        [("shape = Shape (x)", "shape = Shape (z)")],
        [("gate = Sigmoid (sum)\n    y = Mul (sum, gate)", "y = com.microsoft.QuickGelu <alpha = 1.0> (sum)")],
    ],
    ids=["other order", "gamma of rank 4", "fixed batch", "written shape", "shape of another value", "QuickGelu"],
)
def test_other_ways_to_write_it_count(changes: list[tuple[str, str]]) -> None:
    assert activations(nodes(*changes)) == [1]


@pytest.mark.parametrize(
    ("changes", "x", "channels"),
    [
        ([("ones = {1, 1, 1, 1}", "ones = {1, 1, 2, 1}")], X, 8),
        ([("zeros = {0, 0, 0, 0}", "zeros = {0, 0, 1, 0}")], X, 8),
        ([("beta,", "beta, float[4] scale,"), ("(parted, ones,", "(parted, scale,")], X, 8),
        ([("{0, 4, -1}", "{1, 4, -1}")], X, 8),
        ([("{0, 4, -1}", "{-1, 4, 32}")], "float[b, 8, 4, 4]", 8),
        ([("parted = Reshape (x", "turned = Transpose <perm = [0, 1, 3, 2]> (x) parted = Reshape (turned")], X, 8),
        ([("shape = Shape (x)", "shape = Constant <value_ints = [0, 8, -1, 2]> ()")], X, 8),
        ([("shape = Shape (x)", "shape = Shape (z)"), (f"{X} z", "float[b, 8, i, j] z")], X, 8),
        ([("Mul (whole, gamma)", "Mul (whole, other)"), ("gamma,", "gamma, float[8] other,")], "float[b, 8, h, 8]", 8),
        ([("Mul (whole, gamma)", "Mul (whole, other)"), ("gamma,", f"gamma, {X} other,")], X, 8),
        ([("Add (scaled, beta)", "Add (scaled, other)"), ("gamma,", "gamma, float[b, 8, 1, 1] other,")], X, 8),
        ([("Add (", "Sub (")], X, 8),
        ([("=> (", f"=> ({X} scaled, ")], X, 8),
        ([("=> (", f"=> ({X} also, "), ("gate =", "also = Relu (whole) gate =")], X, 8),
        ([("=> (", "=> (float[b, 4, m] also, "), ("gate =", "also = Relu (normal) gate =")], X, 8),
        ([("epsilon = 0.25", "epsilon = -0.25")], X, 8),
        ([], "float[b, 10, 4, 4]", 10),
        ([], "float[b, 12, h, w]", 12),
        ([], "float[b, 2056, h, w]", 2056),
        ([], "float[b, c, h, w]", 8),
        ([], "float[b, 8, h, w, d]", 8),
        (
            [("gamma, float[8, 1, 1]", "gamma, float[8, 1]"), ("float[8, 1, 1] gamma", "float[8, 1] gamma")],
            "float[b, 8, h]",
            8,
        ),
        ([("float[", "double[")], X, 8),
    ],
    ids=[
        *("scale not one", "bias not zero", "scale unknown", "batch joined", "batch left open", "other axes"),
        *("another shape", "shape of another size", "gamma by column", "gamma by element"),
        *(
            "beta by row of the batch",
            "difference",
            "an output inside",
            "read twice",
            "norm read twice",
            "epsilon below zero",
        ),
        *("channels parted", "odd channels", "too many channels", "channels left open", "rank 5", "rank 3", "f64"),
    ],
)
def test_what_the_fused_norm_does_not_compute_stays(changes: list[tuple[str, str]], x: str, channels: int) -> None:
    kernels = kernel_set(CudaProvider(), from_onnx(Net.of(0).model()), FUSED)
    text = TEXT.format(x=x, y=x, channels=channels)
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    graph = from_onnx(onnx.parser.parse_model(text))
    found = [node.op_type for node in export_model(graph, FUSED, kernels).nodes]
    assert "GroupNorm" not in found
    assert "InstanceNormalization" in found


@pytest.mark.parametrize(
    "changes",
    [
        [("=> (", f"=> ({X} sum, ")],
        [("=> (", f"=> ({X} gate, ")],
        [("=> (", f"=> ({X} also, "), ("gate =", "also = Relu (sum) gate =")],
        [("Mul (sum, gate)", "Mul (z, gate)")],
        [("=> (", f"=> ({X} also, "), ("y = Mul (sum, gate)", "y = Mul (sum, z) also = Relu (gate)")],
        [("Mul (sum, gate)", "Add (sum, gate)")],
        [("gate = Sigmoid (sum)", "gate = Tanh (sum)")],
        [("gate = Sigmoid (sum)\n    y = Mul (sum, gate)", "y = com.microsoft.QuickGelu (sum)")],
    ],
    ids=[
        "sum is an output",
        "gate is an output",
        "read twice",
        "another factor",
        "another gate",
        "sum",
        "Tanh",
        "alpha of 1.702",
    ],
)
def test_what_is_not_silu_follows_the_fused_norm(changes: list[tuple[str, str]]) -> None:
    assert activations(nodes(*changes)) == [0]


def standard(call: str, x: str = X, scale: int = 8, opset: int = 21) -> Counter[str]:
    """Return the operators of an exported model of one `GroupNormalization`."""
    text = f"""<ir_version: 10, opset_import: ["": {opset}]>
        norm ({x} x, float[{scale}] s, float[{scale}] b) => ({x} y) {{ y = GroupNormalization <{call}> (x, s, b) }}"""
    return Counter(node.op_type for node in export_model(from_onnx(onnx.parser.parse_model(text)), FUSED, EVERY).nodes)


def test_the_operator_of_onnx_becomes_the_fused_one() -> None:
    assert standard("num_groups = 4, stash_type = 1")["GroupNorm"] == 1
    assert standard("num_groups = 4", scale=4, opset=18)["GroupNorm"] == 1


@pytest.mark.parametrize(
    ("call", "x"),
    [
        ("num_groups = 4, stash_type = 10", X),
        ("num_groups = 4", "float[b, 8, h]"),
        ("num_groups = 4", "float[b, 8, h, w, d]"),
        ("num_groups = 4", "float[b, c, h, w]"),
        ("num_groups = 8", X),
    ],
    ids=["computed in f16", "rank 3", "rank 5", "channels left open", "odd channels"],
)
def test_the_operator_of_onnx_that_the_fused_one_does_not_compute_stays(call: str, x: str) -> None:
    found = standard(call, x)
    assert found["GroupNorm"] == 0
    assert found["GroupNormalization"] == 1


def test_a_scale_that_may_change_between_runs_is_no_constant() -> None:
    graph = from_onnx(onnx.parser.parse_model(TEXT.format(x=X, y=X, channels=8)))
    (ones,) = [node for node in graph.nodes if node.name == "ones"]
    assert isinstance(ones.op, Param)
    ones.op = replace(ones.op, mutable=True)
    assert "GroupNorm" not in {node.op_type for node in export_model(graph, FUSED, EVERY).nodes}


class GroupNorm(OpRun):
    """`com.microsoft::GroupNorm` as CUDA takes it, in f64."""

    op_domain = "com.microsoft"

    def _run(self, x: Any, gamma: Any, beta: Any, **given: Any) -> tuple[Any]:
        assert (gamma.dtype, beta.dtype, given["channels_last"]) == (np.float32, np.float32, 1)
        y = normalised(x.transpose(0, 3, 1, 2).astype(np.float64), gamma, beta, given["groups"], given["epsilon"])
        y = silu(y) if given["activation"] else y
        return (y.transpose(0, 2, 3, 1).astype(x.dtype),)


class QuickGelu(OpRun):
    """`com.microsoft::QuickGelu` that is SiLU."""

    op_domain = "com.microsoft"

    def _run(self, x: Any, **given: Any) -> tuple[Any]:
        assert given == {"alpha": 1.0}
        return (silu(x),)


@pytest.mark.parametrize("precision", ["f32", "f16"])
@pytest.mark.parametrize("seed", range(24))
def test_made_up_nets_are_what_float64_gives(seed: int, precision: str) -> None:
    """Of random groups, channels and forms: the model for CUDA, its fused nodes by their definition."""
    net = Net.of(seed)
    graph, options = from_onnx(net.model()), CompileOptions(fusion=True, precision=precision)
    exported = export_model(graph, options, kernel_set(CudaProvider(), graph, options))
    found = Counter(node.op_type for node in exported.nodes)
    assert found["GroupNorm"] == len(net.blocks), net
    wide = {"QuickGelu", "Swish"} if precision == "f16" else set()  # they stay in f32, with casts before them
    kept = {"GroupNormalization", "InstanceNormalization", "Sigmoid", "QuickGelu", "Swish"} & found.keys()
    assert kept <= wide, net
    for node in exported.nodes:
        if node.op_type == "GroupNorm":
            kinds = [kind.dtype.value for kind in node.inputs if isinstance(kind, TensorType)]
            assert kinds == ["f16" if "16" in precision + net.dtype else "f32", "f32", "f32"]
    model, weights = onnx.ModelProto(), all_weights(graph, exported)
    model.CopyFrom(exported.model)
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(tensor_proto(weights[tensor.name], tensor.name))
    (y,) = ReferenceEvaluator(model, new_ops=[GroupNorm, QuickGelu]).run(None, {"x": net.feed})
    close = 2e-2 if "16" in precision + net.dtype else 1e-4
    np.testing.assert_allclose(y, net.expected(), rtol=close, atol=close, err_msg=str(net))


@pytest.mark.parametrize("provider", [CpuProvider(), DirectMlProvider()], ids=lambda each: each.name)
def test_a_provider_without_a_kernel_keeps_the_basic_operators(provider: Provider) -> None:
    """DirectML lists one that has never been run."""
    graph = from_onnx(Net.of(0).model())
    kernels = kernel_set(provider, graph, FUSED)
    plain = export_model(graph, None, kernels).model.SerializeToString()
    assert export_model(graph, FUSED, kernels).model.SerializeToString() == plain


def test_a_file_keeps_its_norms() -> None:
    """It has to run on more than CUDA."""
    made, _ = fused(bundle_of(Net.of(1).model()))
    assert "InstanceNormalization" in {node.op_type for node in made.proto.graph.node}


@pytest.mark.parametrize("operator", ["GroupNormalization", "InstanceNormalization"])
def test_tuning_offers_fusion_for_norms(operator: str) -> None:
    """Alone, and together with the layout that the kernel reads."""
    steps = CudaProvider().variants(Device("cuda"), CompileOptions())
    assert [str(step) for step in steps if operator in step.operators] == ["fusion=True", "fusion=True, prefer_nhwc=1"]
