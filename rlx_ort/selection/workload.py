"""What an exported model asks of a device: the work of each node that runs.

Nodes ONNX Runtime folds or fuses are told apart here, because they cost nothing or little. The same work is priced
once per device, however often a graph repeats it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rlx_ort.converters.to_onnx.exported import ExportedModel, ExportedNode
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.selection.work import Fact, Work, work_of

__all__ = ["DEFAULT_DIM", "Step", "Work", "Workload", "workload_of"]

DEFAULT_DIM = 32
"""The size a dimension without one is taken to have: between one sequence and a batch of long ones."""

_ACTIVATIONS = frozenset({"Relu", "LeakyRelu", "Sigmoid", "Tanh", "Clip", "HardSigmoid", "HardSwish"})
_FUSIBLE = frozenset({*_ACTIVATIONS, "Add", "BatchNormalization"})
_RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"}
)
_TAGS = {"gemm": "gemm", "conv": "conv", "pointwise": "conv", "depthwise": "conv"}
_TRIPS = 8  # how often the body of a loop of unknown length is taken to run


class Step(NamedTuple):
    """A node and its work; None for a node that costs nothing."""

    node: ExportedNode
    work: Work | None


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything a run of a model does.

    Attributes:
        steps: the nodes, in order.
        inputs: bytes of each input.
        outputs: bytes of each output.
        nbytes: value name -> bytes, for values that nodes write.
        assumed: the inputs' dims that have no size and count as `DEFAULT_DIM`, as unnamed ones between nodes do.
        counts: each different piece of work, and how many nodes do it.
        read: names of the inputs that nodes read.
        written: names of the outputs that nodes write.
    """

    steps: tuple[Step, ...]
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    nbytes: Mapping[str, int] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    counts: Mapping[Work, int] = field(default_factory=dict)
    read: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()


def workload_of(model: ExportedModel, dims: Mapping[str, int] | None = None, *, f32: str = "f32") -> Workload:
    """Return the work of a model; a dim without a size in `dims` counts as `DEFAULT_DIM`.

    `f32` is the arithmetic of f32 products and convolutions: `tf32` where the device may round them.
    """
    return _Reader(model, dims or {}, f32).read()


def _mark_first(steps: list[Step], counts: Counter[Work]) -> None:
    """Tell the first product of a run that it is the first."""
    for at, step in enumerate(steps):
        if step.work is not None and step.work.kind == "gemm":
            counts[step.work] -= 1
            if not counts[step.work]:
                del counts[step.work]
            first = step.work._replace(first=True)
            counts[first] += 1
            steps[at] = Step(step.node, first)
            return


