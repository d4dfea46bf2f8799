"""What an exported model asks of a device: the work of each node that runs.

Nodes ONNX Runtime folds or fuses are told apart here, because they cost nothing or little. The same work is priced
once per device, however often a graph repeats it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from rlx_ort.converters.to_onnx.exported import ExportedModel, ExportedNode
from rlx_ort.converters.to_onnx.outline import Outline
from rlx_ort.converters.to_onnx.records import NodeRecord, Pattern
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
_FREE = -1
_TRIPS = 8  # how often the body of a loop of unknown length is taken to run


class Step(NamedTuple):
    """A node and its work; None for a node that costs nothing."""

    node: NodeRecord
    work: Work | None


@dataclass(frozen=True)
class Workload:
    """Everything a run of a model does.

    Attributes:
        nodes: the nodes, in order.
        works: the work of each node; None for one that costs nothing.
        sizes: the bytes of each result of each node.
        inputs: bytes of each input.
        outputs: bytes of each output.
        assumed: the inputs' dims that have no size and count as `DEFAULT_DIM`, as unnamed ones between nodes do.
        counts: each different piece of work, and how many nodes do it.
        read: names of the inputs that nodes read.
        written: names of the outputs that nodes write.
    """

    nodes: Sequence[NodeRecord]
    works: Sequence[Work | None]
    sizes: Sequence[tuple[int, ...]]
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    assumed: tuple[str, ...] = ()
    counts: Mapping[Work, int] = field(default_factory=dict)
    read: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The nodes with their works."""
        return tuple(map(Step, self.nodes, self.works))

    @cached_property
    def nbytes(self) -> Mapping[str, int]:
        """Value name -> bytes, for values that nodes write."""
        return {
            name: size
            for node, sizes in zip(self.nodes, self.sizes, strict=True)
            for name, size in zip(node.output_names, sizes, strict=True)
        }


def workload_of(model: ExportedModel | Outline, dims: Mapping[str, int] | None = None, *, f32: str = "f32") -> Workload:
    """Return the work of a model; a dim without a size in `dims` counts as `DEFAULT_DIM`.

    `f32` is the arithmetic of f32 products and convolutions: `tf32` where the device may round them.
    """
    outline = model if isinstance(model, Outline) else Outline.of_model(model)
    return _Reader(outline, dims or {}, f32).read()


class _Kind:
    """What is known of a kind of nodes: the numbers of their types, and the works that were told so far."""

    __slots__ = ("inputs", "is_free", "may_fuse", "outputs", "plain", "sizes")

    def __init__(self, reader: _Reader, node: ExportedNode) -> None:
        self.is_free = node.shape_only or node.op_type == "Constant"
        self.may_fuse = node.op_type in _FUSIBLE or node.op_type == "Transpose"
        self.outputs = [reader.number(kind) for kind in node.outputs]
        self.sizes = tuple([reader.facts[at].nbytes for at in self.outputs])
        self.inputs: list[int] | None = None  # numbered once a node of the kind costs something
        self.plain: dict[bool, tuple[int, str]] = {}  # whether the second operand is shared -> its work, and what kind


