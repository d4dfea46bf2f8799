"""The cache of a decoder and the meaning of its other inputs, read from its exported graph.

A decoder takes tokens and the keys and values of the tokens before them, and returns logits and the keys and values
with the new ones. What each input holds is found from the operators that read it, or else from its name, if that is one
that Optimum or onnxruntime-genai uses.
"""

from __future__ import annotations

import enum
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlx_ort.errors import InputError
from rlx_ort.ir.ops.norm import Reduce
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.types import Shape, TensorType, ValueType

if TYPE_CHECKING:
    from rlx_ort.converters.to_onnx.exported import ExportedModel, ExportedNode


class Role(enum.Enum):
    """The role of an input of a decoder at each step, for all sequences alike."""

    TOKENS = "the tokens"
    MASK = "1 for each token up to now"
    POSITIONS = "the position of each new token"
    PAST_LENGTH = "the number of tokens before"
    LAST_POSITION = "the number of tokens up to now, less one"
    TOTAL_LENGTH = "the number of tokens up to now"


@dataclass(frozen=True)
class CachePair:
    """An input with the keys or values of the tokens before, and the output that has the new ones as well.

    `in_place` is true if the node that makes the output is the only reader of the input, and leaves the tokens before
    where they are: the two may then be the same memory, of the longest length.
    """

    past: str
    present: str
    type: TensorType
    in_place: bool

    @property
    def length_axis(self) -> int:
        """The axis of the tokens: the first open dim after the batch, else the last but one."""
        dims = list(self.type.shape or ())
        return next((axis for axis, dim in enumerate(dims) if axis and not isinstance(dim, int)), len(dims) - 2)

    def shape(self, batch: int, length: int) -> tuple[int, ...]:
        """Return the shape with room for so many tokens; a length that the graph fixes may be longer.

        Raises:
            InputError: another dim is open, or the graph fixes another batch or a shorter length.
        """
        open_dims = {0: batch, self.length_axis: length}
        dims = list(self.type.shape or ())
        sizes = [dim if isinstance(dim, int) else open_dims.get(axis, 0) for axis, dim in enumerate(dims)]
        if len(dims) < 3 or sizes[0] != batch or sizes[self.length_axis] < length or 0 in {*sizes} - {length}:
            raise InputError(
                f"the cache input {self.past!r} is {self.type}; it cannot hold {length} tokens of {batch} sequences"
            )
        return tuple(sizes)


@dataclass(frozen=True)
class DecoderInterface:
    """The inputs and outputs of a decoder.

    Attributes:
        roles: input name -> its role.
        logits: the output that the next token is chosen from, `(batch, tokens, vocabulary)` or `(batch, vocabulary)`.
        cache: the keys and values, layer by layer.
        length_of_mask_is_free: whether a mask longer than the tokens, with zeros behind them, should give the same
            results, as its length reaches nothing but the attention's bound.
        longest: the number of positions that its tables of rotations have; None if it has none in its attentions.
        steps_in_batches: whether several sequences take tokens behind others one by one only, as with
            GroupQueryAttention.
    """

    roles: Mapping[str, Role]
    logits: str
    cache: tuple[CachePair, ...]
    length_of_mask_is_free: bool
    longest: int | None = None
    steps_in_batches: bool = False

    @property
    def in_place(self) -> bool:
        """Whether the whole cache may be written in place."""
        return bool(self.cache) and all(pair.in_place for pair in self.cache)

    def cache_bytes(self, max_length: int, batch: int = 1) -> int:
        """Return the bytes of keys and values of `max_length` tokens, before anything is allocated.

        A cache that is not written in place needs as much again during a step.

        Raises:
            InputError: the decoder takes no such batch, or not so many tokens.
        """
        if self.longest is not None and max_length > self.longest:
            raise InputError(f"max_length is {max_length}; the decoder has rotations for {self.longest} positions")
        return sum(math.prod(pair.shape(batch, max_length)) * pair.type.dtype.numpy.itemsize for pair in self.cache)

    @classmethod
    def of(
        cls, exported: ExportedModel, inputs: Mapping[str, ValueType], cache: Mapping[str, str] | None = None
    ) -> DecoderInterface:
        """Return the interface of an exported decoder.

        Args:
            exported: the model.
            inputs: name -> type of those that a run is fed.
            cache: maps a cache input to the output with its new value; it goes before detected roles.

        Raises:
            InputError: an input is not known, or there is no cache, no tokens or no logits.
        """
        readers = _Readers(exported)
        pairs = _pairs(exported, inputs, readers, dict(cache or {}))
        pasts, presents = {pair.past for pair in pairs}, {pair.present for pair in pairs}
        roles = {name: _role(name, kind, readers) for name, kind in inputs.items() if name not in pasts}
        unknown = [name for name, role in roles.items() if role is None]
        if unknown:
            raise InputError(
                f"a decode loop does not know what to feed to {', '.join(map(repr, unknown))}: it fills tokens, "
                "attention_mask, position_ids, lengths, and caches named past... with outputs named present...; name "
                "other caches with cache={input: output}"
            )
        known = {name: role for name, role in roles.items() if role is not None}
        floats = [
            name
            for name, kind in exported.output_types.items()
            if name not in presents and isinstance(kind, TensorType) and kind.dtype.is_float
        ]
        logits = "logits" if "logits" in floats else floats[0] if len(floats) == 1 else ""
        if not pairs or not logits or Role.TOKENS not in known.values():
            missing = "cache" if not pairs else "output named logits" if not logits else "input of tokens (input_ids)"
            raise InputError(
                f"{exported.model.graph.name!r} is not a decoder that can run token by token: it has no {missing}; its "
                f"inputs are {', '.join(inputs)}, its outputs {', '.join(exported.output_types)}"
            )
        masks = [name for name, role in known.items() if role is Role.MASK]
        only_bounds = all(readers.only_bounds(mask) for mask in masks)
        has_gqa = any(node.op_type == _GQA for node in exported.nodes)
        return cls(known, logits, pairs, only_bounds, _longest(exported), steps_in_batches=has_gqa)


