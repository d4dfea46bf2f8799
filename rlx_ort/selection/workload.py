"""What an exported model asks of a device: the work of each node that runs.

Nodes ONNX Runtime folds or fuses are told apart here, because they cost nothing or little. The same work is priced
once per device, however often a graph repeats it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from rlx_ort.converters.to_onnx.exported import ExportedModel
from rlx_ort.converters.to_onnx.outline import Outline
from rlx_ort.converters.to_onnx.records import NodeRecord, Pattern
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.selection.work import OF_GIVEN, Fact, Work, work_of

__all__ = ["DEFAULT_DIM", "Step", "Work", "Workload", "workload_of"]

DEFAULT_DIM = 32
"""The size a dimension without one is taken to have: between one sequence and a batch of long ones."""

_ACTIVATIONS = frozenset({"Relu", "LeakyRelu", "Sigmoid", "Tanh", "Clip", "HardSigmoid", "HardSwish"})
_FUSIBLE = frozenset({*_ACTIVATIONS, "Add", "BatchNormalization", "Transpose"})
_RANDOM = frozenset(
    {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"}
)
_TAGS = {"gemm": "gemm", "conv": "conv", "pointwise": "conv", "depthwise": "conv"}
_FREE = -1
_RESIDENT_BITS = 4  # of the bytes of all weights: few numbers, so that graphs of about one size share prices
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
        results: what is known of each result of each node.
        inputs: bytes of each input.
        outputs: bytes of each output.
        assumed: the inputs' dims that have no size and count as `DEFAULT_DIM`, as unnamed ones between nodes do.
        counts: each different piece of work, and how many nodes do it.
        read: names of the inputs that nodes read.
        written: names of the outputs that nodes write.
    """

    nodes: Sequence[NodeRecord]
    works: Sequence[Work | None]
    results: Sequence[Sequence[Fact]]
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
            name: fact.nbytes
            for node, results in zip(self.nodes, self.results, strict=True)
            for name, fact in zip(node.output_names, results, strict=True)
        }


def workload_of(model: ExportedModel | Outline, dims: Mapping[str, int] | None = None, *, f32: str = "f32") -> Workload:
    """Return the work of a model; a dim without a size in `dims` counts as `DEFAULT_DIM`.

    `f32` is the arithmetic of f32 products and convolutions: `tf32` where the device may round them.
    """
    outline = model if isinstance(model, Outline) else Outline.of_model(model)
    return _Reader(outline, dims or {}, f32).read()


