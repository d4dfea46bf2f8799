"""Pairs the values of two models that should be equal: by name, else by the structure above them, else by order.

A conversion may rename values, insert casts and quantisation, and replace operators. The structure is compared without
casts and quantisation, so most values keep a counterpart.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import onnx

__all__ = ["Pairing", "nearest", "pair_values"]

_PASSING = {"Cast", "Identity", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}
"""Operators that keep the meaning of their first input: conversions of precision insert and remove them."""

_DISAGREE = 1 / 3
_MOST_ALIGNED = 5_000  # nodes; difflib's time grows with the square

Pairing = dict[str, str]
"""Name of a value of the first model -> name of its counterpart in the second."""


def pair_values(a: onnx.GraphProto, b: onnx.GraphProto) -> Pairing:
    """Return the values of the main graph of `a`, in its order, that have a counterpart in `b`.

    Names are trusted if at least two thirds of the equal names belong to equal operators: quantising changes a few. Two
    exports that number their values have equal names without meaning, and are paired by structure.
    """
    ops_a, ops_b = dict(_values(a)), dict(_values(b))
    common = [name for name in ops_a if name in ops_b]
    agree = [name for name in common if ops_a[name] == ops_b[name]]
    trusted = len(agree) >= (1 - _DISAGREE) * len(common)
    found: Pairing = {name: name for name in (common if trusted else ())}
    taken = set(found.values())
    for left, right in (*_by_structure(a, b), *_by_order(list(ops_a.items()), list(ops_b.items()))):
        if left not in found and right not in taken:
            found[left] = right
            taken.add(right)
    return {name: found[name] for name in ops_a if name in found}


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
    found: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    for node in graph.node:
        sources: set[str] = set()
        between: set[str] = set()
        for name in _reads(node):
            if name in paired:
                sources.add(name)
            elif name in above:
                sources |= above[name][0]
                between |= above[name][1]
        for name in node.output:
            if name in paired:
                found[name] = (tuple(sorted(sources)), tuple(sorted(between)))
            elif name and node.op_type != "Constant":
                above[name] = (frozenset(sources), frozenset(between | {node.name or name}))
    return found


def _reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the values that a node reads, including those inside its bodies, whose own names match nothing."""
    yield from node.input
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            for inner in graph.node:
                yield from _reads(inner)
            yield from (output.name for output in graph.output)
