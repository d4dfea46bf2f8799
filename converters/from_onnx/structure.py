"""Checks a model before it is walked: names, nesting, attributes. Sorts nodes that are out of order, refuses cycles."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from rlx_ort.converters.from_onnx.signatures import signature_of
from rlx_ort.converters.onnx_types import schema_of
from rlx_ort.converters.protos import bodies_of
from rlx_ort.errors import ConversionError

if TYPE_CHECKING:
    import onnx

MAX_DEPTH = 30
"""How deep bodies and function calls may be nested: protobuf reads and copies no more than 32 levels of bodies."""

_MAX_NODES = 2_000_000
_MAX_OPSET = 1_000_000  # custom domains number as they like


def check_model(model: onnx.ModelProto) -> None:
    """Raise unless a model can be walked: ONNX's own shape inference, which comes next, does not defend itself.

    Raises:
        ConversionError: a name is no text, bodies are nested too deep, functions call each other in a circle or too
            often, or a node's inputs, outputs or attributes are not those of its operator.
    """
    import onnx

    for entry in (*model.opset_import, *(entry for f in model.functions for entry in f.opset_import)):
        _check_texts("the opset imports", (entry.domain,))
        newest = _MAX_OPSET if domain_of(entry.domain) else onnx.defs.onnx_opset_version()
        if not 0 < entry.version <= newest:
            raise ConversionError(
                f"the model imports opset {entry.version} of {entry.domain or 'ai.onnx'!r}; the newest here is {newest}"
            )
    entries = (text for entry in model.metadata_props for text in (entry.key, entry.value))
    _check_texts("the model's description", (model.doc_string, model.graph.doc_string, *entries))
    imported = opsets_of(model, model.opset_import)
    for function in model.functions:
        names = (*function.input, *function.output, *function.attribute, *(a.name for a in function.attribute_proto))
        _check_texts("a function", (function.domain, function.name, function.overload, *names))
        if not all((function.name, *names)):
            raise ConversionError(f"function {function.name!r} has an input, output or attribute without a name")
        domain = domain_of(function.domain)
        if domain in imported and schema_of(function.name, imported[domain], domain) is not None:
            raise ConversionError(
                f"function {function.name!r} has the name of an operator of {domain or 'ai.onnx'}, and runtimes differ "
                "in which of the two they run; rename the function"
            )
    functions = {(domain_of(f.domain), f.name, f.overload): f for f in model.functions}
    sizes: dict[tuple[str, str, str], int] = {}
    open_calls: list[tuple[str, str, str]] = []

    def size_of(nodes: Iterable[onnx.NodeProto], depth: int, opsets: Mapping[str, int]) -> int:
        total = 0
        for node in nodes:
            if depth > MAX_DEPTH:
                raise ConversionError(f"{node_label(node)} stands in bodies nested more than {MAX_DEPTH} deep")
            inputs, outputs, attributes = [*node.input], [*node.output], [*node.attribute]
            key = (domain_of(node.domain), node.op_type, node.overload)
            names = [attribute.name for attribute in attributes]
            refs = [attribute.ref_attr_name for attribute in attributes]
            _check_texts(node, (*key, node.name, *inputs, *outputs, *names, *refs))
            if len({*names}) != len(names):
                raise ConversionError(f"{node_label(node)} has an attribute twice: {', '.join(sorted(names))}")
            if key in functions:
                total += function_size(key, node)
            else:
                total += 1
                signature = signature_of(node.op_type, opsets[key[0]], key[0]) if key[0] in opsets else None
                given = dict(zip(names, attributes, strict=True))
                if signature is not None and (problem := signature.problem(inputs, outputs, given)):
                    raise ConversionError(f"{node_label(node)} {problem}")
            if attributes:
                for body in bodies_of(node):
                    _check_graph(body)
                    total += size_of(body.node, depth + 1, opsets)
        return total

    def function_size(key: tuple[str, str, str], node: onnx.NodeProto) -> int:
        if key in open_calls or len(open_calls) > MAX_DEPTH:
            chain = " -> ".join(name for _, name, _ in open_calls)
            how = "calls itself" if key in open_calls else "is called too deep,"
            raise ConversionError(f"{node_label(node)} {how} through {chain}")
        if key not in sizes:
            open_calls.append(key)
            sizes[key] = 1 + size_of(functions[key].node, 0, opsets_of(model, functions[key].opset_import))
            open_calls.pop()
        return sizes[key]

    _check_graph(model.graph)
    total = size_of(model.graph.node, 0, imported)
    if total > _MAX_NODES:
        raise ConversionError(f"the model has {total} nodes once its functions are inlined, above {_MAX_NODES}")


def domain_of(name: str) -> str:
    """Return a domain as the IR writes it: that of ai.onnx is empty."""
    return "" if name == "ai.onnx" else name


def opsets_of(model: onnx.ModelProto, imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Return domain -> version of some opset imports of a model."""
    opsets = {domain_of(entry.domain): entry.version for entry in imports}
    if model.ir_version < 3:  # before IR version 3 there was nothing to declare
        opsets.setdefault("", 1)
    return opsets