class _Kind:
    """What is known of a kind of nodes: the facts of their types, and the works that were told so far."""

    __slots__ = ("fused", "inputs", "is_free", "may_fuse", "op_type", "outputs", "plain")

    def __init__(self, reader: _Reader, pattern: Pattern) -> None:
        self.op_type = op_type = pattern.like.op_type
        self.is_free = pattern.shape_only or op_type == "Constant"
        self.may_fuse = op_type in _FUSIBLE
        self.outputs = reader.facts(pattern.outputs)
        self.inputs: list[Fact] | None = None  # told once a node of the kind costs something
        self.plain: dict[bool, tuple[int, str]] = {}  # whether the second operand is shared -> its work, and what kind
        self.fused: dict[str, int] = {}  # how it is fused with another -> its work


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
        self.works: list[Work] = []
        self._work_numbers: dict[Work, int] = {}
        self._facts: dict[object, Fact] = {}  # equal types have one
        self._fact_of: dict[int, Fact] = {}  # by identity: the model keeps its types alive
        self._weights: dict[str, int] = {}  # name -> bytes, of what products multiply with

    def read(self) -> Workload:
        """Return the work of the outline."""
        kinds: dict[Pattern, _Kind] = {}
        steps: list[int] = []  # number of each node's work, _FREE for none
        made: list[Sequence[Fact]] = []
        for node in self.outline.nodes:
            kind = kinds.get(node.pattern)
            if kind is None:
                kind = kinds[node.pattern] = _Kind(self, node.pattern)
            steps.append(_FREE if kind.is_free else self._work(node, kind))
            made.append(kind.outputs)
        busy = [node for node, step in zip(self.outline.nodes, steps, strict=True) if step != _FREE]
        read = set(chain.from_iterable([node.input_names for node in busy]))
        written = set(chain.from_iterable([node.output_names for node in busy]))
        self._mark_given(steps)
        counts = self._with_residents(Counter(steps))
        self._mark_first(steps, counts)
        inputs = self._sizes(self.outline.input_types)
        results = self._sizes(self.outline.output_types)
        return Workload(
            self.outline.nodes,
            [None if step == _FREE else self.works[step] for step in steps],
            made,
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
            step = 1 << max(total.bit_length() - _RESIDENT_BITS, 0)
            resident = -(-total // step) * step
            self.works = [work._replace(resident=resident) if work.kind == "gemm" else work for work in self.works]
        return counts

    def _mark_given(self, steps: list[int]) -> None:
        """Tell what looks up or reduces a weight or an input from what does so to a result that was just written."""
        if not any(work.like in OF_GIVEN for work in self.works):
            return
        given = self.outline.input_types
        for at, (node, step) in enumerate(zip(self.outline.nodes, steps, strict=True)):
            if step == _FREE:
                continue
            work = self.works[step]
            if work.like in OF_GIVEN and (work.like != "Gather" or node.op_type == "Gather"):
                data = node.input_names[0]
                if data in given or data not in self.run_time:
                    steps[at] = self._number_work(work._replace(like=OF_GIVEN[work.like]))

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

    def _sizes(self, types: Mapping[str, ValueType]) -> dict[str, int]:
        return {name: fact.nbytes for name, fact in zip(types, self.facts(types.values()), strict=True)}

    def facts(self, kinds: Iterable[ValueType | None]) -> list[Fact]:
        """Return what pricing needs of types."""
        known = self._fact_of
        return [known.get(id(kind)) or self._new(kind) for kind in kinds]

    def _new(self, kind: ValueType | None) -> Fact:
        """Return the facts of a type that is asked for the first time; another equal one may have been."""
        look = (id(kind.dtype), kind.shape) if type(kind) is TensorType else None
        found = self._facts.get(look)
        if found is None:
            found = self._facts[look] = self._fact(kind)
        self._fact_of[id(kind)] = found
        return found

    def _fact(self, kind: ValueType | None) -> Fact:
        if not isinstance(kind, TensorType):
            return Fact()
        dtype, dims = kind.dtype, kind.shape or ()
        shape = tuple([dim if isinstance(dim, int) else self._size(dim) for dim in dims])
        count = math.prod(shape)
        if dtype is DType.F32:
            return Fact(shape, self.f32, count, 4 * count)
        return Fact(shape, dtype.value, count, 0 if dtype is DType.STRING else dtype.nbytes(count))

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
        inputs = kind.inputs
        if inputs is None:
            inputs = kind.inputs = self.facts(node.pattern.inputs)
        if kind.may_fuse:
            fused = self._fused(node, kind, inputs)
            if fused is not None:
                return fused
        shared = len(names) > 1 and names[1] not in self.run_time
        plain = kind.plain.get(shared)
        if plain is None:
            work = work_of(kind.op_type, inputs, kind.outputs, shared)
            number = self._number_work(work._replace(times=_TRIPS) if node.pattern.body else work)
            plain = kind.plain[shared] = number, work.kind
        number, work_kind = plain
        if work_kind == "op":
            return number
        if work_kind == "gemm" and shared:
            self._weights[names[1]] = inputs[1].nbytes
        if work_kind in _TAGS:
            self.tags[node.output_names[0]] = _TAGS[work_kind]
        elif work_kind == "view":
            self._pass_tag(node)
        return number

    def _number_work(self, work: Work) -> int:
        """Return the number of a piece of work; equal pieces have one."""
        number = self._work_numbers.setdefault(work, len(self.works))
        if number == len(self.works):
            self.works.append(work)
        return number

    def _joined(self, like: str, kind: _Kind) -> int:
        """Return the work of a node that is fused with another."""
        known = kind.fused.get(like)
        if known is None:
            out = kind.outputs[0]
            work = Work("fused", like, (out.elements,), 0.0, 2.0 * out.nbytes, out.dtype)
            known = kind.fused[like] = self._number_work(work)
        return known

    def _folds(self, node: NodeRecord) -> bool:
        """Return whether ONNX Runtime computes a node of known values once, when the session is opened."""
        return not node.pattern.body and node.op_type not in _RANDOM and any(node.input_names)

    def _is_turned(self, node: NodeRecord, inputs: list[Fact], outputs: list[Fact]) -> bool:
        """Return whether a transpose only swaps the last two axes for one product, with which it may be fused."""
        name = node.output_names[0]
        if self.uses[name] != 1 or self.readers.get(name) != "MatMul":
            return False
        before, after = inputs[0].shape, outputs[0].shape
        return len(before) > 1 and after == (*before[:-2], before[-1], before[-2])

    @cached_property
    def readers(self) -> dict[str, str]:
        """Name of a value -> the operator that reads it last."""
        return {name: node.op_type for node in self.outline.nodes for name in node.input_names}

    def _fused(self, node: NodeRecord, kind: _Kind, inputs: list[Fact]) -> int | None:
        """Return the work of a node that is fused with a product or convolution beside it; None for others."""
        if kind.op_type == "Transpose":
            return self._joined("turned", kind) if self._is_turned(node, inputs, kind.outputs) else None
        for at, name in enumerate(node.input_names[:2]):
            tag = self.tags.get(name)
            if tag and self.uses[name] == 1:
                found = self._pair(node, tag, at, inputs)
                if found is not None:
                    like, self.tags[node.output_names[0]] = found
                    return self._joined(like, kind)
        return None

    def _pair(self, node: NodeRecord, tag: str, at: int, inputs: list[Fact]) -> tuple[str, str] | None:
        """Return the name of a fusion and the tag of its result."""
        op_type = node.op_type
        if op_type in _ACTIVATIONS:
            return ("gemm_act", "") if tag.startswith("gemm") else ("conv_act", "")
        if op_type == "BatchNormalization":
            return ("folded", "conv") if tag == "conv" else None
        if tag == "conv":
            return "conv_add", "conv+add"
        if tag != "gemm":
            return None
        other, product = inputs[1 - at], inputs[at]
        is_row = product.shape != () and other.elements == product.shape[-1]
        return ("bias", "gemm+bias") if is_row and node.input_names[1 - at] not in self.run_time else None

    def _pass_tag(self, node: NodeRecord) -> None:
        """A view between a product and its bias does not stand in the way of their fusion."""
        if node.input_names and node.output_names and self.uses[node.input_names[0]] == 1:
            tag = self.tags.get(node.input_names[0], "")
            if tag.startswith("gemm"):
                self.tags[node.output_names[0]] = tag