class _Reader:
    """Reads an outline once. Types and works have a number each; what a kind of nodes has in common is told once."""

    def __init__(self, outline: Outline, dims: Mapping[str, int], f32: str) -> None:
        self.outline = outline
        self.dims = dims
        self.f32 = f32
        self.assumed: dict[str, None] = {}
        kinds = [kind for kind in outline.input_types.values() if isinstance(kind, TensorType)]
        self.given = {dim for kind in kinds for dim in kind.shape or () if isinstance(dim, str)}
        nodes = outline.nodes
        # Values that are not known when the session is opened.
        self.run_time = {*outline.input_types, *chain.from_iterable([node.output_names for node in nodes])}
        self.uses = Counter(list(outline.output_types))
        self.uses.update(chain.from_iterable([node.input_names for node in nodes]))
        self.tags: dict[str, str] = {}  # name -> the kind of product or convolution that a node may be fused with
        self.facts: list[Fact] = []
        self.works: list[Work] = []
        self._work_numbers: dict[Work, int] = {}
        self._numbers: dict[object, int] = {}
        self._number_of: dict[int, int] = {}  # by identity: the model keeps its types alive
        self._weights: dict[str, int] = {}  # name -> bytes, of what products multiply with

    def read(self) -> Workload:
        """Return the work of the outline."""
        kinds: dict[Pattern, _Kind] = {}
        steps: list[int] = []  # number of each node's work, _FREE for none
        sizes: list[tuple[int, ...]] = []
        for node in self.outline.nodes:
            kind = kinds.get(node.pattern)
            if kind is None:
                kind = kinds[node.pattern] = _Kind(self, node.kind)
            steps.append(_FREE if kind.is_free else self._work(node, kind))
            sizes.append(kind.sizes)
        busy = [node for node, step in zip(self.outline.nodes, steps, strict=True) if step != _FREE]
        read = set(chain.from_iterable([node.input_names for node in busy]))
        written = set(chain.from_iterable([node.output_names for node in busy]))
        counts = self._with_residents(Counter(steps))
        self._mark_first(steps, counts)
        inputs = {name: self.facts[self.number(kind)].nbytes for name, kind in self.outline.input_types.items()}
        results = {name: self.facts[self.number(kind)].nbytes for name, kind in self.outline.output_types.items()}
        return Workload(
            self.outline.nodes,
            [None if step == _FREE else self.works[step] for step in steps],
            sizes,
            inputs,
            results,
            tuple(name for name in self.assumed if name in self.given),
            {self.works[number]: count for number, count in counts.items()},
            frozenset(read & inputs.keys()),
            frozenset(written & results.keys()),
        )

    def _with_residents(self, counts: Counter[int]) -> Counter[int]:
        """Tell each product what all weights take, and return the counts without what costs nothing."""
        del counts[_FREE]
        total = sum(self._weights.values())
        if total:
            resident = 1 << (total - 1).bit_length()
            self.works = [work._replace(resident=resident) if work.kind == "gemm" else work for work in self.works]
        return counts

    def _mark_first(self, steps: list[int], counts: Counter[int]) -> None:
        """Tell the first product of a run what it multiplies: an input, or what another node has written."""
        given = set(self.outline.input_types)  # and views of them
        for at, step in enumerate(steps):
            if step == _FREE:
                continue
            node, work = self.outline.nodes[at], self.works[step]
            if work.kind == "view" and given.issuperset(node.input_names[:1]):
                given.update(node.output_names)
            elif work.kind == "gemm":
                counts[step] -= 1
                if not counts[step]:
                    del counts[step]
                steps[at] = len(self.works)
                counts[steps[at]] = 1
                self.works.append(work._replace(first="input" if node.input_names[0] in given else "node"))
                return

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

    def _work(self, node: NodeRecord, kind: _Kind) -> int:
        """Return the number of a node's work, `_FREE` when it costs nothing."""
        names = node.input_names
        if self.run_time.isdisjoint(names) and self._folds(node):
            self.run_time.difference_update(node.output_names)
            return _FREE
        if kind.inputs is None:
            kind.inputs = [self.number(known) for known in node.kind.inputs]
        if kind.may_fuse:
            fused = self._fused(node, kind, kind.inputs)
            if fused is not None:
                return fused
        shared = len(names) > 1 and names[1] not in self.run_time
        if shared not in kind.plain:
            kind.plain[shared] = self._plain(node.kind, kind.inputs, kind.outputs, shared)
        number, work_kind = kind.plain[shared]
        if work_kind == "op":
            return number
        if work_kind == "gemm" and shared:
            self._weights[names[1]] = self.facts[kind.inputs[1]].nbytes
        if work_kind in _TAGS:
            self.tags[node.output_names[0]] = _TAGS[work_kind]
        elif work_kind == "view":
            self._pass_tag(node)
        return number

    def _plain(self, node: ExportedNode, inputs: list[int], outputs: list[int], shared: bool) -> tuple[int, str]:
        """Return the number and the kind of the work of a node that is fused with no other."""
        facts = self.facts
        work = work_of(node.op_type, [facts[at] for at in inputs], [facts[at] for at in outputs], shared)
        return self._number_work(work._replace(times=_TRIPS) if node.body else work), work.kind

    def _number_work(self, work: Work) -> int:
        """Return the number of a piece of work; equal pieces have one."""
        number = self._work_numbers.setdefault(work, len(self.works))
        if number == len(self.works):
            self.works.append(work)
        return number

    def _joined(self, like: str, kind: _Kind) -> int:
        """Return the work of a node that is fused with another."""
        out = self.facts[kind.outputs[0]]
        return self._number_work(Work("fused", like, (out.elements,), 0.0, 2.0 * out.nbytes, out.dtype))

    def _folds(self, node: NodeRecord) -> bool:
        """Return whether ONNX Runtime computes a node of known values once, when the session is opened."""
        return not node.kind.body and node.kind.op_type not in _RANDOM and any(node.input_names)

    def _is_turned(self, node: NodeRecord, inputs: list[int], outputs: list[int]) -> bool:
        """Return whether a transpose only swaps the last two axes for one product, with which it may be fused."""
        name = node.output_names[0]
        if self.uses[name] != 1 or self.readers.get(name) != "MatMul":
            return False
        before, after = self.facts[inputs[0]].shape, self.facts[outputs[0]].shape
        return len(before) > 1 and after == (*before[:-2], before[-1], before[-2])

    @cached_property
    def readers(self) -> dict[str, str]:
        """Name of a value -> the operator that reads it last."""
        return {name: node.op_type for node in self.outline.nodes for name in node.input_names}

    def _fused(self, node: NodeRecord, kind: _Kind, inputs: list[int]) -> int | None:
        """Return the work of a node that is fused with a product or convolution beside it; None for others."""
        if node.op_type == "Transpose":
            return self._joined("turned", kind) if self._is_turned(node, inputs, kind.outputs) else None
        for at, name in enumerate(node.input_names[:2]):
            tag = self.tags.get(name, "")
            if tag and self.uses[name] == 1:
                found = self._pair(node, tag, at, inputs)
                if found is not None:
                    like, self.tags[node.output_names[0]] = found
                    return self._joined(like, kind)
        return None

    def _pair(self, node: NodeRecord, tag: str, at: int, inputs: list[int]) -> tuple[str, str] | None:
        """Return the name of a fusion and the tag of its result."""
        op_type = node.kind.op_type
        if op_type in _ACTIVATIONS:
            return ("gemm_act", "") if tag.startswith("gemm") else ("conv_act", "")
        if op_type == "BatchNormalization":
            return ("folded", "conv") if tag == "conv" else None
        if tag == "conv":
            return "conv_add", "conv+add"
        if tag != "gemm":
            return None
        other, product = self.facts[inputs[1 - at]], self.facts[inputs[at]]
        is_row = product.shape != () and other.elements == product.shape[-1]
        return ("bias", "gemm+bias") if is_row and node.input_names[1 - at] not in self.run_time else None

    def _pass_tag(self, node: NodeRecord) -> None:
        """A view between a product and its bias does not stand in the way of their fusion."""
        if node.input_names and node.output_names and self.uses[node.input_names[0]] == 1:
            tag = self.tags.get(node.input_names[0], "")
            if tag.startswith("gemm"):
                self.tags[node.output_names[0]] = tag