_GQA = "GroupQueryAttention"
_SCATTER = "TensorScatter"
_WRITERS = {_GQA: ((3, 1), (4, 2)), _SCATTER: ((0, 0),)}
"""Operator -> (input, output) of caches that it writes one after the other to the same memory.

GroupQueryAttention: with past and present in one buffer, it writes the new keys and values behind the old ones
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md). TensorScatter of opset 24 copies its
input and overwrites positions of the copy; ONNX's text of it says that this may be done in place.
"""
_LENGTHS = {
    (_GQA, 5): Role.LAST_POSITION,
    (_GQA, 6): Role.TOTAL_LENGTH,
    (_SCATTER, 2): Role.PAST_LENGTH,
    ("Attention", 6): Role.TOTAL_LENGTH,
}
"""(operator, input) -> its role."""
_PASSED_ON = frozenset(["Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze"])
_NAMED = (
    (re.compile(r"^(decoder_)?(input_)?(ids|tokens?)$"), Role.TOKENS),
    (re.compile(r"attention_mask$"), Role.MASK),
    (re.compile(r"position_ids$|^positions?$"), Role.POSITIONS),
    (re.compile(r"^past_(seq_)?len(gth)?$"), Role.PAST_LENGTH),
)


class _Readers:
    """Which nodes read a value, at the top level of a model."""

    def __init__(self, exported: ExportedModel) -> None:
        self._readers: dict[str, list[tuple[ExportedNode, int]]] = defaultdict(list)
        self._sums: dict[int, list[str]] = defaultdict(list)  # id of a sum of the user's -> its nodes' outputs
        for node in exported.nodes:
            for place, name in enumerate(node.input_names):
                self._readers[name].append((node, place))
            if _is_sum(node):
                self._sums[id(node.source)].extend(node.output_names)

    def of(self, name: str) -> list[tuple[ExportedNode, int]]:
        """Return the nodes that read a value, each with the number of its input."""
        return self._readers[name]

    def uses(self, name: str) -> set[tuple[str, int]]:
        """Return (operator, input) of all readers of a value, seen through nodes that pass it on."""
        uses: set[tuple[str, int]] = set()
        for node, place in self.of(name):
            if node.op_type in _PASSED_ON and place == 0:
                uses |= self.uses(node.output_names[0])
            else:
                uses.add((node.op_type, place))
        return uses

    def only_bounds(self, mask: str) -> bool:
        """Return whether the length of a mask is only the bound of the attention, and its sum the number of tokens."""
        ends = self._ends(mask, None)
        return ("sum", _GQA, 5) in ends and ends <= {("sum", _GQA, 5), ("sum", _GQA, 6), ("length", _GQA, 6)}

    def _ends(self, name: str, way: str | None) -> set[tuple[str | None, str, int]]:
        """Return the use of a mask: the part taken, the operator that reads it, and its input."""
        ends: set[tuple[str | None, str, int]] = set()
        for node, place in self.of(name):
            kind = node.op_type
            if way is None and _is_sum(node):  # of one node or several, as the kernels of the device allow
                for written in self._sums[id(node.source)]:
                    if any(reader.source is not node.source for reader, _ in self.of(written)):
                        ends |= self._ends(written, "sum")
            elif way is None and kind == "Shape" and place == 0:
                ends |= self._ends(node.output_names[0], "length")
            elif kind in _PASSED_ON or (way and kind in ("Sub", "Add")) or (way == "length" and kind == "Gather"):
                ends |= self._ends(node.output_names[0], way)
            else:
                ends.add((way, kind, place))
        return ends


