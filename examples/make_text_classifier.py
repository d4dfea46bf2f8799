"""A small text classifier as an ONNX file, written the way exporters write one, with seeded weights.

    python examples/make_text_classifier.py text_classifier.onnx

Token ids and an attention mask go in; class probabilities come out. `batch` and `tokens` are named dims. The model
is made with ONNX's own tools, so it is a model that `rlx_ort` has to import like any other.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper, parser

Array: TypeAlias = npt.NDArray[Any]

VOCABULARY, POSITIONS, WIDTH, HEADS, INNER, LAYERS, CLASSES = 200, 32, 32, 4, 64, 2, 3
HEAD = WIDTH // HEADS

HEADER = """
<ir_version: 8, opset_import: ["": 18]>
text_classifier (int64[batch, tokens] ids, int64[batch, tokens] mask) => (float[batch, classes] probabilities)
"""

EMBEDDING = """
    one = Constant <value = float {{1.0}}> ()
    blocked = Constant <value = float {{-10000.0}}> ()
    start = Constant <value = int64[1] {{0}}> ()
    token_count = Shape <start = 1, end = 2> (ids)
    words = Gather (word_table, ids)
    places = Slice (place_table, start, token_count, start)
    embedded = Add (words, places)
    x0 = LayerNormalization <axis = -1, epsilon = 1e-5> (embedded, embed_norm_w, embed_norm_b)
    kept = Cast <to = 1> (mask)
    key_axes = Constant <value = int64[2] {{1, 2}}> ()
    kept_keys = Unsqueeze (kept, key_axes)
    dropped_keys = Sub (one, kept_keys)
    bias = Mul (dropped_keys, blocked)
    split_shape = Constant <value = int64[4] {{0, 0, {heads}, {head}}}> ()
    merged_shape = Constant <value = int64[3] {{0, 0, {width}}}> ()
    scale = Constant <value = float {{{scale}}}> ()
    half = Constant <value = float {{0.5}}> ()
    root_two = Constant <value = float {{1.4142135}}> ()
"""

PROJECTION = """
    {name}_flat{i} = MatMul (x{i}, {name}_w{i})
    {name}_biased{i} = Add ({name}_flat{i}, {name}_b{i})
    {name}_split{i} = Reshape ({name}_biased{i}, split_shape)
    {name}{i} = Transpose <perm = {perm}> ({name}_split{i})
"""

LAYER = """
    products{i} = MatMul (q{i}, k{i})
    scaled{i} = Mul (products{i}, scale)
    scores{i} = Add (scaled{i}, bias)
    weights{i} = Softmax <axis = -1> (scores{i})
    mixed{i} = MatMul (weights{i}, v{i})
    mixed_tokens{i} = Transpose <perm = [0, 2, 1, 3]> (mixed{i})
    merged{i} = Reshape (mixed_tokens{i}, merged_shape)
    out_flat{i} = MatMul (merged{i}, out_w{i})
    out{i} = Add (out_flat{i}, out_b{i})
    attended{i} = Add (x{i}, out{i})
    y{i} = LayerNormalization <axis = -1, epsilon = 1e-5> (attended{i}, norm1_w{i}, norm1_b{i})
    up_flat{i} = MatMul (y{i}, up_w{i})
    up{i} = Add (up_flat{i}, up_b{i})
    over_root{i} = Div (up{i}, root_two)
    erf{i} = Erf (over_root{i})
    erf_one{i} = Add (erf{i}, one)
    gated{i} = Mul (up{i}, erf_one{i})
    gelu{i} = Mul (gated{i}, half)
    down_flat{i} = MatMul (gelu{i}, down_w{i})
    down{i} = Add (down_flat{i}, down_b{i})
    fed{i} = Add (y{i}, down{i})
    x{next} = LayerNormalization <axis = -1, epsilon = 1e-5> (fed{i}, norm2_w{i}, norm2_b{i})
"""

POOLING = """
    token_axis = Constant <value = int64[1] {{1}}> ()
    last_axis = Constant <value = int64[1] {{2}}> ()
    kept_tokens = Unsqueeze (kept, last_axis)
    kept_values = Mul (x{last}, kept_tokens)
    total = ReduceSum <keepdims = 0> (kept_values, token_axis)
    kept_count = ReduceSum <keepdims = 1> (kept, token_axis)
    count = Max (kept_count, one)
    pooled = Div (total, count)
    class_flat = MatMul (pooled, class_w)
    logits = Add (class_flat, class_b)
    probabilities = Softmax <axis = -1> (logits)
