"""Low precision on the CPU provider: close to f32, the same interface, and refused where there is no kernel."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from rlx_ort import Device, Graph, LegalizeError, PrecisionPolicy, Session, Value, environment
from rlx_ort.execution.placement import merge_placement
from rlx_ort.options.compile_options import CompileOptions, PlacementRule, Precision
from rlx_ort.options.dispatch import KernelDispatch, KernelDispatchPolicy
from rlx_ort.selection.support import dispatch_report_for_device, legalize_graph_for_device, support_of

HEADS, HEAD, LENGTH, VOCABULARY = 4, 16, 12, 50
WIDE = HEADS * HEAD
RANDOM = np.random.default_rng(7)


def encoder() -> Graph:
    """Return two encoder layers over token ids, with a key mask and every weight given."""
    g = Graph("encoder")

    def weight(name: str, *shape: int, scale: float = 1.0) -> Value:
        size = scale / np.sqrt(shape[0])
        return g.param(name, shape, data=(RANDOM.normal(size=shape) * size).astype(np.float32))

    ids, mask = g.input("ids", [2, LENGTH], "i64"), g.input("mask", [2, LENGTH])
    x = g.gather(weight("table", VOCABULARY, WIDE, scale=7.0), ids, axis=0)
    ones, zeros = g.constant(np.ones(WIDE, np.float32)), g.constant(np.zeros(WIDE, np.float32))
    for layer in range(2):
        q, k, v = (x @ weight(f"{part}{layer}", WIDE, WIDE) for part in "qkv")
        mixed = g.attention(q, k, v, mask, HEADS, HEAD) @ weight(f"o{layer}", WIDE, WIDE)
        x = g.fused_residual_ln(mixed, x, None, ones, zeros)
        grow, bias = weight(f"up{layer}", WIDE, 2 * WIDE), weight(f"bias{layer}", 2 * WIDE)
        up = g.fused_matmul_bias_act(x, grow, bias, activation="gelu")
        x = g.fused_residual_ln(up @ weight(f"down{layer}", 2 * WIDE, WIDE), x, None, ones, zeros)
    g.outputs = [x, g.cast(g.compare("gt", x, 0.0), "i32")]
    return g


def feeds() -> dict[str, np.ndarray]:
    mask = np.ones((2, LENGTH), np.float32)
    mask[1, 8:] = 0
    return {"ids": np.arange(2 * LENGTH).reshape(2, LENGTH) % VOCABULARY, "mask": mask}


@pytest.mark.parametrize(
    "options",
    [
        CompileOptions(precision=Precision.F16),
        CompileOptions(precision_policy=PrecisionPolicy.auto_mixed_conservative()),
        CompileOptions(precision=Precision.F16, kernel_dispatch=KernelDispatch(KernelDispatchPolicy.FORCE_COMMON)),
    ],
    ids=["mixed", "conservative", "common forms"],
)
def test_an_encoder_in_f16_stays_close_to_f32(options: CompileOptions) -> None:
    """Within 5e-3 where the results reach 3, with f32 in and out, and integers as they were."""
    graph = encoder()
    wide, _ = Session("cpu").compile(graph).run(feeds())
    compiled = Session("cpu", options.with_(placement=PlacementRule.STRICT)).compile(graph)
    narrow, signs = compiled.run(feeds())
    assert (narrow.dtype, signs.dtype) == (np.float32, np.int32)
    error = np.abs(narrow - wide).max()
    assert 0 < error < 5e-3
    assert set(compiled.exported.stored_as) >= {"q0", "up1", "table"}


def test_a_parameter_is_set_in_f32_and_takes_part_in_f16() -> None:
    """Values are set in the declared dtype, however the session stores them; the next run uses a new value."""
    g = Graph()
    g.outputs = [g.input("x", [1, 2]) @ g.param("w", [2, 2])]
    compiled = Session("cpu", CompileOptions(precision=Precision.F16)).compile(g)
    x = np.ones((1, 2), np.float32)
    for scale in (1.0, 2.0):
        compiled.set_param("w", np.full((2, 2), scale, np.float32))
        np.testing.assert_array_equal(compiled.run({"x": x})[0], np.full((1, 2), 2 * scale, np.float32))
    assert compiled.weights.get("w").dtype.value == "f32"  # type: ignore[union-attr]  # it was set


def test_bf16_is_refused_where_the_cpu_has_no_kernel_and_the_report_names_the_nodes() -> None:
    """The CPU provider multiplies no bf16 matrices; the user reads of `product`, and what to do."""
    g = Graph("small")
    g.outputs = [g.matmul(g.input("x", [1, 2]), g.param("w", [2, 2]), name="product")]
    with pytest.raises(LegalizeError) as caught:
        legalize_graph_for_device(g, "cpu", CompileOptions(precision=Precision.BF16))
    assert "'product' (MatMul): CPU has no kernel for ai.onnx::MatMul-21 (bf16)" in str(caught.value)
    assert "Choose another device" in str(caught.value)
    assert [node.name for node in caught.value.report.still_unsupported] == ["product"]
    assert support_of(Device.CPU, g, CompileOptions()).supported


def test_the_report_agrees_with_the_session() -> None:
    """Every node of the graph is on the CPU or merged into one that is, under the user's names."""
    graph = encoder()
    compiled = Session("cpu").compile(graph)
    report = merge_placement(dispatch_report_for_device(graph, "cpu"), compiled.placement)
    paths = {(row.kind, row.path): row for row in report.summaries}
    assert paths["FusedResidualLN", "common-ir"].placed == {"CPUExecutionProvider": 4}
    assert paths["FusedMatMulBiasAct", "native"].placed == {"CPUExecutionProvider": 2}
    assert ("Attention", "common-ir") in paths
    assert {provider for row in report.summaries for provider in row.placed} <= {"CPUExecutionProvider", "merged"}
    assert {name for row in report.summaries for name in row.nodes} <= {node.name for node in graph.nodes}


@pytest.mark.parametrize("variable", ["RLX_DISPATCH_REPORT", "RLX_VERBOSE"])
def test_the_report_is_logged_when_a_session_opens_if_the_variable_asks(
    variable: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is a warning, so that it is seen without any configuration."""
    g = Graph("small")
    g.outputs = [g.relu(g.input("x", [2]))]
    with environment.override({variable: "1"}):
        Session("cpu").compile(g)
    (record,) = [record for record in caplog.records if record.name == "rlx_ort.dispatch"]
    assert record.levelno == logging.WARNING
    assert "Activation: 1 x native, 1 on CPUExecutionProvider" in record.getMessage()


def test_nothing_is_logged_unasked(caplog: pytest.LogCaptureFixture) -> None:
    """The library is silent by default."""
    g = Graph("small")
    g.outputs = [g.relu(g.input("x", [2]))]
    Session("cpu").compile(g)
    assert [record for record in caplog.records if record.name == "rlx_ort.dispatch"] == []
