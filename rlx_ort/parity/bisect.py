"""`bisect`: the first node at which two models, or two devices, diverge.

The values inside both models become outputs, as many at a time as memory allows, and each pair of counterparts is
compared. A node is the cause if its inputs agree and an output does not. Between precisions or devices all values
differ a little; there the cause is the node at which the error grows most.

Values are paired by name, else by the structure above them, else by order: a conversion may rename values, insert casts
and quantisation, and replace operators. The structure is compared without casts and quantisation, so most values keep
a counterpart.
"""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import numpy as np
import onnx

from rlx_ort.converters.bundle import BundleWeights, ModelBundle
from rlx_ort.converters.from_onnx.structure import names_read
from rlx_ort.converters.from_onnx.tensors import constant_data, tensor_data
from rlx_ort.converters.protos import copied, infer_proto
from rlx_ort.device import Device
from rlx_ort.errors import ConversionError
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType
from rlx_ort.options.compile_options import CompileOptions, OptimizationLevel
from rlx_ort.parity.compare import renamed_inputs
from rlx_ort.parity.metrics import Difference, Tolerance, difference
from rlx_ort.parity.opening import ModelSource, OrtFormatFile, as_model, open_model

BATCH_BYTES = 256 << 20
"""Estimated bytes of values to hold at a time: those of one side, while the other side runs."""

_UNKNOWN_BYTES = 1 << 20
_LARGEST = 2.0  # relative difference
_NEARLY_EXACT = 1e-6  # rounding of f32 in another order of summation
_MOST_SHOWN = 60
_value = onnx.helper.get_attribute_value
_PASSING = {"Cast", "Identity", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}
"""Operators that keep the meaning of their first input: conversions of precision insert and remove them."""

_DISAGREE = 1 / 3
_MOST_ALIGNED = 5_000  # nodes; difflib's time grows with the square


@dataclass(frozen=True, slots=True)
class Divergence:
    """The node at which two models diverge.

    `node` is the name of the node, or of its first output if it has none, and `output` the value that differs;
    `other_node` and `other_output` are their counterparts. `found` is the difference of the two values, `before` the
    largest relative difference among the values that it is computed from. `causes` lists the differences of the nodes
    in operator, attributes and weights; it is empty if only the arithmetic differs.

    The values of the nodes in `between` have no counterpart, so that one of these nodes may be the cause. `compared`
    counts values. `optimized` is true if the divergence needs the engine's optimisation of the models.
    """

    node: str
    op_type: str
    output: str
    other_node: str
    other_output: str
    found: Difference
    before: float
    causes: tuple[str, ...]
    between: tuple[str, ...]
    compared: int
    optimized: bool = False


def bisect(
    a: ModelSource,
    b: ModelSource,
    inputs: Mapping[str, Any],
    *,
    devices: tuple[Device | str, Device | str] = ("cpu", "cpu"),
    tolerance: Tolerance | None = None,
    options: CompileOptions | None = None,
    batch_bytes: int = BATCH_BYTES,
) -> Divergence | None:
    """Return the first node at which two models diverge on the given inputs, or None if none does.

    Opens one session of each model for every batch of values: first without optimisation, so that each node of the file
    runs, then with that of `options` if no node was found. For nodes in bodies their owner is named. `a` is the
    reference and may be the same model on another device. `inputs` are as in `Comparison`. At most `batch_bytes` of
    values of one side are held.

    Raises:
        ConversionError: a model is in ONNX Runtime's own format, whose nodes are not accessible.
        EngineError: a session or a run failed.
    """
    first = as_model(a)
    second = first if b is a else as_model(b)
    if isinstance(first, OrtFormatFile) or isinstance(second, OrtFormatFile):
        raise ConversionError("a model in ORT format shows no values inside; compare the ONNX model it was made from")
    places = (Device(devices[0]), Device(devices[1]))
    search = _Search(first, second, inputs, places, tolerance or Tolerance(), batch_bytes)
    chosen = options or CompileOptions()
    divergence = search.run(chosen.with_(optimization=OptimizationLevel.OFF))
    if divergence is None and chosen.optimization is not OptimizationLevel.OFF:
        divergence = search.run(chosen, optimized=True)
    return divergence


