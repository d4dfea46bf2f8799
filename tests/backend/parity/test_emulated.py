"""bf16 on the CPU: what the model with casts computes is f32 arithmetic, rounded after every node."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx_text import parsed

from rlx_ort import CompileOptions, OptimizationLevel, PlacementRule, RlxError
from rlx_ort.conversion.check import with_f32_kernels
from rlx_ort.converters.bundle import ModelBundle, bundle_of
from rlx_ort.parity.compare import reference_run
from rlx_ort.parity.metrics import dtypes_of

BF16 = ml_dtypes.bfloat16
RNG = np.random.default_rng(6)
X, A, B = (RNG.normal(size=(4, 64)).astype(np.float32) for _ in range(3))


def model(body: str) -> ModelBundle:
    """Return a model of `x` (4, 64) f32 and the bf16 weights `a` and `b`, whose output `y` is f32."""
    proto = parsed(f"(float[4, 64] x) => (float[4, 64] y) {{ {body} }}")
    for name, values in (("a", A), ("b", B)):
        raw = values.astype(BF16).tobytes()
        proto.graph.initializer.add(name=name, data_type=onnx.TensorProto.BFLOAT16, dims=values.shape, raw_data=raw)
    return bundle_of(proto)


def answer(bundle: ModelBundle) -> np.ndarray:
    """Run on the CPU as a verification does."""
    how = CompileOptions(placement=PlacementRule.ASSISTED, optimization=OptimizationLevel.OFF)
    [(_, found)] = reference_run(bundle, inputs={"x": X}, options=how).outputs
    return np.asarray(found)


PRODUCT = "h = Cast <to = 16> (x) p = Mul (h, a) s = Add (p, b) y = Cast <to = 1> (s)"
BRANCH = (
    "h = Cast <to = 16> (x) yes = Constant <value = bool {1}> () "
    "s = If (yes) <then_branch = t () => (bfloat16[4, 64] r) { q = Mul (h, a) r = Add (q, b) }, "
    "else_branch = e () => (bfloat16[4, 64] o) { o = Identity (h) }> y = Cast <to = 1> (s)"
)


@pytest.mark.parametrize("body", [PRODUCT, BRANCH], ids=["in the main graph", "in a body"])
def test_each_result_is_rounded_once(body: str) -> None:
    """To the bit: a product and a sum of bf16 numbers are exact enough in f32 to have one right rounding."""
    bundle = model(body)
    product = (X.astype(BF16).astype(np.float32) * A.astype(BF16).astype(np.float32)).astype(BF16)
    wanted = (product.astype(np.float32) + B.astype(BF16).astype(np.float32)).astype(BF16).astype(np.float32)
    np.testing.assert_array_equal(answer(with_f32_kernels(bundle)), wanted)


def test_numbers_in_attributes_are_f32_too() -> None:
    """A bf16 fill value and a type that an attribute names."""
    filled = "shape = Constant <value = int64[2] {4, 64}> () f = ConstantOfShape <value = bfloat16[1] {16448}> (shape) "
    bundle = model(filled + "s = Add (f, b) y = Cast <to = 1> (s)")  # 16448 are the bits of 3.0
    wanted = (np.float32(3) + B.astype(BF16).astype(np.float32)).astype(BF16).astype(np.float32)
    np.testing.assert_array_equal(answer(with_f32_kernels(bundle)), wanted)


def test_the_model_itself_does_not_run() -> None:
    """If this fails, ONNX Runtime has learnt bf16, and verification can run the model as it is."""
    with pytest.raises(RlxError):
        answer(model(PRODUCT))


def test_the_weights_are_those_of_the_model() -> None:
    """No copy in another type, and the given model is as it was."""
    bundle = model(PRODUCT)
    before = bundle.proto.SerializeToString(deterministic=True)
    made = with_f32_kernels(bundle)
    assert all(made.weights[name] is data for name, data in bundle.weights.items())
    assert bundle.proto.SerializeToString(deterministic=True) == before


def test_only_models_with_bf16_are_meant() -> None:
    """bf16 weights are detected, and so is a cast to bf16."""
    plain = parsed("(float[4] x) => (float[4] y) { y = Relu (x) }")
    cast = parsed("(float[4] x) => (float[4] y) { h = Cast <to = 16> (x) r = Relu (h) y = Cast <to = 1> (r) }")
    assert "bf16" in dtypes_of(model(PRODUCT))
    assert "bf16" in dtypes_of(bundle_of(cast))
    assert "bf16" not in dtypes_of(bundle_of(plain))
