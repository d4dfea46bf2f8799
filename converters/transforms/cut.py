"""Cuts out the part of a model between named values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx

from rlx_ort.converters.bundle import FREE_INITIALIZERS, ModelBundle
from rlx_ort.converters.from_onnx.structure import names_read
from rlx_ort.converters.onnx_types import type_proto
from rlx_ort.converters.protos import bodies_of, copied, graphs_below
from rlx_ort.converters.transforms.scope import label_of, model_scope
from rlx_ort.errors import ConversionError, near_names


@dataclass(frozen=True, slots=True)
class CutReport:
    """Result of `cut`: names of the inputs and outputs of the part, in order, and how many nodes of the main graph."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes_kept: int
    nodes_dropped: int


def cut(bundle: ModelBundle, inputs: Sequence[str] = (), outputs: Sequence[str] = ()) -> tuple[ModelBundle, CutReport]:
    """Return the part of a model that computes some of its values from others, with the weights that it needs.

    Args:
        bundle: the model.
        inputs: values of the main graph that become the inputs, in this order. Empty keeps those inputs of the model
            that are needed.
        outputs: values of the main graph that become the outputs, in this order. Empty keeps the model's own.

    Raises:
        ConversionError: a name is unknown, given twice or inside a body; an input is lacking or not needed; or the
            type of a new input or output cannot be inferred.
    """
    graph = bundle.proto.graph
    initializers = {tensor.name for tensor in graph.initializer}
    initializers |= {tensor.values.name for tensor in graph.sparse_initializer}
    makers = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    own = [value.name for value in graph.input if value.name not in initializers]
    known = {*own, *initializers, *makers}
    wanted = list(outputs) or [value.name for value in graph.output]
    _check_names(bundle, "input", inputs, known)
    _check_names(bundle, "output", wanted, known)
    for name in wanted:
        if name not in makers:
            raise ConversionError(f"output {name!r} is an input or weight of {bundle.origin}; nothing computes it")
        if name in inputs:
            raise ConversionError(f"{name!r} is asked for as input and as output; nothing is left between")

    needed, nodes = _needed(graph, wanted, frozenset(inputs), makers)
    lacking = [name for name in own if name in needed and name not in inputs]
    if inputs and lacking:
        raise ConversionError(
            f"output {' and '.join(map(repr, wanted))} cannot be computed from {' and '.join(map(repr, inputs))} "
            f"alone; the model's input {' and '.join(map(repr, lacking))} is needed as well: add it to the inputs"
        )
    idle = [name for name in inputs if name not in needed]
    if idle:
        raise ConversionError(
            f"input {' and '.join(map(repr, idle))} does not contribute to {' and '.join(map(repr, wanted))}; remove it"
        )
    starts = list(inputs) or lacking
    proto = _part(bundle, starts, wanted, needed, nodes)
    report = CutReport(tuple(starts), tuple(wanted), len(nodes), len(graph.node) - len(nodes))
    return bundle.with_proto(proto), report


def _check_names(bundle: ModelBundle, what: str, names: Sequence[str], known: set[str]) -> None:
    for name in names:
        if name in known:
            continue
        owner = _owner_of(bundle.proto.graph, name)
        if owner:
            raise ConversionError(f"{what} {name!r} is inside a body of {owner}; give a value of the main graph")
        raise ConversionError(f"{what} {name!r} is not a value of {bundle.origin}; {near_names(name, known)}")
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise ConversionError(f"{what} {twice[0]!r} is given twice")


def _owner_of(graph: onnx.GraphProto, name: str) -> str:
    """Return the node of the graph whose bodies define a value, or an empty string."""
    for node in graph.node:
        for body in graphs_below(*bodies_of(node)):
            defined = {value.name for value in body.input} | {tensor.name for tensor in body.initializer}
            if name in defined or any(name in inner.output for inner in body.node):
                return label_of(node)
    return ""


def _needed(
    graph: onnx.GraphProto, outputs: Iterable[str], stops: frozenset[str], makers: Mapping[str, int]
) -> tuple[set[str], set[int]]:
    """Return the values and the nodes that the outputs depend on, back to the stops."""
    needed: set[str] = set()
    nodes: set[int] = set()
    pending = [*outputs]
    while pending:
        name = pending.pop()
        if name in needed:
            continue
        needed.add(name)
        if name in stops or name not in makers or makers[name] in nodes:
            continue
        nodes.add(makers[name])
        pending += names_read(graph.node[makers[name]])
    return needed, nodes


def _part(
    bundle: ModelBundle, inputs: Sequence[str], outputs: Sequence[str], needed: set[str], nodes: set[int]
) -> onnx.ModelProto:
    types = model_scope(bundle).types

    def declared(names: Iterable[str], what: str) -> Iterator[onnx.ValueInfoProto]:
        for name in names:
            if name not in types:
                raise ConversionError(f"the type of {what} {name!r} cannot be inferred; cut at another value")
            yield onnx.ValueInfoProto(name=name, type=type_proto(types[name]))

    proto = copied(bundle.proto)
    graph, source = proto.graph, bundle.proto.graph
    for kept in (graph.node, graph.initializer, graph.sparse_initializer, graph.input, graph.output, graph.value_info):
        del kept[:]
    graph.node.extend(node for index, node in enumerate(source.node) if index in nodes)
    weights = needed.difference(inputs)
    graph.initializer.extend(t for t in source.initializer if t.name in weights)
    graph.sparse_initializer.extend(t for t in source.sparse_initializer if t.values.name in weights)
    graph.input.extend(declared(inputs, "input"))
    if proto.ir_version < FREE_INITIALIZERS:  # there, weights are inputs too
        graph.input.extend(declared((tensor.name for tensor in graph.initializer), "input"))
    graph.output.extend(declared(outputs, "output"))
    made = {name for node in graph.node for name in node.output} - {*outputs}
    graph.value_info.extend(info for info in source.value_info if info.name in made)
    return proto
