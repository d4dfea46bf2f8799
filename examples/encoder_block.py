"""A transformer encoder block: attention with a residual and a norm, then a GELU feed-forward with the same.

python examples/encoder_block.py            on every device that takes it
python examples/encoder_block.py cpu webgpu
"""

from __future__ import annotations

import math

import numpy as np
from reference_check import Array, show

from rlx_ort.ir.core import Value
from rlx_ort.ir.graph import Graph

WIDTH, HEADS, INNER = 16, 2, 32
HEAD = WIDTH // HEADS
EPSILON = 1e-5


def make_weights(seed: int = 0) -> dict[str, Array]:
    """Return float32 weights, the same for the same seed."""
    source = np.random.default_rng(seed)
    shapes = {f"{name}.weight": (WIDTH, WIDTH) for name in ("query", "key", "value", "out")}
    shapes |= {"up.weight": (WIDTH, INNER), "down.weight": (INNER, WIDTH)}
    weights = {name: source.normal(0, 0.25, shape) for name, shape in shapes.items()}
    weights |= {name.replace("weight", "bias"): source.normal(0, 0.1, shape[-1]) for name, shape in shapes.items()}
    for name in ("norm1", "norm2"):
        weights |= {f"{name}.weight": source.normal(1, 0.1, WIDTH), f"{name}.bias": source.normal(0, 0.1, WIDTH)}
    return {name: array.astype(np.float32) for name, array in weights.items()}


def build(weights: dict[str, Array]) -> Graph:
    """Return the graph; `batch` and `tokens` may have any size in each run."""
    g = Graph("encoder_block")
    w = {name: g.param(name, array.shape, data=array) for name, array in weights.items()}

    def linear(x: Value, name: str) -> Value:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(x: Value, name: str) -> Value:
        return g.layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], eps=EPSILON)

    x = g.input("x", ["batch", "tokens", WIDTH])
    q, k, v = (linear(x, name) for name in ("query", "key", "value"))
    mixed = g.attention_kind(q, k, v, HEADS, HEAD, "none")
    x = norm(x + linear(mixed, "out"), "norm1")
    g.outputs = [norm(x + linear(g.gelu(linear(x, "up")), "down"), "norm2")]
    return g


def sample_inputs(batch: int = 2, tokens: int = 5) -> dict[str, Array]:
    """Return inputs for one run."""
    return {"x": np.random.default_rng(1).standard_normal((batch, tokens, WIDTH)).astype(np.float32)}


def reference(weights: dict[str, Array], inputs: dict[str, Array]) -> Array:
    """Return the output, computed in float64 with numpy alone."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}

    def linear(x: Array, name: str) -> Array:
        result: Array = x @ w[f"{name}.weight"] + w[f"{name}.bias"]
        return result

    def norm(x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
        result: Array = scaled * w[f"{name}.weight"] + w[f"{name}.bias"]
        return result

    def heads(x: Array) -> Array:
        return x.reshape(*x.shape[:2], HEADS, HEAD).transpose(0, 2, 1, 3)

    x = inputs["x"].astype(np.float64)
    q, k, v = (heads(linear(x, name)) for name in ("query", "key", "value"))
    scores = np.exp(q @ k.transpose(0, 1, 3, 2) / math.sqrt(HEAD))
    mixed = (scores / scores.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
    x = norm(x + linear(mixed, "out"), "norm1")
    up = linear(x, "up")
    gelu = 0.5 * up * (1 + np.vectorize(math.erf)(up / math.sqrt(2)))
    return norm(x + linear(gelu, "down"), "norm2")


if __name__ == "__main__":
    weights = make_weights()
    inputs = sample_inputs()
    show(build(weights), inputs, reference(weights, inputs))
