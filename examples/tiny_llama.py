"""A small Llama-style decoder with random weights: prefill, then one token at a time over a cache on the device.

Root-mean-square norms, rotary positions, grouped-query attention, SwiGLU; the tokens are drawn by the graph itself.

python examples/tiny_llama.py               on every device that takes it
python examples/tiny_llama.py cpu cuda
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from reference_check import Array, causal_attention, likeliest_tokens, rotation

from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.execution.session import Session
from rlx_ort.graph_devices import GraphDevices
from rlx_ort.ir.core import Value
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.types import Dim
from rlx_ort.options.compile_options import CompileOptions

EPSILON = 1e-6


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder; a step draws from the `top_k` likeliest tokens, by default the likeliest one."""

    vocabulary: int = 64
    width: int = 32
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    inner: int = 48
    longest: int = 64
    top_k: int = 1
    temperature: float = 1.0

    @property
    def head(self) -> int:
        """The size of a head."""
        return self.width // self.heads

    @property
    def kv_width(self) -> int:
        """The width of the keys of one token, all heads together."""
        return self.kv_heads * self.head


def make_weights(sizes: Sizes, seed: int = 0) -> dict[str, Array]:
    """Return float32 weights, the same for the same seed."""
    source = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "table": (sizes.vocabulary, sizes.width),
        "head": (sizes.width, sizes.vocabulary),
    }
    for layer in range(sizes.layers):
        shapes |= {
            f"{layer}.query": (sizes.width, sizes.width),
            f"{layer}.key": (sizes.width, sizes.kv_width),
            f"{layer}.value": (sizes.width, sizes.kv_width),
            f"{layer}.out": (sizes.width, sizes.width),
            f"{layer}.up_gate": (sizes.width, 2 * sizes.inner),
            f"{layer}.down": (sizes.inner, sizes.width),
        }
    weights = {name: source.normal(0, 1 / math.sqrt(shape[0]), shape) for name, shape in shapes.items()}
    weights["table"] = source.normal(0, 1, shapes["table"])
    names = [f"{layer}.norm{place}" for layer in range(sizes.layers) for place in (1, 2)]
    weights |= {name: source.normal(1, 0.1, sizes.width) for name in (*names, "norm")}
    return {name: array.astype(np.float32) for name, array in weights.items()}


