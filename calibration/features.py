"""The work of each node of an exported model: the kernel, its sizes, and how much it computes and moves.

Nodes that ONNX Runtime folds away cost nothing. Those that it fuses count as nodes of their own: to measure what they
add to a product did not make the kept choices better (NOTES.md).
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, takewhile
from typing import Any, NamedTuple

from rlx_ort.converters.to_onnx.exported import ExportedModel, ExportedNode, Outline
from rlx_ort.converters.to_onnx.model import ModelNode
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData, key_of_value
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.providers.engine.recordable import unrecordable

DEFAULT_DIM = 32
"""The size a dimension without one is taken to have: between one sequence and a batch of long ones."""

_TRIPS = 8  # how often the body of a loop of unknown length is taken to run
_SMALL_CONSTANT = 16  # elements of a constant input that count as a part of the operator, such as axes


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_VIEWS = _words("Reshape Squeeze Unsqueeze Flatten Identity Optional OptionalGetElement Shape Size")
_SPARSE_READS = _words("Gather GatherElements GatherND Slice Split OneHot GatherBlockQuantized")
RANDOM_OPS = _words("RandomNormal RandomUniform RandomNormalLike RandomUniformLike Bernoulli Multinomial")
_PRODUCTS = _words(
    "MatMul Gemm FusedMatMul FusedGemm TransposeMatMul MatMulInteger QLinearMatMul QGemm MatMulNBits MatMulBnb4 "
    "DynamicQuantizeMatMul MatMulIntegerToFloat"
)
_CONVOLUTIONS = _words("Conv ConvTranspose FusedConv ConvInteger QLinearConv NhwcConv NhwcFusedConv")
_ATTENTIONS = _words("Attention MultiHeadAttention GroupQueryAttention")
_RECURRENT = _words("LSTM GRU RNN DynamicQuantizeLSTM")

_SAME: Mapping[str, str] = {
    **dict.fromkeys(_words("Gemm FusedMatMul FusedGemm TransposeMatMul"), "MatMul"),
    **dict.fromkeys(_words("FusedConv NhwcConv NhwcFusedConv"), "Conv"),
    **dict.fromkeys(_words("MultiHeadAttention GroupQueryAttention"), "Attention"),
    **dict.fromkeys(_words("Sub And Or Xor"), "Add"),
    **dict.fromkeys(_words("Slice Split Expand Tile Pad"), "Concat"),
    **dict.fromkeys(_words("GRU RNN"), "LSTM"),
    "LogSoftmax": "Softmax",
    "ReduceSum": "ReduceMean",
    "GlobalAveragePool": "ReduceMean",
    "SimplifiedLayerNormalization": "LayerNormalization",
    "RMSNormalization": "LayerNormalization",
    "SkipLayerNormalization": "LayerNormalization",
}
"""Operator -> another one whose kernels do the same work, so that one measurement stands for both."""

TABLE = _words(
    "Add Tanh Softmax LayerNormalization Gather TransposeRows ReduceMean Concat AddRow Transpose Relu Mul Sigmoid Gelu "
    "Erf Exp Sin Pow Where Cast Div Sqrt ReduceRows"
)
"""Operators priced by their elements that every full calibration measures."""

BY_WIDTH = _words("Softmax LayerNormalization ReduceMean Gather Concat ReduceRows AddRow TransposeRows")
"""Those whose time depends on the length of a row as well."""


class Kernel(NamedTuple):
    """One piece of work. Equal pieces cost the same.

    `name` is the row of the table that prices the work. It determines the meaning of the sizes: `MatMul` (m, k, n);
    `BatchedMatMul` (batch, m, k, n); `Conv3x3`, `Conv1x1` (pixels, channels); `DepthwiseConv` (elements); `Attention`
    (batch * heads, queries, keys, head_dim); `LSTM` (steps, batch, inputs, hidden, directions); an operator of the
    table (elements), or (elements, width of a row); `View` (). Any other operator is named with a digest of what its
    time may depend on besides its elements. Elements are counted in units of four bytes.

    `nbytes` counts bytes read and written, `times` the repetitions. `guessed` is true where a size depends on data and
    counts as `DEFAULT_DIM`.
    """

    name: str
    size: tuple[int, ...] = ()
    dtype: str = "f32"
    flops: float = 0.0
    nbytes: float = 0.0
    times: int = 1
    op_type: str = ""
    guessed: bool = False


class Fact(NamedTuple):
    """The facts of a type that pricing needs: its sizes, its element type, and its bytes."""

    shape: tuple[int, ...] = ()
    dtype: str = "f32"
    elements: int = 0
    nbytes: int = 0
    guessed: bool = False


_NOTHING = Fact()


def kernel_of(
    op_type: str, inputs: Sequence[Fact], outputs: Sequence[Fact], *, shared: bool, variant: str = ""
) -> Kernel:
    """Return the kernel of a node.

    `shared` means that every batch multiplies with the same second operand. `variant` is a digest that distinguishes
    kernels of one operator outside the table.
    """
    out = outputs[0] if outputs else _NOTHING
    if op_type in _VIEWS:
        return Kernel("View", (), out.dtype, op_type=op_type)
    moved = float(sum([fact.nbytes for fact in (*inputs, *outputs)]))
    shapes = [fact.shape for fact in inputs]
    kernel: tuple[str, tuple[int, ...], float] | None = None
    if op_type in _PRODUCTS and shapes and shapes[0] and out.shape:
        kernel = _product(op_type, shapes, out, shared)
    elif op_type in _CONVOLUTIONS and len(shapes) > 1 and len(shapes[1]) > 2 and len(out.shape) > 2:
        kernel = _conv(op_type, shapes, out)
    elif op_type in _ATTENTIONS and shapes and len(shapes[0]) >= 3:
        kernel = _attention(shapes)
    elif op_type in _RECURRENT and len(shapes) > 2 and len(shapes[0]) == 3 and len(shapes[2]) == 3:
        kernel = _recurrent(op_type, shapes)
    if kernel is not None:
        name, size, flops = kernel
        if op_type not in ("MatMul", "Conv", "Attention", "LSTM") and op_type not in _SAME:
            name, size = f"{op_type}{variant}", (round(flops),)
        return Kernel(name, size, out.dtype, flops, moved, 1, op_type)
    return _by_elements(op_type, inputs, outputs, moved, variant)


def _product(
    op_type: str, shapes: list[tuple[int, ...]], out: Fact, shared: bool
) -> tuple[str, tuple[int, ...], float]:
    n = out.shape[-1]
    batch = 1 if shared or len(shapes) < 2 or len(shapes[1]) <= 2 else math.prod(out.shape[:-2])
    rows = max(out.elements // max(n * batch, 1), 1)
    left = math.prod(shapes[0])
    if op_type in ("Gemm", "FusedGemm"):
        k = max(left // max(out.shape[0], 1), 1)
    else:
        # The left operand may have fewer batches than the result, so its own rows give its depth.
        own_rows = math.prod(shapes[0][:-2]) * rows if batch > 1 else rows
        k = max(left // max(own_rows, 1), 1)
    flops = 2.0 * batch * rows * k * n
    return ("BatchedMatMul", (batch, rows, k, n), flops) if batch > 1 else ("MatMul", (rows, k, n), flops)


def _conv(op_type: str, shapes: list[tuple[int, ...]], out: Fact) -> tuple[str, tuple[int, ...], float]:
    grid = shapes[0] if op_type == "ConvTranspose" else out.shape
    pixels = max(grid[0] * math.prod(grid[2:]), 1)
    each = math.prod(shapes[1])  # multiplications a pixel
    flops = 2.0 * pixels * each
    if shapes[1][1] == 1 and shapes[0][1] > 1:
        return "DepthwiseConv", (max(round(pixels * each / 9), 1),), flops
    if math.prod(shapes[1][2:]) == 1:
        return "Conv1x1", (pixels, max(round(math.sqrt(each)), 1)), flops
    return "Conv3x3", (pixels, max(round(math.sqrt(each / 9)), 1)), flops


def _attention(shapes: list[tuple[int, ...]]) -> tuple[str, tuple[int, ...], float]:
    query = shapes[0]
    key = shapes[1] if len(shapes) > 1 and len(shapes[1]) >= 3 else query
    past = next((shape[2] for shape in shapes[3:] if len(shape) == 4), 0)
    if len(query) == 4:
        batch, heads, queries, depth = query
    else:
        batch, queries, width = query
        depth = 64 if width % 64 == 0 else width
        heads = max(width // depth, 1)
    keys = (key[2] if len(key) == 4 else key[1]) + past
    return "Attention", (batch * heads, queries, keys, depth), 4.0 * batch * heads * queries * keys * depth


def _recurrent(op_type: str, shapes: list[tuple[int, ...]]) -> tuple[str, tuple[int, ...], float]:
    steps, batch, width = shapes[0]
    directions, gates, hidden = shapes[2]  # the recurrent weights, all gates in one
    flops = 2.0 * steps * batch * directions * gates * (width + hidden)
    like_lstm = max(gates // 4, 1)  # a GRU has three gates, and takes the time of a narrower LSTM
    return _SAME.get(op_type, op_type), (steps, batch, width, like_lstm, directions), flops


def _by_elements(op_type: str, inputs: Sequence[Fact], outputs: Sequence[Fact], moved: float, variant: str) -> Kernel:
    elements = max([fact.elements for fact in outputs], default=0)
    if op_type not in _SPARSE_READS:
        elements = max([elements, *(fact.elements for fact in inputs)])
    out = outputs[0] if outputs else _NOTHING
    name = _SAME.get(op_type, op_type)
    if name == "Transpose" and inputs and len(inputs[0].shape) > 2 and inputs[0].shape[-1:] == out.shape[-1:]:
        name = "TransposeRows"  # whole rows are moved, as attention does with its heads
    elif name in ("Add", "Mul", "Div") and len(inputs) == 2:
        small = min(inputs[0].elements, inputs[1].elements)
        name = "AddRow" if 1 < small < elements else name
    elif name == "ReduceMean" and inputs and _keeps_last(inputs[0].shape, out.shape):
        name = "ReduceRows"
    if name not in TABLE:
        name = f"{op_type}{variant}"
    width = out.nbytes / out.elements if out.elements else 4.0  # bytes of an element
    count = max(round(elements * width / 4), 1)
    size: tuple[int, ...] = (count,)
    if name in BY_WIDTH:
        row = round(_row_length(name, inputs, out) * width / 4)
        size = (count, min(max(row, 1), count))
    return Kernel(name, size, out.dtype, float(elements), moved, 1, op_type)


def _keeps_last(data: tuple[int, ...], out: tuple[int, ...]) -> bool:
    """Return whether a reduction goes over axes before the last one, as far as the shapes show."""
    if len(data) < 2 or not out or out[-1] != data[-1] or math.prod(out) == math.prod(data):
        return False
    return len(out) == len(data) or out != data[: len(out)]


def _row_length(name: str, inputs: Sequence[Fact], out: Fact) -> int:
    """Return the elements that are normalised, reduced or added together, copied in one piece, or kept by a reduction.

    The axis is not known here: normalisations are taken to be over the last one.
    """
    data = inputs[0].shape if inputs else ()
    if not data or not out.elements:
        return 1
    if name in ("Softmax", "LayerNormalization"):
        return data[-1]
    if name == "ReduceMean":
        return max(inputs[0].elements // out.elements, 1)
    if name == "AddRow":
        small = min(inputs, key=lambda fact: fact.elements)
        pairs = list(zip(reversed(small.shape), reversed(out.shape), strict=False))
        repeated = bool(pairs) and pairs[0][0] != pairs[0][1]  # a number for a whole row, as for a channel
        return math.prod(dim for _, dim in takewhile(lambda pair: (pair[0] != pair[1]) == repeated, pairs))
    pairs = list(zip(reversed(data), reversed(out.shape), strict=False))
    kept = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))  # axes that are the same before and after
    whole = kept if name in ("Gather", "ReduceRows", "TransposeRows") else kept + 1
    return math.prod(out.shape[-whole:]) if whole else 1


# --- a whole model


@dataclass(frozen=True)
class Workload:
    """Everything a run of a model does.

    `kernels` has None for a node that costs nothing, and `counts` the number of nodes that need each different kernel.
    `inputs` and `outputs` hold the bytes of each input that nodes read and each output that they write. `assumed` lists
    the dims of inputs that have no size and count as `DEFAULT_DIM`.
    """

    nodes: Sequence[ExportedNode]
    kernels: Sequence[Kernel | None]
    results: Sequence[Sequence[Fact]]
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    assumed: tuple[str, ...] = ()
    counts: Mapping[Kernel, int] = field(default_factory=dict)

    @cached_property
    def host_decides(self) -> bool:
        """Whether a node keeps runs from being recorded, as control flow does."""
        patterns: set[Any] = {node.pattern for node in self.nodes}
        return bool(unrecordable(patterns, {}))

    @cached_property
    def nbytes(self) -> Mapping[str, int]:
        """Value name -> bytes, for values that nodes write."""
        return {
            name: fact.nbytes
            for node, results in zip(self.nodes, self.results, strict=True)
            for name, fact in zip(node.output_names, results, strict=True)
        }


def workload_of(model: ExportedModel | Outline, dims: Mapping[str, int] | None = None) -> Workload:
    """Return the work of a model; a dim without a size in `dims` counts as `DEFAULT_DIM`."""
    outline = model if isinstance(model, Outline) else Outline.of_model(model)
    return _Reader(outline, dims or {}).read()


@dataclass(slots=True)
class _Kind:
    """A kind of nodes: the facts of their types, and their kernels so far."""

    pattern: ModelNode
    is_free: bool
    outputs: list[Fact]
    inputs: list[Fact] | None = None  # found when a node of the kind costs something
    kernels: dict[object, Kernel] = field(default_factory=dict)


class _Reader:
    """Reads an outline once; the facts that a kind of nodes shares are looked up once."""

    def __init__(self, outline: Outline, dims: Mapping[str, int]) -> None:
        self.outline = outline
        self.dims = dims
        self.assumed: dict[str, None] = {}
        kinds = [kind for kind in outline.input_types.values() if isinstance(kind, TensorType)]
        self.given = {dim for kind in kinds for dim in kind.shape or () if isinstance(dim, str)}
        nodes = outline.nodes
        # Values that are not known when the session is opened; what nothing else makes is an input of a loop's body.
        self.run_time = {*outline.input_types, *chain.from_iterable([node.output_names for node in nodes])}
        inside = chain.from_iterable([node.input_names for node in nodes if node.body])
        self.run_time.update(name for name in inside if name and name not in outline.constants)
        self._facts: dict[object, Fact] = {}  # equal types have one
        self._fact_of: dict[int, Fact] = {}  # by identity: the model keeps its types alive

    def read(self) -> Workload:
        """Return the work of the outline."""
        kinds: dict[ModelNode, _Kind] = {}
        kernels: list[Kernel | None] = []
        made: list[Sequence[Fact]] = []
        for node in self.outline.nodes:
            pattern = node.pattern
            kind = kinds.get(pattern)
            if kind is None:
                is_free = pattern.shape_only or pattern.op_type == "Constant"
                kind = kinds[pattern] = _Kind(pattern, is_free, self.facts(pattern.outputs))
            kernels.append(None if kind.is_free else self._kernel(node, kind))
            made.append(kind.outputs)
        busy = [node for node, kernel in zip(self.outline.nodes, kernels, strict=True) if kernel is not None]
        return Workload(
            self.outline.nodes,
            kernels,
            made,
            self._sizes(self.outline.input_types, {name for node in busy for name in node.input_names}),
            self._sizes(self.outline.output_types, {name for node in busy for name in node.output_names}),
            tuple(name for name in self.assumed if name in self.given),
            Counter(filter(None, kernels)),
        )

    def _sizes(self, types: Mapping[str, ValueType], used: set[str]) -> dict[str, int]:
        return {name: fact.nbytes for name, fact in zip(types, self.facts(types.values()), strict=True) if name in used}

    def facts(self, kinds: Iterable[ValueType | None]) -> list[Fact]:
        """Return the facts of types that pricing needs."""
        known = self._fact_of
        return [known.get(id(kind)) or self._new(kind) for kind in kinds]

    def _new(self, kind: ValueType | None) -> Fact:
        """Return the facts of a type that is asked for the first time; another equal one may have been."""
        look = (id(kind.dtype), kind.shape) if type(kind) is TensorType else None
        fact = self._facts.get(look)
        if fact is None:
            fact = self._facts[look] = self._fact(kind)
        self._fact_of[id(kind)] = fact
        return fact

    def _fact(self, kind: ValueType | None) -> Fact:
        if not isinstance(kind, TensorType):
            return Fact()
        dtype, dims = kind.dtype, kind.shape or ()
        shape = tuple([dim if isinstance(dim, int) else self._size(dim) for dim in dims])
        count = math.prod(shape)
        guessed = any(not isinstance(dim, int) and dim not in self.dims and dim not in self.given for dim in dims)
        return Fact(shape, dtype.value, count, 0 if dtype is DType.STRING else dtype.nbytes(count), guessed)

    def _size(self, dim: str | None) -> int:
        if dim is not None and dim in self.dims:
            return self.dims[dim]
        self.assumed[dim or "?"] = None
        return DEFAULT_DIM

    def _kernel(self, node: ExportedNode, kind: _Kind) -> Kernel | None:
        """Return the kernel of a node, or None when it costs nothing."""
        names, op_type = node.input_names, kind.pattern.op_type
        if self.run_time.isdisjoint(names) and any(names) and op_type not in RANDOM_OPS:
            self.run_time.difference_update(node.output_names)  # computed once, when the session is opened
            return None
        inputs = kind.inputs
        if inputs is None:
            inputs = kind.inputs = self.facts(kind.pattern.inputs)
        shared = len(names) > 1 and names[1] not in self.run_time
        small = self._small(names) if op_type not in TABLE else ()
        kernel = kind.kernels.get((shared, small))
        if kernel is None:
            variant = _variant(kind.pattern, shared, small)
            kernel = kernel_of(op_type, inputs, kind.outputs, shared=shared, variant=variant)
            if kind.pattern.loops:
                kernel = kernel._replace(times=_TRIPS)
            if any(fact.guessed for fact in (*inputs, *kind.outputs)):
                kernel = kernel._replace(guessed=True)
            kind.kernels[shared, small] = kernel
        return kernel

    def _small(self, names: Sequence[str]) -> tuple[object, ...]:
        """Return the values of small constant inputs, such as axes, which decide a node's work."""
        constants = self.outline.constants
        sizes = []
        for name in names[1:]:
            data = constants.get(name)
            if isinstance(data, TensorData) and data.num_elements <= _SMALL_CONSTANT:
                sizes.append(tuple(data.numpy().reshape(-1).tolist()))
        return tuple(sizes)


def _variant(pattern: ModelNode, shared: bool, small: object) -> str:
    """Return a digest of all that the time of an operator may depend on besides its sizes."""
    attributes = [
        (name, "body" if attribute.kind.startswith("GRAPH") else key_of_value(attribute.value))
        for name, attribute in sorted(pattern.attributes.items())
    ]
    kinds = [
        (kind.dtype.value, len(kind.shape or ())) if isinstance(kind, TensorType) else None for kind in pattern.inputs
    ]
    text = repr((pattern.domain, pattern.version, attributes, kinds, shared, small))
    return f"-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
