"""`OnnxNode`, an ONNX node that has no IR op, and the kinds that are read but not run.

The latter are graphics, gradients, factorisations, and compiler-internal ops. A graph may hold them, so that a model
with them can be read, shown and cut; `verify` reports each with its node, the reason and a remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, TypeAlias

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.building import builder
from rlx_ort.ir.core import Graph, Value
from rlx_ort.ir.op import Op, OpTypes
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Dim, TensorType, UnknownType, ValueType

AttributeValue: TypeAlias = (  # pyright: ignore[reportGeneralTypeIssues]  # one text in two lines
    "int | float | str | bytes | TensorData | Graph | ValueType "
    "| tuple[int, ...] | tuple[float, ...] | tuple[str, ...] | tuple[bytes, ...] "
    "| tuple[TensorData, ...] | tuple[Graph, ...] | tuple[ValueType, ...]"
)


class OnnxNode(Op):
    """An ONNX node as it is in its model, of a version of its domain, which is empty for ai.onnx.

    Attributes:
        attributes: name -> value. A body is a `Graph` whose `Input` leaves are its formal inputs and whose
            `Capture` leaves name this node's inputs from `formal_inputs` on.
        attribute_kinds: name -> ONNX attribute type name (`INTS`, `FLOATS`...), needed for empty tuples.
        formal_inputs: how many of the node's inputs are ONNX inputs; the others are captured by bodies.
        output_count: how many results the node has, absent ones at the end left out.
    """

    op_type: str
    domain: str = ""
    version: int = 21
    overload: str = ""
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    attribute_kinds: Mapping[str, str] = field(default_factory=dict)
    formal_inputs: int = 0
    output_count: int = 1

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Return unknown types; the importer passes those of ONNX's own inference instead.

        Raises:
            GraphVerifyError: the operands of a convolution do not fit each other.
        """
        if not self.domain and (problem := convolution_problem(self.op_type, self.attributes, inputs)):
            raise GraphVerifyError(f"{self.op_type} {problem}")
        return (UnknownType(),) * self.output_count

    def integer(self, name: str, default: int) -> int:
        """Return an attribute that is an integer."""
        value = self.attributes.get(name, default)
        return value if isinstance(value, int) else default

    def bodies(self) -> tuple[Graph, ...]:
        """Return the subgraphs among the attributes."""
        bodies: list[Any] = []
        for value in self.attributes.values():
            bodies += [item for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, Graph)]
        return tuple(bodies)

    def describe(self) -> str:
        """Return the domain and operator."""
        return f"{self.domain or 'ai.onnx'}::{self.op_type}-{self.version}"


def convolution_problem(op_type: str, attributes: Mapping[Any, Any], inputs: Sequence[ValueType | None]) -> str:
    """Return the fault of a convolution's operands, if there is one; CUDA's kernel (1.31) ends the process.

    `op_type` is an operator of ai.onnx. What is not known is not judged.
    """
    if op_type not in ("Conv", "ConvTranspose"):
        return ""
    kinds = (*inputs, None, None, None)[:3]
    x, weight, bias = (kind.shape if isinstance(kind, TensorType) else None for kind in kinds)
    if weight is None or len(weight) < 2:
        return ""
    taps, transposed = weight[2:], op_type == "ConvTranspose"
    if not _may_equal(kernel := _numbers(attributes, "kernel_shape", taps), taps):
        return f"has a kernel_shape of {list(kernel)}; its weights, {list(weight)}, have another one"
    groups = attributes.get("group", 1)
    if not isinstance(groups, int) or groups < 1:
        return f"has {groups} groups"
    channels, read = (weight[1], weight[0]) if transposed else (weight[0], weight[1])
    if transposed and isinstance(channels, int):
        channels *= groups
    if not transposed and isinstance(read, int):
        read *= groups
    if x is not None and len(x) > 1 and not _may_equal(x[1:2], (read,)):
        return f"has an input of {x[1]} channels, {list(x)}; its weights, {list(weight)}, read {read}"
    for what, number in (("input", read), ("output", channels)):
        if isinstance(number, int) and number % groups:
            return f"has {number} {what} channels in {groups} groups"
    if bias is not None and not _may_equal(bias, (channels,)):
        return (
            f"has a bias of shape {list(bias)}; its weights, {list(weight)}, need one element for each output channel"
        )
    if transposed:
        ones = (1,) * len(taps)
        steps, holes = _numbers(attributes, "strides", ones), _numbers(attributes, "dilations", ones)
        more = _numbers(attributes, "output_padding", (0,) * len(taps))
        if any(extra >= max(pair) for extra, *pair in zip(more, steps, holes, strict=True)):
            return f"has an output_padding of {list(more)}, which its strides or dilations must exceed"
        return ""
    rooms = () if x is None or 0 in x[2:] else window_rooms(attributes, x[2:], taps)
    least = min((room for room, _ in rooms), default=0)
    return f"has a window that exceeds its padded input, {list(x or ())}, by {-least}" if least < 0 else ""


def window_rooms(attributes: Mapping[Any, Any], sizes: Sequence[Dim], taps: Sequence[Dim]) -> Iterator[tuple[int, int]]:
    """Yield by how far the window of a convolution or pool can move along each known dim, and its stride.

    Below 0 it is longer than its input with the padding. Yields nothing where padding follows from the sizes.
    """
    if len(sizes) != len(taps) or attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return
    ones = (1,) * len(sizes)
    spacings, strides = _numbers(attributes, "dilations", ones), _numbers(attributes, "strides", ones)
    pads = _numbers(attributes, "pads", (0,) * 2 * len(sizes))
    rows = zip(sizes, taps, spacings, strides, pads, pads[len(sizes) :], strict=False)
    for size, count, spacing, stride, before, after in rows:
        if isinstance(size, int) and isinstance(count, int):
            yield size + before + after - ((count - 1) * spacing + 1), stride


