"""Each op that has a native form gives the same numbers in both forms, on every device that has a kernel for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from op_tests.harness import Array, rand

from rlx_ort import CompileOptions, Device, Graph, KernelDispatch, KernelDispatchPolicy, PlacementRule, Session
from rlx_ort.converters.to_onnx.dispatch import COMMON, NATIVE
from rlx_ort.providers.registry import default_registry

Build = Callable[..., Any]
HEADS, HEAD = 2, 8
WIDE = HEADS * HEAD


def _attention(mask: str, **given: Any) -> Build:
    return lambda g, q, k, v: g.attention_kind(q, k, v, HEADS, HEAD, mask, **given)


CASES: dict[str, tuple[str, Build, list[Array]]] = {
    "silu": ("QuickGelu", lambda g, x: g.silu(x), [rand(3, 8) * 4]),
    "swiglu": ("QuickGelu", lambda g, x: g.fused_swiglu(x), [rand(3, 16)]),
    "swiglu gate first": ("QuickGelu", lambda g, x: g.fused_swiglu(x, gate_first=True), [rand(3, 16)]),
    "rms norm": ("SimplifiedLayerNormalization", lambda g, x, a: g.rms_norm(x, a), [rand(2, 3, 8), rand(8)]),
    "rms norm with beta": (
        "SimplifiedLayerNormalization",
        lambda g, x, a, b: g.rms_norm(x, a, b, 1e-3),
        [rand(2, 3, 8), rand(8), rand(8, seed=1)],
    ),
    "residual layer norm": (
        "SkipLayerNormalization",
        lambda g, x, r, a, b: g.fused_residual_ln(x, r, None, a, b, 1e-3),
        [rand(2, 3, 8), rand(2, 3, 8, seed=1), rand(8), rand(8, seed=1)],
    ),
    "residual layer norm with bias": (
        "SkipLayerNormalization",
        lambda g, x, r, c, a, b: g.fused_residual_ln(x, r, c, a, b),
        [rand(4, 8), rand(4, 8, seed=1), rand(8, seed=2), rand(8), rand(8, seed=1)],
    ),
    "residual rms norm": (
        "SkipSimplifiedLayerNormalization",
        lambda g, x, r, a: g.fused_residual_rms_norm(x, r, None, a),
        [rand(2, 3, 8), rand(2, 3, 8, seed=1), rand(8)],
    ),
    "residual rms norm with bias and beta": (
        "SkipSimplifiedLayerNormalization",
        lambda g, x, r, c, a, b: g.fused_residual_rms_norm(x, r, c, a, b, 1e-3),
        [rand(2, 3, 8), rand(2, 3, 8, seed=1), rand(8, seed=2), rand(8), rand(8, seed=1)],
    ),
    "dense layer": (
        "Gemm",
        lambda g, x, w, b: g.fused_matmul_bias_act(x, w, b, activation="relu"),
        [rand(3, 8), rand(8, 4), rand(4)],
    ),
    "dense layer with gelu": (
        "BiasGelu",
        lambda g, x, w, b: g.fused_matmul_bias_act(x, w, b, activation="gelu"),
        [rand(2, 3, 8), rand(8, 4), rand(4)],
    ),
    "dense layer with the tanh gelu": (
        "FastGelu",
        lambda g, x, w, b: g.fused_matmul_bias_act(x, w, b, activation="gelu_approx"),
        [rand(2, 3, 8), rand(8, 4), rand(4)],
    ),
    "rope": (
        "RotaryEmbedding",
        lambda g, x, c, s: g.rope(x, c, s, 8),
        [rand(2, 3, 16), rand(5, 4), rand(5, 4, seed=1)],
    ),
    "rope of one sequence": (
        "RotaryEmbedding",
        lambda g, x, c, s: g.rope(x, c, s, 8),
        [rand(3, 16), rand(3, 4), rand(3, 4, seed=1)],
    ),
    "rope of neighbours": (
        "RotaryEmbedding",
        lambda g, x, c, s: g.rope(x, c, s, 8, interleaved=True),
        [rand(2, 3, 16), rand(3, 4), rand(3, 4, seed=1)],
    ),
    "rope of a part of each head": (
        "RotaryEmbedding",
        lambda g, x, c, s: g.rope_n(x, c, s, 16, 8),
        [rand(2, 3, 32), rand(3, 8), rand(3, 8, seed=1)],
    ),
    "attention": ("MultiHeadAttention", _attention("none"), [rand(2, 3, WIDE, seed=i) for i in range(3)]),
    "attention to more keys": (
        "MultiHeadAttention",
        _attention("none", scale=0.3),
        [rand(2, 3, WIDE), rand(2, 5, WIDE, seed=1), rand(2, 5, WIDE, seed=2)],
    ),
    "attention with heads as an axis": (
        "MultiHeadAttention",
        _attention("none"),
        [rand(2, 3, HEADS, HEAD, seed=i) for i in range(3)],
    ),
    "attention of one sequence": ("MultiHeadAttention", _attention("none"), [rand(3, WIDE, seed=i) for i in range(3)]),
    "causal attention": ("MultiHeadAttention", _attention("causal"), [rand(2, 4, WIDE, seed=i) for i in range(3)]),
}


def _graph(build: Build, arrays: list[Array]) -> Graph:
    graph = Graph("case")
    values = [graph.input(f"x{index}", array.shape) for index, array in enumerate(arrays)]
    graph.outputs = [build(graph, *values)]
    return graph


def _run(device: Device, graph: Graph, arrays: list[Array], policy: KernelDispatchPolicy) -> tuple[Array, Any]:
    options = CompileOptions(placement=PlacementRule.ASSISTED, kernel_dispatch=KernelDispatch(policy))
    with Session(device, options).compile(graph) as compiled:
        (result,) = compiled.run({f"x{index}": array for index, array in enumerate(arrays)})
        return result, compiled.exported


@pytest.mark.parametrize("name", CASES)
def test_both_forms_give_the_same_numbers(name: str, device: Device) -> None:
    """The native form has its fused operator, the common one has not, and they agree within rounding."""
    op_type, build, arrays = CASES[name]
    provider = default_registry().for_device(device)
    if provider is not None and any(op_type == distrusted for _, distrusted in provider.distrusted_kernels):
        pytest.skip(f"{device.label}'s {op_type} is known to be wrong, so it is never the native form there")
    graph = _graph(build, arrays)
    native, model = _run(device, graph, arrays, KernelDispatchPolicy.FORCE_NATIVE)
    common, basic = _run(device, graph, arrays, KernelDispatchPolicy.FORCE_COMMON)
    assert op_type in {node.op_type for node in model.nodes}
    assert op_type not in {node.op_type for node in basic.nodes}
    assert {form for forms in model.forms.values() for form in forms} == {NATIVE}
    assert {form for forms in basic.forms.values() for form in forms} == {COMMON}
    np.testing.assert_allclose(native, common, rtol=2e-5, atol=2e-5 * float(np.abs(common).max()))


@pytest.mark.webgpu
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_attention_of_many_tokens_is_right_where_the_fused_kernel_is_not(mask: str) -> None:
    """From 32 tokens on, WebGPU's fused kernel was off by 15 percent; the basic form stands in for it."""
    arrays = [rand(1, 40, WIDE, seed=i) for i in range(3)]
    graph = _graph(_attention(mask), arrays)
    expected, _ = _run(Device.CPU, graph, arrays, KernelDispatchPolicy.FORCE_COMMON)
    found, _ = _run(Device("webgpu"), graph, arrays, KernelDispatchPolicy.PREFER_NATIVE)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_native_form_is_preferred_where_there_is_a_kernel(name: str) -> None:
    """Without a word from the user, the CPU gets the native form of all of these but those that are slower."""
    op_type, build, arrays = CASES[name]
    _, model = _run(Device.CPU, _graph(build, arrays), arrays, KernelDispatchPolicy.PREFER_NATIVE)
    wanted = COMMON if op_type.startswith("Skip") else NATIVE
    assert {form for forms in model.forms.values() for form in forms} == {wanted}
