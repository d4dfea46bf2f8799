"""Fused rotary embeddings give what the basic operators give: exports of frameworks, and made-up ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from model_corpus import UserModel, corpus
from onnx import parser

import rlx_ort
from rlx_ort import CompileOptions
from rlx_ort.converters.from_onnx import from_onnx
from rlx_ort.converters.fusion import fuse
from rlx_ort.converters.to_onnx.dispatch import KernelSet
from rlx_ort.converters.to_onnx.exporter import ExportedModel, export_model
from rlx_ort.providers.claims import kernel_set
from rlx_ort.providers.cpu import CpuProvider

FUSED = CompileOptions(fusion=True)
MODEL = """
<ir_version: 9, opset_import: ["": 20]>
rotary (float[batch, {heads}, seq, {size}] x, float[batch, seq, {width}] flat, int64[{rows}, seq] places,
        float[{half}] rates, float[{half}] others, int64[1, other] elsewhere) => (float[batch, {heads}, seq, {size}] y)
<int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] last = {{-1}}, int64[1] half = {{{half}}},
 int64[1] size = {{{size}}}, int64[1] end = {{9223372036854775807}}, int64[1] negative = {{-{half}}},
 int64[1] quarter = {{{quarter}}}, int64[2] halves = {{{half}, {half}}}, int64[4] parted = {{0, 0, {heads}, {size}}},
 int64[3] joined = {{0, 0, {size}}}, float factor = {{1.25}}, float[{size}] factors = {{{factors}}},
 float[1, {heads}, 1, 1] scales = {{{scales}}}>
{{
  column = Unsqueeze(places, last)
  floats = Cast<to = 1>(column)
  angles = Mul(floats, rates)
  both = Concat<axis = -1>(angles, angles)
  other = Mul(floats, others)
  mixed = Concat<axis = -1>(angles, other)
  pair = Unsqueeze(angles, last)
  pairs = Concat<axis = -1>(pair, pair)
  paired = Reshape(pairs, joined)
  cosines = Cos(both)
  sines = Sin(both)
  cos = Unsqueeze(cosines, one)
  sin = Unsqueeze(sines, one)
  positive = Abs(x)
  each = Mul(cos, scales)
  narrow = Cast<to = 10>(x)
  rounded = Cast<to = 1>(narrow)
  low = Slice(x, zero, half, last, one)
  high = Slice(x, half, end, last, one)
  minus = Neg(high)
  turned = Concat<axis = -1>(minus, low)
  straight = Mul(x, cos)
  crossed = Mul(turned, sin)
  y = Add(straight, crossed)
}}
"""
"""The rotary embedding of Llama, and values that variants of it read."""
PARTS = "low = Slice(x, zero, half, last, one)\n  high = Slice(x, half, end, last, one)"
FORMS = {
    "as exported": {},
    "reversed": {
        "Mul(x, cos)": "Mul(cos, x)",
        "Mul(turned, sin)": "Mul(sin, turned)",
        "Add(straight, crossed)": "Add(crossed, straight)",
    },
    "split": {PARTS: "low, high = Split<axis = 3>(x, halves)"},
    "split in two": {PARTS: "low, high = Split<axis = -1, num_outputs = 2>(x)"},
    "from the end": {PARTS: "low = Slice(x, zero, negative, last)\n  high = Slice(x, negative, size, last)"},
    "scaled": {
        "cosines = Cos(both)": "c = Cos(both)\n  cosines = Mul(c, factor)",
        "sines = Sin(both)": "s = Sin(both)\n  sines = Mul(factor, s)",
    },
    "heads joined": {
        "low = ": "parts = Reshape(flat, parted)\n  t = Transpose<perm = [0, 2, 1, 3]>(parts)\n  low = ",
        "(x, ": "(t, ",
    },
    "cast to its own type": {
        "low = ": "own = Cast<to = 1>(x)\n  again = Cast<to = 1>(own)\n  low = ",
        "Mul(x, ": "Mul(own, ",
        "(x, half": "(again, half",
        "(x, zero": "(again, zero",
    },
    "angles of a product": {
        "column = Unsqueeze(places, last)": "row = Unsqueeze(places, one)",
        "Cast<to = 1>(column)": "Cast<to = 1>(row)",
        "angles = Mul(floats, rates)": "c = Unsqueeze(rates, last)\n  p = MatMul(c, floats)\n  "
        "angles = Transpose<perm = [0, 2, 1]>(p)",
        "other = Mul(floats, others)": "t = Transpose<perm = [0, 2, 1]>(floats)\n  other = Mul(t, others)",
    },
    "computed half": {
        "low = ": "all = Shape(x)\n  d = Gather(all, last)\n  h = Div(d, two)\n  i = Cast<to = 7>(h)\n  low = ",
        "zero, half, last": "zero, i, last",
        "(x, half, end": "(x, i, end",
    },
}
"""Form -> what is written otherwise."""
MISSES = {
    "turned the other way": {"Neg(high)": "Neg(low)", "(minus, low)": "(high, minus)"},
    "both halves negated": {"(minus, low)": "(minus, minus)"},
    "no half negated": {"(minus, low)": "(high, low)"},
    "halves in place": {"Neg(high)": "Neg(low)", "(minus, low)": "(minus, high)"},
    "other split": {"zero, half, last": "zero, quarter, last", "(x, half, end": "(x, quarter, end"},
    "interleaved": {PARTS: "low = Slice(x, zero, end, last, two)\n  high = Slice(x, one, end, last, two)"},
    "cosines of other angles": {"Cos(both)": "Cos(mixed)"},
    "sines of other angles": {"Sin(both)": "Sin(mixed)"},
    "angles in pairs": {"Cos(both)": "Cos(paired)", "Sin(both)": "Sin(paired)"},
    "a factor for each column": {"cosines = Cos(both)": "c = Cos(both)\n  cosines = Mul(c, factors)"},
    "difference": {"y = Add": "y = Sub"},
    "another x": {"Mul(x, cos)": "Mul(positive, cos)"},
    "another x turned": {"Slice(x, half": "Slice(positive, half"},
    "rounded on one side": {"Mul(x, cos)": "Mul(rounded, cos)"},
    "a length that may be 1": {"Unsqueeze(places": "Unsqueeze(elsewhere"},
    "cosines of each head": {"Mul(x, cos)": "Mul(x, each)"},
}
"""Near miss -> what is written otherwise."""


def written(form: dict[str, str], heads: int = 3, size: int = 8, rows: int | str = 1) -> onnx.ModelProto:
    """Return a variant of `MODEL`; one text may stand in several places, and each must stand in one at least."""
    factors, scales = (", ".join(str(1 + at / 8) for at in range(each)) for each in (size, heads))
    sizes: dict[str, Any] = {"heads": heads, "size": size, "rows": rows, "half": size // 2, "quarter": size // 4}
    text = MODEL.format(width=heads * size, factors=factors, scales=scales, **sizes)
    for old, new in form.items():
        assert old in text
        text = text.replace(old, new)
    return parser.parse_model(text)


def exported(model: onnx.ModelProto | bytes, options: CompileOptions = FUSED) -> ExportedModel:
    """Return a model as the CPU gets it."""
    graph = from_onnx(model)
    return export_model(graph, options, kernel_set(CpuProvider(), graph, options))


def count(model: ExportedModel, op_type: str = "RotaryEmbedding") -> int:
    """Return how many nodes of an operator a model has."""
    return [node.op_type for node in model.nodes].count(op_type)


def feeds_of(rng: np.random.Generator, heads: int, size: int, rows: int, batch: int, seq: int) -> dict[str, np.ndarray]:
    """Return inputs; `x` has the heads of `flat`."""
    flat = rng.normal(size=(batch, seq, heads * size)).astype(np.float32)
    return {
        "x": np.ascontiguousarray(flat.reshape(batch, seq, heads, size).transpose(0, 2, 1, 3)),
        "flat": flat,
        "places": rng.integers(0, 100, (rows, seq)),
        "rates": (10 ** -rng.uniform(0, 3, size // 2)).astype(np.float32),
        "others": rng.random(size // 2).astype(np.float32),
        "elsewhere": np.arange(seq)[None],
    }


def rotated(feeds: dict[str, np.ndarray], factor: float) -> np.ndarray:
    """Return the result in f64."""
    x = feeds["x"].astype(np.float64)
    angles = (feeds["places"][..., None].astype(np.float32) * feeds["rates"]).astype(np.float64)[:, None]
    cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
    low, high = np.split(x, 2, -1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


@pytest.mark.parametrize("rows", [1, "batch"])
@pytest.mark.parametrize("form", FORMS)
def test_made_up_rotations_are_what_float64_gives(form: str, rows: int | str) -> None:
    """In each form, for places of all sequences or of each, in open sizes; one runner takes them all."""
    rng = np.random.default_rng(7)
    for heads, size in ((1, 4), (3, 8), (4, 64)):
        model = written(FORMS[form], heads, size, rows)
        assert count(exported(model)) == 1
        assert count(exported(model, CompileOptions())) == 0
        with rlx_ort.load(model.SerializeToString(), options=FUSED) as runner:
            for batch, seq in ((1, 1), (1, 9), (3, 5), (2, 1), (2, 0)):
                feeds = feeds_of(rng, heads, size, 1 if rows == 1 else batch, batch, seq)
                (found,) = runner.run("cpu", feeds)
                expected = rotated(feeds, 1.25 if form == "scaled" else 1.0)
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("miss", MISSES)
def test_near_misses_stay_as_they_are(miss: str) -> None:
    """Other signs, parts, angles, factors, operands and lengths."""
    assert count(exported(written(MISSES[miss]))) == 0


def test_nothing_changes_without_a_kernel() -> None:
    """The graph is the same object."""
    graph = from_onnx(written({}))
    assert fuse(graph, KernelSet("none", None, lambda *_: False), graph.weights)[0] is graph


@pytest.mark.parametrize("rows", [1, "batch"])
def test_f16_rotates_by_sines_that_f32_computed(rows: int | str) -> None:
    """Positions beyond 2048 have no place in f16."""
    halves = CompileOptions(fusion=True, precision="f16")
    model = written({}, 4, 64, rows)
    inputs = {
        node.op_type: [str(kind).partition("(")[0] for kind in node.inputs] for node in exported(model, halves).nodes
    }
    assert (inputs["Cos"], inputs["RotaryEmbedding"]) == (["f32"], ["f16", "i64", "f16", "f16"])
    feeds = feeds_of(np.random.default_rng(3), 4, 64, 1 if rows == 1 else 2, 2, 9)
    feeds["places"] += 4001
    with rlx_ort.load(model.SerializeToString(), options=halves) as runner:
        (found,) = runner.run("cpu", feeds)
    np.testing.assert_allclose(found, rotated(feeds, 1.0), atol=5e-3)


LLAMA = [each for each in corpus() if each.architecture == "llama"]


@pytest.mark.parametrize("model", LLAMA, ids=lambda model: model.name)
def test_exports_of_llama_rotate_in_the_fused_operator(model: UserModel) -> None:
    """Queries and keys of both layers, with tables that all of them share; `test_fusion` has the results."""
    before, after = (exported(model.model(), options) for options in (CompileOptions(), FUSED))
    assert (count(before), count(before, "Neg")) == (0, 4)
    assert (count(after), count(after, "Neg")) == (4, 0)
    assert len({tuple(node.input_names[1:]) for node in after.nodes if node.op_type == "RotaryEmbedding"}) == 1
    assert len(after.nodes) < len(before.nodes) - 4 * 4
