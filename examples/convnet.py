"""A small image classifier: two convolutions with ReLU, max pooling, global mean, a linear layer and softmax.

python examples/convnet.py            on every device that takes it
python examples/convnet.py cpu webgpu
"""

from __future__ import annotations

import numpy as np
from reference_check import Array, show

from rlx_ort.ir.graph import Graph

SIZE, CHANNELS, FEATURES, CLASSES = 8, 3, (4, 6), 5


def make_weights(seed: int = 0) -> dict[str, Array]:
    """Return float32 weights, the same for the same seed."""
    source = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "conv1.weight": (FEATURES[0], CHANNELS, 3, 3),
        "conv1.bias": (FEATURES[0],),
        "conv2.weight": (FEATURES[1], FEATURES[0], 3, 3),
        "conv2.bias": (FEATURES[1],),
        "classes.weight": (FEATURES[1], CLASSES),
        "classes.bias": (CLASSES,),
    }
    return {name: source.normal(0, 0.4, shape).astype(np.float32) for name, shape in shapes.items()}


def build(weights: dict[str, Array]) -> Graph:
    """Return the graph: images in NCHW order in, class probabilities out."""
    g = Graph("convnet")
    w = {name: g.param(name, array.shape, data=array) for name, array in weights.items()}
    x = g.input("image", ["batch", CHANNELS, SIZE, SIZE])
    x = g.relu(g.conv2d(x, w["conv1.weight"], w["conv1.bias"], padding=1))
    x = g.pool("max", x, kernel=2, stride=2)
    x = g.relu(g.conv2d(x, w["conv2.weight"], w["conv2.bias"], stride=2, padding=1))
    g.outputs = [g.softmax(x.mean([2, 3]) @ w["classes.weight"] + w["classes.bias"])]
    return g


def sample_inputs(batch: int = 2) -> dict[str, Array]:
    """Return inputs for one run."""
    shape = (batch, CHANNELS, SIZE, SIZE)
    return {"image": np.random.default_rng(1).standard_normal(shape).astype(np.float32)}


def reference(weights: dict[str, Array], inputs: dict[str, Array]) -> Array:
    """Return the probabilities, computed in float64 with numpy alone."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}

    def conv(x: Array, name: str, stride: int) -> Array:
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))[:, :, ::stride, ::stride]
        result: Array = np.einsum("nchwij,ocij->nohw", windows, w[f"{name}.weight"])
        return result + w[f"{name}.bias"][:, None, None]

    x = np.maximum(conv(inputs["image"].astype(np.float64), "conv1", 1), 0)
    x = x.reshape(*x.shape[:2], SIZE // 2, 2, SIZE // 2, 2).max((3, 5))
    x = np.maximum(conv(x, "conv2", 2), 0).mean((2, 3))
    e = np.exp(x @ w["classes.weight"] + w["classes.bias"])
    probabilities: Array = e / e.sum(-1, keepdims=True)
    return probabilities


if __name__ == "__main__":
    weights = make_weights()
    inputs = sample_inputs()
    show(build(weights), inputs, reference(weights, inputs))