def _check_graph(graph: onnx.GraphProto) -> None:
    infos = (info.name for info in (*graph.input, *graph.output, *graph.value_info))
    tensors = (*graph.initializer, *(tensor.values for tensor in graph.sparse_initializer))
    _check_texts("a graph", (graph.name, *infos, *(tensor.name for tensor in tensors)))
    for tensor in tensors:
        if any(size < 0 for size in tensor.dims):
            raise ConversionError(f"tensor {tensor.name!r} of shape {[*tensor.dims]} is not a whole tensor")


def _check_texts(owner: str | onnx.NodeProto, texts: Iterable[object]) -> None:
    """Raise unless every text is one; protobuf gives bytes for text that is no UTF-8."""
    if {*map(type, texts)} <= {str}:
        return
    label = owner if isinstance(owner, str) else node_label(owner)
    raise ConversionError(f"{label} has a name that is no UTF-8 text: the model is damaged")


def node_label(node: onnx.NodeProto) -> str:
    """Return how messages name a node: by its name, or by its results."""
    op_type = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    if node.name:
        return f"node {node.name!r} ({op_type})"
    outputs = ", ".join(repr(name) for name in node.output if name)
    return f"the {op_type} node that computes {outputs or 'nothing'}"


def sorted_nodes(nodes: Iterable[onnx.NodeProto], known: Iterable[str], where: str) -> list[onnx.NodeProto]:
    """Return nodes in an order in which each reads only what is known or computed before; as given where possible.

    Names that neither `known` nor `nodes` define are accepted: they may be captured from outside.

    Raises:
        ConversionError: a name is defined twice, or nodes depend on each other in a circle.
    """
    nodes = list(nodes)
    defined = set(known)
    producer: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in filter(None, node.output):
            if name in defined or name in producer:
                raise ConversionError(f"{node_label(node)} in {where} defines {name!r}, which is already defined")
            producer[name] = index
    needs = [{producer[name] for name in names_read(node) if name in producer} for node in nodes]
    if all(all(need < index for need in wanted) for index, wanted in enumerate(needs)):
        return nodes
    sorter = TopologicalSorter(dict(enumerate(needs)))
    try:
        sorter.prepare()
    except CycleError as err:
        stuck = node_label(nodes[err.args[1][0]])
        raise ConversionError(f"{stuck} in {where} depends on its own result: the graph has a cycle") from err
    order: list[int] = []
    ready: list[int] = []
    while sorter.is_active():
        for index in sorter.get_ready():
            heapq.heappush(ready, index)
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
    return [nodes[index] for index in order]


def names_read(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names a node reads, those that its bodies capture included."""
    yield from filter(None, node.input)
    for body in bodies_of(node):
        own = {value.name for value in body.input} | {tensor.name for tensor in body.initializer}
        own |= {tensor.values.name for tensor in body.sparse_initializer}
        own |= {name for inner in body.node for name in inner.output}
        for inner in body.node:
            yield from (name for name in names_read(inner) if name not in own)
        yield from (value.name for value in body.output if value.name not in own)