"""


def make_weights(seed: int = 0) -> dict[str, Array]:
    """Return the weights, float32, the same for the same seed."""
    source = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"word_table": (VOCABULARY, WIDTH), "place_table": (POSITIONS, WIDTH)}
    shapes |= {"embed_norm_w": (WIDTH,), "embed_norm_b": (WIDTH,), "class_w": (WIDTH, CLASSES), "class_b": (CLASSES,)}
    for i in range(LAYERS):
        for name in ("q", "k", "v", "out"):
            shapes |= {f"{name}_w{i}": (WIDTH, WIDTH), f"{name}_b{i}": (WIDTH,)}
        shapes |= {f"up_w{i}": (WIDTH, INNER), f"up_b{i}": (INNER,)}
        shapes |= {f"down_w{i}": (INNER, WIDTH), f"down_b{i}": (WIDTH,)}
        for name in ("norm1", "norm2"):
            shapes |= {f"{name}_w{i}": (WIDTH,), f"{name}_b{i}": (WIDTH,)}
    spread = {name: 0.3 if len(shape) == 2 else 0.1 for name, shape in shapes.items()}
    centre = {name: float("norm" in name and "_w" in name) for name in shapes}
    return {name: source.normal(centre[name], spread[name], shape).astype(np.float32) for name, shape in shapes.items()}


def make_model(weights: dict[str, Array]) -> onnx.ModelProto:
    """Return the checked ONNX model with these weights inside."""
    sizes = {"heads": HEADS, "head": HEAD, "width": WIDTH, "scale": 1 / math.sqrt(HEAD)}
    body = [EMBEDDING.format(**sizes)]
    for i in range(LAYERS):
        for name, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
            body.append(PROJECTION.format(name=name, i=i, perm=perm))
        body.append(LAYER.format(i=i, next=i + 1))
    body.append(POOLING.format(last=LAYERS))
    model = parser.parse_model(HEADER + "{" + "".join(body) + "}")
    model.producer_name = "make_text_classifier"
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    for node in model.graph.node:
        node.name = node.output[0]
    onnx.checker.check_model(model, full_check=True)
    return model


def sample_inputs(batch: int = 2, tokens: int = 8, seed: int = 1) -> dict[str, Array]:
    """Return token ids and a mask that drops the end of every row but the first."""
    source = np.random.default_rng(seed)
    lengths = np.maximum(tokens - 2 * np.arange(batch), 1)
    mask = (np.arange(tokens) < lengths[:, None]).astype(np.int64)
    return {"ids": source.integers(0, VOCABULARY, (batch, tokens)), "mask": mask}


def reference(weights: dict[str, Array], inputs: dict[str, Array]) -> Array:
    """Return the probabilities, computed in float64 with numpy alone."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    ids, mask = inputs["ids"], inputs["mask"]
    batch, tokens = ids.shape
    x = _norm(w["word_table"][ids] + w["place_table"][:tokens], w["embed_norm_w"], w["embed_norm_b"])
    bias = (1.0 - mask[:, None, None, :]) * -10000.0
    for i in range(LAYERS):
        q, k, v = (
            (x @ w[f"{name}_w{i}"] + w[f"{name}_b{i}"]).reshape(batch, tokens, HEADS, HEAD).transpose(0, 2, 1, 3)
            for name in "qkv"
        )
        mixed = _softmax(q @ k.transpose(0, 1, 3, 2) / math.sqrt(HEAD) + bias) @ v
        mixed = mixed.transpose(0, 2, 1, 3).reshape(batch, tokens, WIDTH)
        y = _norm(x + mixed @ w[f"out_w{i}"] + w[f"out_b{i}"], w[f"norm1_w{i}"], w[f"norm1_b{i}"])
        up = y @ w[f"up_w{i}"] + w[f"up_b{i}"]
        gelu = 0.5 * up * (1.0 + np.vectorize(math.erf)(up / math.sqrt(2.0)))
        x = _norm(y + gelu @ w[f"down_w{i}"] + w[f"down_b{i}"], w[f"norm2_w{i}"], w[f"norm2_b{i}"])
    kept = mask[:, :, None].astype(np.float64)
    pooled = (x * kept).sum(axis=1) / np.maximum(kept.sum(axis=1), 1.0)
    return _softmax(pooled @ w["class_w"] + w["class_b"])


def _norm(x: Array, weight: Array, bias: Array) -> Array:
    centred = x - x.mean(axis=-1, keepdims=True)
    result: Array = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5) * weight + bias
    return result


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    result: Array = e / e.sum(axis=-1, keepdims=True)
    return result


def main() -> None:
    """Write the model to the file that the command line names."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "text_classifier.onnx")
    onnx.save(make_model(make_weights()), target)
    print(f"wrote {target}, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
