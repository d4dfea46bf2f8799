"""Narrowed models give nearly what the f32 ones do."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from sample_models.bundles import convnet, decoder, images, relative, run, tokens, whole

from rlx_ort.converters.bundle import bundle_of
from rlx_ort.converters.transforms.half_precision import to_precision


@pytest.mark.parametrize("kind", ["f16", "mixed"])
def test_16_bit_models_stay_within_half_a_percent(kind: str) -> None:
    """Relative L2 error of a convnet and a decoder with random weights, on inputs of their own."""
    for bundle, feeds in ((convnet(), {"image": images(4)}), (decoder(), {"ids": tokens(2)})):
        made, report = to_precision(bundle, kind)
        error = relative(run(made, feeds)[0], run(bundle, feeds)[0])
        assert 0 < error < 5e-3, bundle.origin
        assert report.bytes_after < 0.55 * report.bytes_before


def test_bf16_arithmetic_is_what_the_reference_evaluator_computes() -> None:
    """The CPU has few bf16 kernels, so ONNX's evaluator runs the result; 8 bits of mantissa are left."""
    text = (
        '<ir_version: 10, opset_import: ["": 21]> agraph (float[4, 16] x) => (float[4, 8] y) '
        "<float[16, 8] w> { h = MatMul (x, w) y = Relu (h) }"
    )
    rng = np.random.default_rng(4)
    x, w = rng.normal(size=(4, 16)).astype(np.float32), rng.normal(size=(16, 8)).astype(np.float32)
    model = onnx.parser.parse_model(text.replace("<float[16, 8] w>", ""))
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    made, _ = to_precision(bundle_of(model), "bf16")
    (y,) = ReferenceEvaluator(whole(made)).run(None, {"x": x})
    wanted = np.maximum(x.astype(np.float64) @ w.astype(np.float64), 0)
    assert y.dtype == np.float32
    assert relative(y, wanted) < 2e-2
