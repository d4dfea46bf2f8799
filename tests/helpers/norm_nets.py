"""Made-up nets of convolutions, norms of groups and SiLU, as exporters write them, and their results in f64."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from numpy.lib.stride_tricks import sliding_window_view
from onnx import helper, numpy_helper

Array = npt.NDArray[Any]


class Block(NamedTuple):
    """A convolution of three by three, a norm, and what follows it: "none", "silu", "quick" or "swish"."""

    channels: int
    groups: int
    epsilon: float
    activation: str


class Net(NamedTuple):
    """Some blocks in a form of an exporter: "dynamo", "traced", or GroupNormalization of opset "18" or "21"."""

    form: str
    blocks: tuple[Block, ...]
    dtype: str
    size: tuple[int, int, int]  # batch, height, width
    seed: int

    @classmethod
    def of(cls, seed: int, most: int = 8) -> Net:
        """Return one of many nets whose groups have up to `most` pairs of channels."""
        rng = np.random.default_rng(seed)
        form = ("dynamo", "traced", "18", "21")[seed % 4]
        activations = ["none", "silu", "quick", *(["swish"] if form == "21" else [])]
        blocks = []
        for _ in range(int(rng.integers(1, 4))):
            groups = int(rng.integers(1, 9))
            channels = groups * 2 * int(rng.integers(1, most + 1))
            epsilon = float(np.float32(rng.choice([1e-5, 1e-3, 0.3])))
            blocks.append(Block(channels, groups, epsilon, str(rng.choice(activations))))
        batch, height, width = (int(rng.integers(1, most)) for most in (4, 12, 12))
        return cls(form, tuple(blocks), str(rng.choice(["float32", "float16"])), (batch, height, width), seed)

    @property
    def feed(self) -> Array:
        """What the net reads, three channels of random numbers."""
        batch, height, width = self.size
        return np.random.default_rng(self.seed + 1).normal(size=(batch, 3, height, width)).astype(self.dtype)

    def weights(self) -> list[tuple[Array, Array, Array, Array]]:
        """Return kernel, bias, gamma and beta of each block; before opset 21 the standard has them for each group."""
        rng, read, made = np.random.default_rng(self.seed + 2), 3, []
        for block in self.blocks:
            kernel = rng.normal(size=(block.channels, read, 3, 3)) / np.sqrt(9 * read)
            count = block.groups if self.form == "18" else block.channels
            shifts = [rng.normal(1 - at % 2, 0.5, size) for at, size in enumerate((block.channels, count, count), 1)]
            made.append(tuple(each.astype(self.dtype) for each in (kernel, *shifts)))
            read = block.channels
        return made

    def expected(self) -> Array:
        """Return the result in f64."""
        x = self.feed.astype(np.float64)
        for block, given in zip(self.blocks, self.weights(), strict=True):
            kernel, bias, gamma, beta = (each.astype(np.float64) for each in given)
            windows = sliding_window_view(np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), axis=(2, 3))
            x = np.einsum("nchwij,ocij->nohw", windows, kernel) + bias[:, None, None]
            parts = block.channels // len(gamma)
            x = normalised(x, np.repeat(gamma, parts), np.repeat(beta, parts), block.groups, block.epsilon)
            x = x if block.activation == "none" else silu(x)
        return x

    def model(self) -> onnx.ModelProto:
        """Return the model, whose batch, height and width are open."""
        writer = _Writer(self)
        value = "x"
        for block, given in zip(self.blocks, self.weights(), strict=True):
            kernel, bias, gamma, beta = given
            value = writer.op("Conv", value, writer.data(kernel), writer.data(bias), pads=[1, 1, 1, 1])
            value = writer.norm(value, block, gamma, beta)
            writer.declare(value, block.channels)
            value = writer.activated(value, block.activation)
            writer.declare(value, block.channels)
        writer.nodes.append(helper.make_node("Identity", [value], ["y"], "last"))
        writer.declare("x", 3)
        writer.declare("y", self.blocks[-1].channels)
        ends = writer.infos[-2:]
        graph = helper.make_graph(writer.nodes, "net", ends[:1], ends[1:], writer.tensors, value_info=writer.infos[:-2])
        opset = {"dynamo": 20, "traced": 17, "18": 18, "21": 21}[self.form]
        opset = 24 if any(block.activation == "swish" for block in self.blocks) else opset
        imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=10)


def normalised(x: Array, gamma: Array, beta: Array, groups: int, epsilon: float) -> Array:
    """Return `(N, C, H, W)` with each group of channels normalised, times gamma plus beta of each channel."""
    parted = x.reshape(len(x), groups, -1)
    mean, variance = (of(parted, axis=-1, keepdims=True) for of in (np.mean, np.var))
    whole = ((parted - mean) / np.sqrt(variance + epsilon)).reshape(x.shape)
    return whole * gamma[:, None, None] + beta[:, None, None]


def silu(x: Array) -> Array:
    """Return x times its sigmoid."""
    return x / (1 + np.exp(-x))


class _Writer:
    """The graph of a net while it is written; products and sums have their operands in either order."""

    def __init__(self, net: Net) -> None:
        self.net = net
        self.rng = np.random.default_rng(net.seed + 3)
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self.infos: list[onnx.ValueInfoProto] = []
        """The shapes that ONNX does not infer, and exporters write."""

    def op(self, kind: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        name = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name, domain=domain, **attributes))
        return name

    def data(self, values: Any, dtype: str = "") -> str:
        """Return the name of a weight, or of a constant where traced models have one."""
        tensor = numpy_helper.from_array(np.asarray(values, dtype or self.net.dtype), f"data_{len(self.tensors)}")
        if self.net.form == "traced" and tensor.dims[0] <= 8:
            return self.op("Constant", value=tensor)
        self.tensors.append(tensor)
        return tensor.name

    def declare(self, name: str, channels: int) -> None:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.net.dtype))
        self.infos.append(helper.make_tensor_value_info(name, kind, ["batch", channels, "height", "width"]))

    def pair(self, kind: str, one: str, other: str) -> str:
        return self.op(kind, *((one, other) if self.rng.integers(2) else (other, one)))

    def norm(self, x: str, block: Block, gamma: Array, beta: Array) -> str:
        if self.net.form in ("18", "21"):
            names = (self.data(gamma), self.data(beta))
            return self.op("GroupNormalization", x, *names, num_groups=block.groups, epsilon=block.epsilon)
        parted = self.op("Reshape", x, self.data([0, block.groups, -1], "int64"))
        ones, zeros = self.data(np.ones(block.groups)), self.data(np.zeros(block.groups))
        normal = self.op("InstanceNormalization", parted, ones, zeros, epsilon=block.epsilon)
        whole = self.op("Reshape", normal, self.op("Shape", x))
        scaled = self.pair("Mul", whole, self.data(gamma[:, None, None]))
        return self.pair("Add", scaled, self.data(beta[:, None, None]))

    def activated(self, x: str, activation: str) -> str:
        if activation == "silu":
            return self.pair("Mul", x, self.op("Sigmoid", x))
        if activation == "quick":
            return self.op("QuickGelu", x, domain="com.microsoft", alpha=1.0)
        return self.op("Swish", x) if activation == "swish" else x