def build_prefill(sizes: Sizes, weights: dict[str, Array]) -> Graph:
    """Return the graph of the prompt: ids `(batch, seq)` in; logits, token and the cache of each layer out."""
    g = Graph("prefill")

    def attend(layer: int, q: Value, k: Value, v: Value) -> tuple[Value, Value, Value]:
        return g.gqa(q, k, v, sizes.heads, sizes.kv_heads, sizes.head, "causal"), k, v

    ids = g.input("ids", ["batch", "seq"], "i32")
    tables = [g.input(name, ["seq", sizes.head // 2]) for name in ("cos", "sin")]
    logits, cache = _decoder(g, sizes, weights, ids, tables, attend)
    return _drawing(g, sizes, logits, cache)


def build_decode(sizes: Sizes, weights: dict[str, Array]) -> Graph:
    """Return the graph of one step: the last token and the cache in; logits, next token and longer cache out."""
    g = Graph("decode")

    def attend(layer: int, q: Value, k: Value, v: Value) -> tuple[Value, Value, Value]:
        k, v = (
            g.concat([g.input(f"{name}{layer}", ["batch", "past", sizes.kv_width]), new], axis=1)
            for name, new in (("k", k), ("v", v))
        )
        return g.gqa(q, k, v, sizes.heads, sizes.kv_heads, sizes.head, "none"), k, v  # it sees every token before it

    ids = g.input("ids", ["batch", 1], "i32")
    tables = [g.input(name, [1, sizes.head // 2]) for name in ("cos", "sin")]
    logits, cache = _decoder(g, sizes, weights, ids, tables, attend)
    return _drawing(g, sizes, logits, cache)


def build_in_place(sizes: Sizes, weights: dict[str, Array]) -> Graph:
    """Return the graph of prompt and steps over a cache of the longest length, for `rlx_ort.DecodeLoop`."""
    g = Graph("in_place")

    def attend(layer: int, q: Value, k: Value, v: Value) -> tuple[Value, Value, Value]:
        shape: list[Dim] = ["batch", sizes.kv_heads, "longest", sizes.head]
        held = g.input(f"k{layer}", shape), g.input(f"v{layer}", shape)
        return g.cached_attention(q, k, v, held, past_length, sizes.heads)

    ids = g.input("input_ids", ["batch", "seq"], "i64")
    past_length = g.input("past_length", ["batch"], "i32")
    positions = g.gather(g.input("position_ids", ["batch", "seq"], "i64"), np.array(0), axis=0)  # alike in all rows
    tables = [
        g.gather(g.constant(table.astype(np.float32)), positions, axis=0)
        for table in rotation(sizes.longest, sizes.head)
    ]
    logits, cache = _decoder(g, sizes, weights, ids, tables, attend)
    g.set_outputs([logits, *cache], ["logits", *_cache_names(sizes, "new_")])
    return g


Attend: TypeAlias = Callable[[int, Value, Value, Value], tuple[Value, Value, Value]]
"""Takes the number of a layer, queries, keys and values; returns the result and the layer's cache."""


def _decoder(
    g: Graph, sizes: Sizes, weights: dict[str, Array], ids: Value, tables: Sequence[Value], attend: Attend
) -> tuple[Value, list[Value]]:
    """Return the logits after the last of the ids, and the cache."""
    w = {name: g.param(name, array.shape, data=array) for name, array in weights.items()}
    x = g.gather(w["table"], ids, axis=0)
    cos, sin = tables
    cache: list[Value] = []
    for layer in range(sizes.layers):
        h = g.rms_norm(x, w[f"{layer}.norm1"], eps=EPSILON)
        q = g.rope(h @ w[f"{layer}.query"], cos, sin, sizes.head)
        k = g.rope(h @ w[f"{layer}.key"], cos, sin, sizes.head)
        mixed, k, v = attend(layer, q, k, h @ w[f"{layer}.value"])
        x = x + mixed @ w[f"{layer}.out"]
        h = g.rms_norm(x, w[f"{layer}.norm2"], eps=EPSILON)
        x = x + g.fused_swiglu(h @ w[f"{layer}.up_gate"]) @ w[f"{layer}.down"]
        cache += [k, v]
    last = g.gather(g.rms_norm(x, w["norm"], eps=EPSILON), np.array(-1, np.int32), axis=1)
    return last @ w["head"], cache


def _drawing(g: Graph, sizes: Sizes, logits: Value, cache: list[Value]) -> Graph:
    """Return the graph with the next token as an output, so that it need not leave the device."""
    token = g.reshape(g.sample(logits, top_k=sizes.top_k, temperature=sizes.temperature, seed=7), ["batch", 1])
    g.set_outputs([logits, token, *cache], ["logits", "token", *_cache_names(sizes, "new_")])
    return g


def _cache_names(sizes: Sizes, prefix: str = "") -> list[str]:
    return [f"{prefix}{name}{layer}" for layer in range(sizes.layers) for name in ("k", "v")]


class Decoder:
    """Prefill and decode graphs on one device; the cache and the last token never leave it."""

    def __init__(self, sizes: Sizes, weights: dict[str, Array], device: str) -> None:
        self.sizes = sizes
        # Sampling has integer nodes, some of which a device may leave to the CPU.
        session = Session(device, CompileOptions(placement="assisted"))
        self.prefill: CompiledGraph = session.compile(build_prefill(sizes, weights))
        self.decode: CompiledGraph = session.compile(build_decode(sizes, weights), self.prefill.weights)
        self._cos, self._sin = (table.astype(np.float32) for table in rotation(sizes.longest, sizes.head))
        self._past = 0

    def start(self, prompt: Array) -> Array:
        """Run the prompt `(batch, seq)`, keep its cache on the device, and return the logits of the next token."""
        count = prompt.shape[1]
        tables = {"cos": self._cos[:count], "sin": self._sin[:count]}
        outputs = self.prefill.run_dlpack({"ids": prompt.astype(np.int32), **tables})
        names = ["ids", *_cache_names(self.sizes)]
        for name, tensor in zip(names, outputs[1:], strict=True):
            self.decode.bind_gpu_handle(name, tensor)
        for place, name in enumerate(names):
            self.decode.set_gpu_handle_feed(name, place + 1)
        self._past = count
        logits: Array = outputs[0].numpy()
        return logits

    def step(self, wanted: Sequence[int] = (0,)) -> list[Array]:
        """Run one token further and return the outputs asked for: 0 is the logits, 1 the token that was drawn."""
        here = slice(self._past, self._past + 1)
        outputs = self.decode.run_read_outputs({"cos": self._cos[here], "sin": self._sin[here]}, wanted)
        self._past += 1
        return outputs

    def generate(self, prompt: Array, count: int) -> Array:
        """Return `count` tokens after the prompt, `(batch, count)`."""
        self.start(prompt)
        found = [self.token()]
        for _ in range(count - 1):
            found.append(self.step([1])[0])
        return np.concatenate(found, axis=1)

    def token(self) -> Array:
        """Return the token that the next step will take."""
        held = self.decode.read_gpu_handle("ids")
        if held is None:
            raise RuntimeError("there is no token before start()")
        return held


def reference_logits(sizes: Sizes, weights: dict[str, Array], ids: Array) -> Array:
    """Return the logits after the last of the ids `(batch, seq)`, computed in float64 with numpy and no cache."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}

    def norm(x: Array, name: str) -> Array:
        result: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * w[name]
        return result

    x = w["table"][ids]
    for layer in range(sizes.layers):
        h = norm(x, f"{layer}.norm1")
        q, k, v = (h @ w[f"{layer}.{name}"] for name in ("query", "key", "value"))
        x = x + causal_attention(q, k, v, rotation(ids.shape[1], sizes.head)) @ w[f"{layer}.out"]
        up, gate = np.split(norm(x, f"{layer}.norm2") @ w[f"{layer}.up_gate"], 2, axis=-1)
        x = x + (up * gate / (1 + np.exp(-gate))) @ w[f"{layer}.down"]
    logits: Array = norm(x, "norm")[:, -1] @ w["head"]
    return logits


def reference_tokens(sizes: Sizes, weights: dict[str, Array], prompt: Array, count: int) -> Array:
    """Return the likeliest tokens after the prompt, each computed from all before it."""
    return likeliest_tokens(lambda ids: reference_logits(sizes, weights, ids), prompt, count)


if __name__ == "__main__":
    chosen = Sizes()
    made = make_weights(chosen)
    start = np.random.default_rng(1).integers(0, chosen.vocabulary, (2, 5))
    expected = reference_tokens(chosen, made, start, 8)
    runner = GraphDevices(build_prefill(chosen, made))
    for label in sys.argv[1:] or [device.label for device in runner.devices()]:
        tokens = Decoder(chosen, made, label).generate(start, 8)
        print(f"tiny_llama on {label}: {tokens.tolist()}, as the reference: {np.array_equal(tokens, expected)}")
