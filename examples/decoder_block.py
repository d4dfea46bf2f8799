"""A small language model of one decoder block: embedding, RMS norm, rotary positions, causal attention, SwiGLU.

python examples/decoder_block.py            on every device that takes it
python examples/decoder_block.py cpu webgpu
"""

from __future__ import annotations

import numpy as np
from reference_check import Array, causal_attention, rotation, show

from rlx_ort.ir.graph import Graph

VOCABULARY, TOKENS, WIDTH, HEADS, INNER = 50, 6, 16, 2, 24
HEAD = WIDTH // HEADS
EPSILON = 1e-6


def make_weights(seed: int = 0) -> dict[str, Array]:
    """Return float32 weights, the same for the same seed."""
    source = np.random.default_rng(seed)
    shapes = {"table": (VOCABULARY, WIDTH), "up_gate": (WIDTH, 2 * INNER), "down": (INNER, WIDTH)}
    shapes |= dict.fromkeys(("query", "key", "value", "out"), (WIDTH, WIDTH))
    weights = {name: source.normal(0, 0.3, shape) for name, shape in shapes.items()}
    weights |= {name: source.normal(1, 0.1, WIDTH) for name in ("norm1", "norm2", "norm3")}
    return {name: array.astype(np.float32) for name, array in weights.items()}


def build(weights: dict[str, Array]) -> Graph:
    """Return the graph: token ids in, the logits of the next token at each position out."""
    g = Graph("decoder_block")
    w = {name: g.param(name, array.shape, data=array) for name, array in weights.items()}
    cos, sin = (g.constant(table.astype(np.float32)) for table in rotation(TOKENS, HEAD))
    ids = g.input("ids", ["batch", TOKENS], "i64")

    x = g.gather(w["table"], ids, axis=0)
    h = g.rms_norm(x, w["norm1"], eps=EPSILON)
    q = g.rope(h @ w["query"], cos, sin, HEAD)
    k = g.rope(h @ w["key"], cos, sin, HEAD)
    x = x + g.attention_kind(q, k, h @ w["value"], HEADS, HEAD, "causal") @ w["out"]
    h = g.rms_norm(x, w["norm2"], eps=EPSILON)
    x = x + g.fused_swiglu(h @ w["up_gate"]) @ w["down"]
    g.outputs = [g.rms_norm(x, w["norm3"], eps=EPSILON) @ w["table"].transpose()]
    return g


def sample_inputs(batch: int = 2) -> dict[str, Array]:
    """Return inputs for one run."""
    return {"ids": np.random.default_rng(1).integers(0, VOCABULARY, (batch, TOKENS))}


def reference(weights: dict[str, Array], inputs: dict[str, Array]) -> Array:
    """Return the logits, computed in float64 with numpy alone."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}

    def norm(x: Array, name: str) -> Array:
        result: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * w[name]
        return result

    x = w["table"][inputs["ids"]]
    h = norm(x, "norm1")
    q, k, v = (h @ w[name] for name in ("query", "key", "value"))
    x = x + causal_attention(q, k, v, rotation(TOKENS, HEAD)) @ w["out"]
    up, gate = np.split(norm(x, "norm2") @ w["up_gate"], 2, axis=-1)
    x = x + (up * gate / (1 + np.exp(-gate))) @ w["down"]
    logits: Array = norm(x, "norm3") @ w["table"].T
    return logits


if __name__ == "__main__":
    weights = make_weights()
    inputs = sample_inputs()
    show(build(weights), inputs, reference(weights, inputs))