def _is_sum(node: ExportedNode) -> bool:
    """Return whether a node is one of those that a sum of the user's graph was written as."""
    op = None if node.source is None else node.source.op
    is_sum = isinstance(op, OnnxNode) and (op.domain, op.op_type) == ("", "ReduceSum")
    return is_sum or (isinstance(op, Reduce) and op.function == "sum")


def _longest(exported: ExportedModel) -> int | None:
    """Return the least length of the tables of rotations that attentions read."""
    lengths = []
    for node in exported.nodes:
        table = node.inputs[7] if node.op_type == _GQA and len(node.inputs) > 7 else None
        if isinstance(table, TensorType) and table.shape and isinstance(length := next(iter(table.shape)), int):
            lengths.append(length)
    return min(lengths, default=None)


def _pairs(
    exported: ExportedModel, inputs: Mapping[str, ValueType], readers: _Readers, given: dict[str, str]
) -> tuple[CachePair, ...]:
    """Return the caches: those that are given, then those that the graph shows, then those that names show."""
    outputs = exported.output_types
    for past, present in given.items():
        if past not in inputs or present not in outputs:
            raise InputError(f"cache {past!r} -> {present!r}: there is no such input or output")
    pairs = []
    for name, kind in inputs.items():
        if not isinstance(kind, TensorType):
            continue
        reading = readers.of(name)
        written = ""
        if len(reading) == 1:
            node, place = reading[0]
            writes = dict(_WRITERS.get(node.op_type, ()))
            if place in writes and len(node.output_names) > writes[place]:
                written = node.output_names[writes[place]]
                kind = _with_head_size(kind, node)
        present = given.get(name) or (written if written in outputs else "") or _named_present(name, outputs)
        if present:
            pairs.append(CachePair(name, present, kind, written == present))
    return tuple(pairs)


def _with_head_size(kind: TensorType, node: ExportedNode) -> TensorType:
    """Return the type of a cache with the size of its heads, which onnxruntime-genai's models leave open."""
    dims, made = list(kind.shape or ()), node.outputs[0]
    heads = node.pattern.attributes.get("num_heads")
    width = list(made.shape or ())[-1] if isinstance(made, TensorType) and made.shape else None
    if (
        node.op_type != _GQA
        or len(dims) != 4
        or isinstance(dims[3], int)
        or heads is None
        or not isinstance(width, int)
    ):
        return kind
    bits = node.pattern.attributes.get("kv_cache_bit_width")
    size = width // heads.value // (2 if bits is not None and bits.value == 4 else 1)
    return TensorType(kind.dtype, Shape([*dims[:3], size]))


def _named_present(past: str, outputs: Mapping[str, ValueType]) -> str:
    """Return the output that the names of Optimum and onnxruntime-genai give to a cache input, if it is there."""
    if "past" not in past:
        return ""
    names = (past.replace("past_key_values", "present"), past.replace("past", "present"))
    return next((name for name in names if name in outputs), "")


def _role(name: str, kind: ValueType, readers: _Readers) -> Role | None:
    lengths = {_LENGTHS[use] for use in readers.uses(name) if use in _LENGTHS}
    if len(lengths) == 1 and lengths == {_LENGTHS.get(use) for use in readers.uses(name)}:
        return lengths.pop()
    if not isinstance(kind, TensorType) or not np.issubdtype(kind.dtype.numpy, np.integer):
        return None
    return next((role for pattern, role in _NAMED if pattern.search(name)), None)