@dataclass
class _Search:
    """The data that the searches with and without optimisation share."""

    a: ModelBundle
    b: ModelBundle
    inputs: Mapping[str, Any]
    devices: tuple[Device, Device]
    tolerance: InitVar[Tolerance]
    batch_bytes: int

    def __post_init__(self, tolerance: Tolerance) -> None:
        self.pairs = pair_values(self.a.proto.graph, self.b.proto.graph)
        self.above = nearest(self.a.proto.graph, self.pairs)
        loosest = 0.0 if tolerance.cosine is None else math.sqrt(max(0.0, 2 * (1 - tolerance.cosine)))
        self.allowed = loosest if tolerance.relative_l2 is None else tolerance.relative_l2

    def run(self, options: CompileOptions, *, optimized: bool = False) -> Divergence | None:
        """Compare every pair of values and return the divergence."""
        differences: dict[str, Difference] = {}
        noisy = self.devices[0] != self.devices[1]
        for batch in self._batches():
            for name, gap, same_type in self._compared(batch, options):
                differences[name] = gap
                noisy = noisy or not same_type
            if not noisy and (blamed := self._first(differences)) is not None:
                return self._divergence(blamed, differences, optimized)
        blamed = self._steepest(differences) if noisy else None
        return None if blamed is None else self._divergence(blamed, differences, optimized)

    def _first(self, differences: Mapping[str, Difference]) -> str | None:
        """Return the value at which the first difference beyond the tolerance begins, which may be below it."""
        name = next((name for name, gap in differences.items() if gap.size > self.allowed), None)
        clean = min(self.allowed, _NEARLY_EXACT)
        while name is not None:
            sources = [
                source for source in self.above[name][0] if source in differences and differences[source].size > clean
            ]
            if not sources:
                return name
            name = max(sources, key=lambda source: differences[source].size)
        return None

    def _steepest(self, differences: Mapping[str, Difference]) -> str | None:
        """Return the value at which the error grows most, among those beyond the tolerance."""
        floor = max(self.allowed / 10, _NEARLY_EXACT)

        def growth(name: str) -> float:
            return min(differences[name].size, _LARGEST) / max(self._before(name, differences), floor)

        differing = [name for name, gap in differences.items() if gap.size > self.allowed]
        return max(differing, key=growth, default=None)

    def _before(self, name: str, differences: Mapping[str, Difference]) -> float:
        sizes = [min(differences[source].size, _LARGEST) for source in self.above[name][0] if source in differences]
        return max(sizes, default=0.0)

    def _divergence(self, name: str, differences: Mapping[str, Difference], optimized: bool) -> Divergence:
        other = self.pairs[name]
        mine, theirs = _producer(self.a.proto.graph, name), _producer(self.b.proto.graph, other)
        return Divergence(
            node=_label(mine),
            op_type=mine.op_type,
            output=name,
            other_node=_label(theirs),
            other_output=other,
            found=differences[name],
            before=self._before(name, differences),
            causes=() if self.a is self.b else _causes(self.a, mine, self.b, theirs),
            between=self.above[name][1],
            compared=len(differences),
            optimized=optimized,
        )

    def _batches(self) -> Iterator[list[str]]:
        """Yield paired values in order, in batches whose estimated bytes stay below the limit."""
        sizes = _estimated_bytes(self.a, self.inputs)
        batch: list[str] = []
        total = 0
        for name in self.pairs:
            size = sizes.get(name, _UNKNOWN_BYTES)
            if batch and total + size > self.batch_bytes:
                yield batch
                batch, total = [], 0
            batch.append(name)
            total += size
        if batch:
            yield batch

    def _compared(self, batch: Sequence[str], options: CompileOptions) -> Iterator[tuple[str, Difference, bool]]:
        """Yield (value, difference, whether both have one dtype) for a batch, except for lists and maps."""
        others = [self.pairs[name] for name in batch]
        with open_model(self.a, self.devices[0], options, extra_outputs=batch) as opened:
            left = opened.run(self.inputs, batch)
        with open_model(self.b, self.devices[1], options, extra_outputs=others) as opened:
            right = opened.run(renamed_inputs(opened, self.inputs, self.b.origin), others)
        for name, x, y in zip(batch, left, right, strict=True):
            if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
                yield name, difference(x, y), x.dtype == y.dtype


