"""A convnet, a decoder and an encoder with random weights, as bundles, and plain ONNX Runtime to run bundles with."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from rlx_ort.converters.bundle import ModelBundle, bundle_from_graph, external_tensors, location_of
from rlx_ort.converters.onnx_types import tensor_proto
from rlx_ort.ir.graph import Graph, Value

Array = np.ndarray[Any, Any]

CHANNELS, CLASSES = 3, 10
VOCABULARY, WIDTH, HEADS, LENGTH = 64, 128, 4, 16


def whole(bundle: ModelBundle) -> onnx.ModelProto:
    """Return the model with its weights inside."""
    model = onnx.ModelProto()
    model.CopyFrom(bundle.proto)
    for tensor in external_tensors(model):
        tensor.CopyFrom(tensor_proto(bundle.weights[location_of(tensor)], tensor.name))
    return model


def run(bundle: ModelBundle, feeds: dict[str, Array]) -> list[Array]:
    """Run a bundle with plain ONNX Runtime on the CPU."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(whole(bundle).SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def relative(got: Array, wanted: Array) -> float:
    """Return the relative L2 error, in float64."""
    difference = got.astype(np.float64) - wanted.astype(np.float64)
    return float(np.linalg.norm(difference) / np.linalg.norm(wanted.astype(np.float64)))


def cosine(got: Array, wanted: Array) -> float:
    """Return the cosine between two results, in float64."""
    a, b = got.astype(np.float64).reshape(-1), wanted.astype(np.float64).reshape(-1)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def convnet() -> ModelBundle:
    """Return four convolutions with residuals, pooling and a product: `image` (n, 3, 24, 24) -> `scores` (n, 10)."""
    rng = np.random.default_rng(5)
    g = Graph("convnet")

    def weight(name: str, *shape: int) -> Value:
        data = rng.normal(size=shape) * np.sqrt(2 / np.prod(shape[1:]))
        return g.param(name, shape, data=data.astype(np.float32))

    x = g.input("image", ["n", CHANNELS, 24, 24])
    x = g.relu(g.conv2d(x, weight("stem", 16, CHANNELS, 3, 3), padding=1, name="stem_conv"))
    for index in range(2):
        inner = g.relu(g.conv2d(x, weight(f"a{index}", 16, 16, 3, 3), padding=1, name=f"conv_a{index}"))
        x = g.relu(g.conv2d(inner, weight(f"b{index}", 16, 16, 3, 3), padding=1, name=f"conv_b{index}") + x)
    x = g.mean(x, [2, 3])
    head = rng.normal(size=(16, CLASSES)).astype(np.float32) / 4
    g.set_outputs([g.matmul(x, g.param("head", [16, CLASSES], data=head), name="head_product")], ["scores"])
    return bundle_from_graph(g, origin="convnet")


def images(count: int, seed: int = 0) -> Array:
    """Return random images for `convnet`."""
    return np.random.default_rng(seed).normal(size=(count, CHANNELS, 24, 24)).astype(np.float32)


def decoder(layers: int = 3) -> ModelBundle:
    """Return a causal decoder with gated feed-forward blocks: `ids` (b, 16) -> `logits` (b, 16, 64)."""
    rng = np.random.default_rng(11)
    g = Graph("decoder")

    def weight(name: str, *shape: int) -> Value:
        return g.param(name, shape, data=(rng.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32))

    def ones(name: str) -> Value:
        return g.param(name, [WIDTH], data=np.ones(WIDTH, np.float32))

    ids = g.input("ids", ["b", LENGTH], "i64")
    x = g.gather(g.param("table", [VOCABULARY, WIDTH], data=rng.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)),
                 ids, axis=0)  # fmt: skip
    for layer in range(layers):
        y = g.rms_norm(x, ones(f"norm{layer}"))
        q, k, v = (g.matmul(y, weight(f"{part}{layer}", WIDTH, WIDTH), name=f"{part}_product{layer}") for part in "qkv")
        mixed = g.attention_kind(q, k, v, HEADS, WIDTH // HEADS, "causal")
        x = x + g.matmul(mixed, weight(f"o{layer}", WIDTH, WIDTH), name=f"o_product{layer}")
        y = g.rms_norm(x, ones(f"inner_norm{layer}"))
        gate = g.silu(y @ weight(f"gate{layer}", WIDTH, 2 * WIDTH)) * (y @ weight(f"up{layer}", WIDTH, 2 * WIDTH))
        x = x + gate @ weight(f"down{layer}", 2 * WIDTH, WIDTH)
    logits = g.rms_norm(x, ones("last_norm")) @ weight("lm_head", WIDTH, VOCABULARY)
    g.set_outputs([logits], ["logits"])
    return bundle_from_graph(g, origin="decoder")


def tokens(count: int, seed: int = 0) -> Array:
    """Return random token ids for `decoder`."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, (count, LENGTH))