def _numbers(attributes: Mapping[Any, Any], name: str, default: Sequence[Dim]) -> Sequence[Any]:
    value = attributes.get(name, tuple(default))
    return value if isinstance(value, tuple) and len(value) == len(default) else default


def _may_equal(dims: Sequence[Dim], others: Sequence[Dim]) -> bool:
    """Return whether two shapes are the same, as far as they are known."""
    if len(dims) != len(others):
        return False
    pairs = zip(dims, others, strict=True)
    return all(one == other for one, other in pairs if isinstance(one, int) and isinstance(other, int))


@builder
def onnx_node(
    graph: Graph,
    op_type: str,
    inputs: Sequence[Value | None],
    attributes: Mapping[str, AttributeValue] | None = None,
    *,
    types: Sequence[ValueType],
    domain: str = "",
    version: int = 21,
    name: str | None = None,
) -> tuple[Value, ...]:
    """Add an ONNX node that has no IR op and return its results; `types` are the types of the results."""
    if not types:
        raise GraphVerifyError(f"onnx node {op_type} needs the type of each result")
    op = OnnxNode(op_type, domain, version, "", dict(attributes or {}), {}, len(inputs), len(types))
    return graph.add_node(op, inputs, name=name or op_type.lower(), types=types)


_NO_OP = "there is no IR op of it yet"
_REFUSED = (
    (
        "GaussianSplatRender GaussianSplatPrepare GaussianSplatRasterize GaussianSplatRenderBackward",
        "it is a graphics kernel, for which ONNX Runtime has no operator",
        "render outside the graph and feed the image in",
    ),
    (
        """
        ReluBackward ActivationBackward FakeQuantizeBackward FakeQuantizeLSQBackwardX FakeQuantizeLSQBackwardScale
        ComplexNormSqBackward MaxPool2dBackward Conv2dBackwardInput Conv2dBackwardWeight SoftmaxCrossEntropyBackward
        AttentionBackwardQuery AttentionBackwardKey AttentionBackwardValue LayerNormBackwardInput LayerNormBackwardGamma
        RmsNormBackwardInput RmsNormBackwardGamma RmsNormBackwardBeta RopeBackward GroupNormBackwardInput
        GroupNormBackwardGamma GroupNormBackwardBeta CumsumBackward GatherBackward ScanBackward ScanBackwardXs
        """,
        "it computes a gradient, and rlx_ort runs inference only",
        "cut the graph before it: set the outputs to the values of the forward pass",
    ),
    (
        "Cholesky TriangularSolve LogDet Svd Qr Eigh",
        "ONNX has no operator for it",
        "use dense_solve where a solution is wanted, or compute it with numpy and feed it in",
    ),
    ("ElementwiseRegion", "only a compiler writes it", "export the model before fusion, in its single ops"),
    ("Det", _NO_OP, "add ONNX's operator Det with onnx_node"),
    ("Lstm", _NO_OP, "add ONNX's operator LSTM with onnx_node"),
    ("Gru", _NO_OP, "add ONNX's operator GRU with onnx_node"),
    ("Rnn", _NO_OP, "add ONNX's operator RNN with onnx_node"),
    ("ConvTranspose3d", _NO_OP, "add ONNX's operator ConvTranspose with onnx_node"),
    (
        "RngNormal RngUniform",
        "ONNX Runtime's generators differ from one provider to the next",
        "draw with numpy and feed the numbers in",
    ),
    ("Mamba2", _NO_OP, "write it with selective_scan or scan"),
    ("LogMel", _NO_OP, "write it with stft, psd, a matmul with the filter bank, and log"),
    ("WelchPeaks", _NO_OP, "write it with stft, psd and mean, and find the peaks with numpy"),
)
REFUSED_KINDS: Mapping[str, tuple[str, str]] = {
    kind: (reason, remedy) for kinds, reason, remedy in _REFUSED for kind in kinds.split()
}
"""Kind -> (why it does not run, the alternative)."""


class Refused(Op):
    """Base of the kinds that do not run."""

    attributes: Mapping[str, str] = field(default_factory=dict)

    reason: ClassVar[str] = ""
    remedy: ClassVar[str] = ""

    def infer(self, inputs: OpTypes) -> tuple[ValueType, ...]:
        """Refuse, with the reason and a remedy."""
        raise GraphVerifyError(f"{self.kind} does not run: {self.reason}; {self.remedy}")

    def describe(self) -> str:
        """Return the kind."""
        return self.kind


def _class_of(kind: str, reason: str, remedy: str) -> type[Refused]:
    names = {
        "kind": kind,
        "reason": reason,
        "remedy": remedy,
        "arity": (0, None),
        "__doc__": f"A kind that does not run: {reason}.",
        "__module__": __name__,
        "__slots__": (),
    }
    return type(kind, (Refused,), names)


_CLASSES = {kind: _class_of(kind, *texts) for kind, texts in REFUSED_KINDS.items()}


def refused_op(kind: str, attributes: Mapping[str, str] | None = None) -> Refused:
    """Return the op of a kind of `REFUSED_KINDS`, for an importer that keeps nodes that cannot run."""
    return _CLASSES[kind](dict(attributes or {}))