def _producer(graph: onnx.GraphProto, name: str) -> onnx.NodeProto:
    """Return the node of the main graph that computes a value."""
    nodes: Iterator[onnx.NodeProto] = (node for node in graph.node if name in node.output)
    return next(nodes)


def _label(node: onnx.NodeProto) -> str:
    return node.name or next(filter(None, node.output), "")


def _estimated_bytes(model: ModelBundle, inputs: Mapping[str, Any]) -> dict[str, int]:
    """Return value -> bytes, for values whose shape ONNX infers from the shapes of the inputs."""
    proto = copied(model.proto)
    for value in proto.graph.input:
        if value.name in inputs:
            dims = value.type.tensor_type.shape.dim
            for dim, size in zip(dims, np.shape(inputs[value.name]), strict=False):
                dim.dim_value = size
    del proto.graph.value_info[:]  # with the old symbols
    sizes = {}
    for name, kind in infer_proto(proto).items():
        if isinstance(kind, TensorType) and kind.shape is not None and (count := kind.shape.num_elements) is not None:
            sizes[name] = kind.dtype.nbytes(count)
    return sizes


def _causes(a: ModelBundle, mine: onnx.NodeProto, b: ModelBundle, theirs: onnx.NodeProto) -> tuple[str, ...]:
    """Return the differences of two nodes, each as a sentence; reads the weights of both."""
    if (mine.domain, mine.op_type) != (theirs.domain, theirs.op_type):
        return (f"the operator is {mine.op_type} in one and {theirs.op_type} in the other",)
    return (*_attributes(mine, theirs), *_weights(a, mine, b, theirs))


def _attributes(mine: onnx.NodeProto, theirs: onnx.NodeProto) -> Iterator[str]:
    left, right = ({attribute.name: attribute for attribute in node.attribute} for node in (mine, theirs))
    known = {}  # from the newest schema, since defaults hardly ever change
    if onnx.defs.has(mine.op_type, mine.domain):
        known = onnx.defs.get_schema(mine.op_type, domain=mine.domain).attributes
    defaults = {name: entry.default_value for name, entry in known.items() if entry.default_value.type}
    for name in sorted(left.keys() | right.keys()):
        one, other = left.get(name, defaults.get(name)), right.get(name, defaults.get(name))
        if one is None or other is None or _value(one) != _value(other):
            yield f"attribute {name!r} is {_shown(one)} in one and {_shown(other)} in the other"


def _shown(attribute: onnx.AttributeProto | None) -> str:
    if attribute is None:
        return "not given"
    if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS, onnx.AttributeProto.TENSOR):
        return "another value"
    text = str(_value(attribute))
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _weights(a: ModelBundle, mine: onnx.NodeProto, b: ModelBundle, theirs: onnx.NodeProto) -> Iterator[str]:
    left, right = _constants(a), _constants(b)
    for one, other in zip(mine.input, theirs.input, strict=False):
        if one not in left or other not in right:
            continue
        x, y = left[one].numpy(), right[other].numpy()
        if x.shape != y.shape:
            yield f"weight {one!r} has the shape {list(x.shape)} in one and {list(y.shape)} in the other"
        elif not np.array_equal(x, y):
            count = int(np.count_nonzero(x != y))
            gap = difference(x, y).max_abs
            yield f"weight {one!r} differs in {count} of {x.size} elements, by {gap:.3g} at most"
    if len(mine.input) != len(theirs.input):
        yield f"it has {len(mine.input)} inputs in one and {len(theirs.input)} in the other"


def _constants(model: ModelBundle) -> Mapping[str, TensorData]:
    """Return name -> data of the weights and Constant nodes; mapped where the model has it so."""
    files = BundleWeights(model.weights)
    constants = {tensor.name: tensor_data(tensor, files) for tensor in model.proto.graph.initializer}
    for node in model.proto.graph.node:
        for item in node.attribute if node.op_type == "Constant" else ():
            if (data := constant_data(item, files)) is not None:
                constants[node.output[0]] = data
    return constants


