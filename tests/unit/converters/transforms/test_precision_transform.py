"""Narrowing a model's arithmetic: what stays f32, why, and what the report says."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_text import parsed

from rlx_ort import ConversionError, DType
from rlx_ort.converters.bundle import ModelBundle, bundle_of
from rlx_ort.converters.transforms.half_precision import PrecisionKind, to_precision
from rlx_ort.ir.types import TensorType

RNG = np.random.default_rng(2)


def model(largest: float = 1.0, mask: float = -3.4e38, epsilon: float = 1e-12) -> ModelBundle:
    """Return a product, a masked softmax and a division by a root, with one weight that holds `largest`."""
    w, v = RNG.normal(size=(2, 8, 8)).astype(np.float32)
    w[3, 3] = largest
    text = """(float[2, 8] x, bool[2, 8] keep) => (float[2, 8] y) {
      [product] h = MatMul (x, w)
      [masking] m = Where (keep, h, mask)
      [soft] p = Softmax (m)
      [second] a = MatMul (p, v)
      [square] sq = Mul (a, a)
      [guard] e = Add (sq, eps)
      [root] r = Sqrt (e)
      [ratio] y = Div (a, r)
    }"""
    return bundle_of(parsed(text, w=w, v=v, mask=np.float32(mask), eps=np.float32(epsilon)), origin="masked")


def test_f16_narrows_everything_but_the_boundary() -> None:
    """Weights are half as large, inputs and outputs f32, and the mask is the lowest number of f16."""
    made, report = to_precision(model(), "f16")
    assert {name: data.dtype for name, data in made.weights.items()} == {"w": DType.F16, "v": DType.F16}
    kinds = [*made.input_types().values(), *made.output_types().values()]
    assert [kind.dtype for kind in kinds if isinstance(kind, TensorType)] == [DType.F32, DType.BOOL, DType.F32]
    assert (report.kept, report.clamped) == ((), ("mask",))
    mask = next(tensor for tensor in made.proto.graph.initializer if tensor.name == "mask")
    assert onnx.numpy_helper.to_array(mask) == np.float16(-65504)
    assert report.bytes_after * 2 == report.bytes_before


def test_the_boundary_changes_when_asked() -> None:
    """Then there is no cast at either end."""
    made, _ = to_precision(model(), "f16", boundary=True)
    assert [kind.dtype for kind in made.output_types().values() if isinstance(kind, TensorType)] == [DType.F16]
    assert "Cast" not in {node.op_type for node in made.proto.graph.node}


def test_mixed_keeps_what_leaves_the_range() -> None:
    """Softmax, the root, the division, the mask and the epsilon; the report gives each reason."""
    _, report = to_precision(model(), "mixed")
    reasons = {node.name: node.reason for node in report.kept}
    assert set(reasons) == {"masking", "soft", "guard", "root", "ratio"}
    assert "reads -3.4e+38" in reasons["masking"]
    assert "reads 1e-12" in reasons["guard"]
    assert "reduction" in reasons["soft"]
    assert report.kept_ops() == {"Where": 1, "Softmax": 1, "Add": 1, "Sqrt": 1, "Div": 1}
    assert report.clamped == ()


@pytest.mark.parametrize("kind", ["f16", "mixed"])
def test_a_weight_beyond_the_range_stays_f32_and_is_named(kind: PrecisionKind) -> None:
    """So does the product that reads it; the other one is narrowed."""
    made, report = to_precision(model(largest=1e5), kind)
    assert made.weights["w"].dtype is DType.F32
    assert made.weights["v"].dtype is DType.F16
    assert report.overflowing == {"w": pytest.approx(1e5)}
    assert "weight 'w' has numbers up to 1e+05" in {node.name: node.reason for node in report.kept}["product"]


def test_the_largest_number_of_f16_does_not_overflow() -> None:
    """65504 is held."""
    assert to_precision(model(largest=65504.0), "f16")[1].overflowing == {}


def test_bf16_holds_large_numbers() -> None:
    """It has the range of f32."""
    made, report = to_precision(model(largest=1e30), "bf16")
    assert {data.dtype for data in made.weights.values()} == {DType.BF16}
    assert report.overflowing == {}


@pytest.mark.parametrize(("entry", "kept"), [
    ("soft", {"soft"}), ("MatMul", {"product", "second"}), ("s*", {"second", "soft", "square"}),
])  # fmt: skip
def test_a_keep_list_takes_names_operators_and_patterns(entry: str, kept: set[str]) -> None:
    """What is kept says so."""
    report = to_precision(model(), "f16", [entry])[1]
    assert {node.name for node in report.kept} == kept
    assert {node.reason for node in report.kept} == {"it is on the keep-list"}


def test_a_keep_list_entry_that_means_nothing_is_refused() -> None:
    """With the nearest name."""
    with pytest.raises(ConversionError, match=r"'Softmx' of the keep-list is not a node.*did you mean 'Softmax'"):
        to_precision(model(), "f16", ["Softmx"])


def test_an_unknown_precision_is_refused() -> None:
    """The known ones are listed."""
    with pytest.raises(ConversionError, match="precision 'f8' is not known; give one of f16, bf16, mixed"):
        to_precision(model(), "f8")  # type: ignore[arg-type]  # wrong on purpose
