"""Small decoders in the forms that exist, with their tokens computed in float64, for the tests of decode loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from reference_check import causal_attention, likeliest_tokens, rotation

from rlx_ort import DType, Graph, Value
from rlx_ort.ir.types import Shape, TensorType

__all__ = ["DECODER", "FORMS", "Decoder", "build"]

FORMS = ("cached", "masked", "scatter", "concat")
"""`cached`: `cached_attention`. `masked`: as genai exports it. `scatter`: TensorScatter and Attention, of opset 24.
`concat`: a cache that grows, as in Optimum."""

Attend: TypeAlias = "Callable[[int, Value, Value, Value], tuple[Value, Value, Value]]"
"""Takes a layer's number and q, k and v; returns the result and the layer's new cache."""


@dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder, and its weights, whose best two logits are never close."""

    vocabulary: int = 48
    heads: int = 4
    shared_by: int = 2
    head: int = 16
    layers: int = 2
    longest: int = 64
    seed: int = 3
    weights: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        source = np.random.default_rng(self.seed)
        width, kv = self.heads * self.head, self.kv_heads * self.head
        shapes = {"table": (self.vocabulary, width), "out": (width, self.vocabulary)}
        for layer in range(self.layers):
            shapes |= {f"q{layer}": (width, width), f"k{layer}": (width, kv), f"v{layer}": (width, kv)}
        for name, shape in shapes.items():
            scale = 1.0 if name == "table" else 1 / math.sqrt(shape[0])
            self.weights[name] = (source.standard_normal(shape) * scale).astype(np.float32)
        cos, sin = rotation(self.longest, self.head, 100.0)
        self.weights.update(cos=cos.astype(np.float32), sin=sin.astype(np.float32))

    @property
    def kv_heads(self) -> int:
        return self.heads // self.shared_by

    def logits(self, tokens: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """Return the logits after the last of tokens `(batch, count)`, computed from all of them in float64."""
        w = {name: array.astype(np.float64) for name, array in self.weights.items()}
        count = tokens.shape[1]
        tables = w["cos"][:count], w["sin"][:count]
        x = w["table"][tokens]
        for layer in range(self.layers):
            x = x + causal_attention(*(x @ w[f"{name}{layer}"] for name in "qkv"), tables)
        found: npt.NDArray[np.float64] = x[:, -1] @ w["out"]
        return found

    def tokens(self, prompt: npt.NDArray[Any], count: int) -> npt.NDArray[np.int64]:
        """Return the `count` likeliest tokens after a prompt, `(batch, count)`."""
        return likeliest_tokens(self.logits, prompt, count)


DECODER = Decoder()


def build(decoder: Decoder = DECODER, form: str = "cached") -> Graph:
    """Return the decoder in one of `FORMS`: tokens and cache in; logits and cache out."""
    g = Graph(form)
    w = {name: g.param(name, array.shape, data=array) for name, array in decoder.weights.items()}
    x = g.gather(w["table"], g.input("input_ids", ["batch", "new"], "i64"))
    attend = {"cached": _cached, "masked": _masked, "scatter": _scatter, "concat": _concat}[form](g, decoder, w)
    outputs = []
    for layer in range(decoder.layers):
        mixed, keys, values = attend(layer, *(x @ w[f"{name}{layer}"] for name in "qkv"))
        x = x + mixed
        outputs += [keys, values]
    names = ["new_keys{}", "new_values{}"] if form == "cached" else ["present.{}.key", "present.{}.value"]
    g.set_outputs(
        [x @ w["out"], *outputs], ["logits", *(name.format(i) for i in range(decoder.layers) for name in names)]
    )
    return g


def _cached(g: Graph, decoder: Decoder, w: dict[str, Value]) -> Attend:
    past = g.input("past_length", ["batch"], "i32")
    sizes = ["batch", decoder.kv_heads, "longest", decoder.head]

    def attend(layer: int, q: Value, k: Value, v: Value) -> tuple[Value, Value, Value]:
        cache = g.input(f"keys{layer}", sizes), g.input(f"values{layer}", sizes)
        return g.cached_attention(q, k, v, cache, past, decoder.heads, rotation=(w["cos"], w["sin"]))

    return attend


def _masked(g: Graph, decoder: Decoder, w: dict[str, Value]) -> Attend:
    """As onnxruntime-genai's builder does it."""
    mask = g.input("attention_mask", ["batch", "total"], "i64")
    (shape,) = g.onnx_node("Shape", [mask], types=[TensorType(DType.I64, Shape([2]))])
    total = g.gather(shape, np.array(1, np.int64)).cast("i32")
    last = (mask.sum([1]) - np.array([1], np.int64)).cast("i32")
    attributes = {"num_heads": decoder.heads, "kv_num_heads": decoder.kv_heads, "do_rotary": 1}

    def attend(layer: int, q: Value, k: Value, v: Value) -> tuple[Value, Value, Value]:
        names = [f"past_key_values.{layer}.{part}" for part in ("key", "value")]
        cache = [g.input(name, ["batch", decoder.kv_heads, "past", "head"]) for name in names]
        given = [q, k, v, *cache, last, total, w["cos"], w["sin"]]
        new = TensorType(DType.F32, Shape(["batch", decoder.kv_heads, "total", "head"]))
        types = [q.type, new, new]
        mixed, keys, values = g.onnx_node(
            "GroupQueryAttention", given, attributes, types=types, domain="com.microsoft", version=1
        )
        return mixed, keys, values

    return attend


def _scatter(g: Graph, decoder: Decoder, w: dict[str, Value]) -> Attend:
    past = g.input("write_indices", ["batch"], "i64")
    place = g.gather(g.input("position_ids", ["batch", "new"], "i64"), np.array(0, np.int64))
    cos, sin = (g.gather(w[name], place) for name in ("cos", "sin"))
    slots = g.constant(np.arange(decoder.longest)[None])
    seen = g.compare("<=", slots, g.reshape(place, ["new", 1]))
    sizes = Shape(["batch", decoder.kv_heads, decoder.longest, decoder.head])
    cache = TensorType(DType.F32, sizes)

    def heads(value: Value, count: int) -> Value:
        return g.transpose(g.reshape(value, ["batch", "new", count, decoder.head]), [0, 2, 1, 3])

    def attend(layer: int, q: Value, k: Value, v: Value) -> tuple[Value, Value, Value]:
        q, k = (g.rope(value, cos, sin, decoder.head) for value in (q, k))
        kept = []
        for part, new in (("key", k), ("value", v)):
            old = g.input(f"past_key_values.{layer}.{part}", sizes)
            given = [old, heads(new, decoder.kv_heads), past]
            kept += g.onnx_node("TensorScatter", given, {"axis": 2}, types=[cache], version=24)
        query = heads(q, decoder.heads)
        (mixed,) = g.onnx_node("Attention", [query, *kept, seen], {}, types=[query.type], version=24)
        width = decoder.heads * decoder.head
        return g.reshape(g.transpose(mixed, [0, 2, 1, 3]), ["batch", "new", width]), kept[0], kept[1]

    return attend


def _concat(g: Graph, decoder: Decoder, w: dict[str, Value]) -> Attend:
    """As Optimum does it, of which the mask hides keys here."""
    mask = g.input("attention_mask", ["batch", "total"], "i64")
    kept = g.reshape(mask.cast("f32"), ["batch", "total", 1])
    place = g.gather(g.input("position_ids", ["batch", "new"], "i64"), np.array(0, np.int64))
    cos, sin = (g.gather(w[name], place) for name in ("cos", "sin"))
    sizes = ["batch", "past", decoder.kv_heads * decoder.head]

    def attend(layer: int, q: Value, k: Value, v: Value) -> tuple[Value, Value, Value]:
        k = g.concat([g.input(f"past_key_values.{layer}.key", sizes), g.rope(k, cos, sin, decoder.head)], axis=1)
        v = g.concat([g.input(f"past_key_values.{layer}.value", sizes), v], axis=1)
        q = g.rope(q, cos, sin, decoder.head)
        k, v = (g.reshape(value, ["batch", "total", sizes[2]]) for value in (k, v))
        return g.gqa(q, k * kept, v, decoder.heads, decoder.kv_heads, decoder.head, "causal"), k, v

    return attend