class _Reader:
    """Reads a model once. Types have a number each, so that equal nodes are told by comparing a few integers."""

    def __init__(self, model: ExportedModel, dims: Mapping[str, int], f32: str) -> None:
        self.model = model
        self.dims = dims
        self.f32 = f32
        self.assumed: dict[str, None] = {}
        kinds = [kind for kind in model.input_types.values() if isinstance(kind, TensorType)]
        self.given = {dim for kind in kinds for dim in kind.shape or () if isinstance(dim, str)}
        self.run_time = set(model.input_types)  # values that are not known when the session is opened
        self.uses: Counter[str] = Counter(list(model.output_types))
        self.readers: dict[str, str] = {}  # value -> the operator that reads it last
        for node in model.nodes:
            self.run_time.update(node.output_names)
            self.uses.update(node.input_names)
            self.readers.update(dict.fromkeys(node.input_names, node.op_type))
        self.tags: dict[str, str] = {}  # value -> the kind of product or convolution that a node may be fused with
        self.facts: list[Fact] = []
        self._numbers: dict[object, int] = {}
        self._number_of: dict[int, int] = {}  # by identity: the model keeps its types alive
        self._known: dict[tuple[object, ...], Work] = {}
        self._weights: dict[str, int] = {}  # name -> bytes, of what products multiply with

    def read(self) -> Workload:
        steps: list[Step] = []
        nbytes: dict[str, int] = {}
        counts: Counter[Work] = Counter()
        read: set[str] = set()
        written: set[str] = set()
        for node in self.model.nodes:
            outputs = [self.number(kind) for kind in node.outputs]
            work = self._work(node, outputs)
            steps.append(Step(node, work))
            nbytes.update((name, self.facts[at].nbytes) for name, at in zip(node.output_names, outputs, strict=True))
            if work is not None:
                counts[work] += 1
                read.update(node.input_names)
                written.update(node.output_names)
        steps, counts = self._with_residents(steps, counts)
        _mark_first(steps, counts)
        inputs = {name: self.facts[self.number(kind)].nbytes for name, kind in self.model.input_types.items()}
        results = {name: self.facts[self.number(kind)].nbytes for name, kind in self.model.output_types.items()}
        return Workload(
            tuple(steps),
            inputs,
            results,
            nbytes,
            tuple(name for name in self.assumed if name in self.given),
            counts,
            frozenset(read & inputs.keys()),
            frozenset(written & results.keys()),
        )

    def _with_residents(self, steps: list[Step], counts: Counter[Work]) -> tuple[list[Step], Counter[Work]]:
        """Return the steps and counts with what all weights take told to each product."""
        total = sum(self._weights.values())
        if not total:
            return steps, counts
        resident = 1 << (total - 1).bit_length()
        told = {work: work._replace(resident=resident) for work in counts if work.kind == "gemm"}
        if not told:
            return steps, counts
        changed = [Step(step.node, told.get(step.work, step.work)) if step.work is not None else step for step in steps]
        return changed, Counter({told.get(work, work): count for work, count in counts.items()})

    def number(self, kind: ValueType | None) -> int:
        """Return the number of a type; equal types have one, and `facts` has what it stands for."""
        known = self._number_of.get(id(kind))
        if known is None:
            look = (kind.dtype, kind.shape) if type(kind) is TensorType else None
            known = self._numbers.get(look, -1)
            if known < 0:
                known = self._numbers[look] = len(self.facts)
                self.facts.append(self._fact(kind))
            self._number_of[id(kind)] = known
        return known

    def _fact(self, kind: ValueType | None) -> Fact:
        if not isinstance(kind, TensorType):
            return Fact()
        dims = () if kind.shape is None else kind.shape
        shape = tuple(dim if isinstance(dim, int) else self._size(dim) for dim in dims)
        count = math.prod(shape)
        nbytes = 0 if kind.dtype is DType.STRING else kind.dtype.nbytes(count)
        return Fact(shape, self.f32 if kind.dtype is DType.F32 else kind.dtype.value, count, nbytes)

    def _size(self, dim: str | None) -> int:
        if dim is not None and dim in self.dims:
            return self.dims[dim]
        self.assumed[dim or "?"] = None
        return DEFAULT_DIM

    def _work(self, node: ExportedNode, outputs: list[int]) -> Work | None:
        op_type = node.op_type
        if node.shape_only or op_type == "Constant":
            return None
        names = node.input_names
        if self._folds(node):
            self.run_time.difference_update(node.output_names)
            return None
        inputs = [self.number(kind) for kind in node.inputs]
        if op_type == "Transpose" and self._is_turned(node, inputs, outputs):
            out = self.facts[outputs[0]]
            return Work("fused", "turned", (out.elements,), 0.0, 2.0 * out.nbytes, out.dtype)
        if op_type in _FUSIBLE:
            fused = self._fused(node, inputs, outputs)
            if fused is not None:
                return fused
        shared = len(names) > 1 and names[1] not in self.run_time
        key = (op_type, shared, node.body, *inputs, -1, *outputs)
        work = self._known.get(key)
        if work is None:
            work = work_of(op_type, [self.facts[at] for at in inputs], [self.facts[at] for at in outputs], shared)
            self._known[key] = work = work._replace(times=_TRIPS) if node.body else work
        if work.kind == "gemm" and shared:
            self._weights[names[1]] = self.facts[inputs[1]].nbytes
        if work.kind in _TAGS:
            self.tags[node.output_names[0]] = _TAGS[work.kind]
        elif work.kind == "view":
            self._pass_tag(node)
        return work

    def _folds(self, node: ExportedNode) -> bool:
        """Return whether ONNX Runtime computes the node once, when the session is opened."""
        if node.body or node.op_type in _RANDOM or not any(node.input_names):
            return False
        return self.run_time.isdisjoint(node.input_names)

    def _is_turned(self, node: ExportedNode, inputs: list[int], outputs: list[int]) -> bool:
        """Return whether a transpose only swaps the last two axes for one product, with which it may be fused."""
        name = node.output_names[0]
        if self.uses[name] != 1 or self.readers.get(name) != "MatMul":
            return False
        before, after = self.facts[inputs[0]].shape, self.facts[outputs[0]].shape
        return len(before) > 1 and after == (*before[:-2], before[-1], before[-2])

    def _fused(self, node: ExportedNode, inputs: list[int], outputs: list[int]) -> Work | None:
        """Return the work of a node that is fused with the product or convolution before it; None for others."""
        for at, name in enumerate(node.input_names[:2]):
            tag = self.tags.get(name, "")
            if tag and self.uses[name] == 1:
                found = self._pair(node, tag, at, inputs)
                if found is not None:
                    like, self.tags[node.output_names[0]] = found
                    out = self.facts[outputs[0]]
                    return Work("fused", like, (out.elements,), 0.0, 2.0 * out.nbytes, out.dtype)
        return None

    def _pair(self, node: ExportedNode, tag: str, at: int, inputs: list[int]) -> tuple[str, str] | None:
        """Return the name of a fusion and the tag of its result."""
        if node.op_type in _ACTIVATIONS:
            return ("gemm_act", "") if tag.startswith("gemm") else ("conv_act", "")
        if node.op_type == "BatchNormalization":
            return ("folded", "conv") if tag == "conv" else None
        if tag == "conv":
            return "conv_add", "conv+add"
        if tag != "gemm":
            return None
        other, product = self.facts[inputs[1 - at]], self.facts[inputs[at]]
        is_row = product.shape != () and other.elements == product.shape[-1]
        return ("bias", "gemm+bias") if is_row and node.input_names[1 - at] not in self.run_time else None

    def _pass_tag(self, node: ExportedNode) -> None:
        """A view between a product and its bias does not stand in the way of their fusion."""
        if node.input_names and node.output_names and self.uses[node.input_names[0]] == 1:
            tag = self.tags.get(node.input_names[0], "")
            if tag.startswith("gemm"):
                self.tags[node.output_names[0]] = tag