def pair_values(a: onnx.GraphProto, b: onnx.GraphProto) -> dict[str, str]:
    """Return the values of the main graph of `a`, in its order, that have a counterpart in `b`.

    Names are trusted if at least two thirds of the equal names belong to equal operators: quantising changes a few. Two
    exports that number their values have equal names without meaning, and are paired by structure.
    """
    ops_a, ops_b = dict(_values(a)), dict(_values(b))
    common = [name for name in ops_a if name in ops_b]
    agree = [name for name in common if ops_a[name] == ops_b[name]]
    trusted = len(agree) >= (1 - _DISAGREE) * len(common)
    pairs = {name: name for name in (common if trusted else ())}
    taken = set(pairs.values())
    for left, right in (*_by_structure(a, b), *_by_order(list(ops_a.items()), list(ops_b.items()))):
        if left not in pairs and right not in taken:
            pairs[left] = right
            taken.add(right)
    return {name: pairs[name] for name in ops_a if name in pairs}


def _values(graph: onnx.GraphProto) -> Iterator[tuple[str, str]]:
    """Yield (value, operator and output index that compute it) in order."""
    for node in graph.node:
        for index, name in enumerate(node.output):
            if name and node.op_type != "Constant":
                yield name, f"{node.domain}.{node.op_type}.{index}"


def _by_structure(a: onnx.GraphProto, b: onnx.GraphProto) -> Iterator[tuple[str, str]]:
    """Yield pairs of values computed by the same operators from the same inputs, those of one structure in order."""
    known: dict[object, int] = {}
    groups: tuple[dict[int, list[str]], dict[int, list[str]]] = (defaultdict(list), defaultdict(list))
    for graph, group in zip((a, b), groups, strict=True):
        for name, key in _structure(graph, known).items():
            group[key].append(name)
    for key, names in groups[0].items():
        others = groups[1].get(key, [])
        if len(names) == len(others):  # with another number of members, the order identifies none of them
            yield from zip(names, others, strict=True)


def _structure(graph: onnx.GraphProto, known: dict[object, int]) -> dict[str, int]:
    """Return value -> number of its structure; equal numbers mean equal operators above it, whatever their attributes.

    Outputs of passing operators are not listed, since they have the number of their input.
    """
    numbers: dict[str, int] = {}
    weights = {tensor.name for tensor in graph.initializer}
    for index, value in enumerate(value for value in graph.input if value.name not in weights):
        numbers[value.name] = known.setdefault(("input", index), len(known))
    listed: dict[str, int] = {}
    for node in graph.node:
        if node.op_type == "Constant":
            continue
        if node.op_type in _PASSING and node.input and node.input[0] in numbers:
            numbers[node.output[0]] = numbers[node.input[0]]
            continue
        # weights are ignored: they may be merged, split, or packed together with their scales
        inputs = tuple(numbers[name] for name in node.input if name in numbers)
        for index, name in enumerate(node.output):
            if name:
                key = (node.op_type, index, inputs)
                numbers[name] = listed[name] = known.setdefault(key, len(known))
    return listed


def _by_order(a: Sequence[tuple[str, str]], b: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the values of operators that occur in the same order in both."""
    left = [row for row in a if row[1].split(".")[-2] not in _PASSING]
    right = [row for row in b if row[1].split(".")[-2] not in _PASSING]
    ops_a, ops_b = [op for _, op in left], [op for _, op in right]
    if ops_a == ops_b:
        yield from zip((name for name, _ in left), (name for name, _ in right), strict=True)
    elif max(len(ops_a), len(ops_b)) <= _MOST_ALIGNED:
        for start_a, start_b, size in difflib.SequenceMatcher(None, ops_a, ops_b, autojunk=False).get_matching_blocks():
            for step in range(size):
                yield left[start_a + step][0], right[start_b + step][0]


def nearest(graph: onnx.GraphProto, paired: Mapping[str, str]) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return paired value -> (the paired values it is computed from, the unpaired nodes on the way), by name."""
    above: dict[str, tuple[frozenset[str], frozenset[str]]] = {}
    paths: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    for node in graph.node:
        sources: set[str] = set()
        between: set[str] = set()
        for name in names_read(node):
            if name in paired:
                sources.add(name)
            elif name in above:
                sources |= above[name][0]
                between |= above[name][1]
        for name in node.output:
            if name in paired:
                paths[name] = (tuple(sorted(sources)), tuple(sorted(between)))
            elif name and node.op_type != "Constant":
                above[name] = (frozenset(sources), frozenset(between | {node.name or name}))
    return paths
