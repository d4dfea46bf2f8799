"""Replaces ops of a `Graph` by the basic ONNX operators that they are exported as."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlx_ort.converters.from_onnx import from_onnx
from rlx_ort.converters.to_onnx import to_onnx
from rlx_ort.ir.core import Node, Ref, Value
from rlx_ort.ir.graph import Graph, eliminate_dead_code, empty_like
from rlx_ort.ir.op import Op
from rlx_ort.ir.ops.leaf import Constant, Input, Param
from rlx_ort.options.compile_options import CompileOptions


def decomposed(graph: Graph, nodes: Collection[int], options: CompileOptions) -> Graph:
    """Return a copy in which some nodes are replaced by the nodes of their common form; weights are shared.

    The other nodes, the parameters, and the names of inputs and outputs stay. A replaced node's last result keeps its
    name, and the names of the new nodes begin with it. None of `nodes` may have a body. The opset and the dims come
    from `options`.

    Raises:
        ConversionError: a node has no ONNX form.
    """
    result = empty_like(graph)
    values: dict[Ref, Value] = {}
    for node in graph.nodes:
        inputs = [None if ref is None else values[ref] for ref in node.inputs]
        if node.id in nodes:
            outputs: Sequence[Value] = _replaced(result, node, inputs, options)
        else:
            refs = tuple(None if value is None else value.ref for value in inputs)
            place = len(result.nodes)
            result.nodes.append(Node(place, node.op, refs, node.types, node.name, node.output_names))
            outputs = [result.value(Ref(place, index)) for index in range(len(node.types))]
        values.update({Ref(node.id, index): value for index, value in enumerate(outputs)})
    result.set_outputs([values[value.ref] for value in graph.outputs], graph.output_names)
    return result


def _replaced(result: Graph, node: Node, inputs: Sequence[Value | None], options: CompileOptions) -> list[Value]:
    """Add the nodes of a node's common form and return its results."""
    alone = Graph(node.name)
    stand_ins: dict[Ref, Value] = {}
    for value in inputs:
        if value is not None and value.ref not in stand_ins:
            # A lowering may read the data of a constant, such as a beta of zeros.
            op: Op = value.node.op if isinstance(value.node.op, Constant) else Input(value.name, value.type)
            (stand_ins[value.ref],) = alone.add_node(op, [], types=[value.type], output_names=[value.name])
    given = [None if value is None else stand_ins[value.ref] for value in inputs]
    alone.set_outputs(alone.add_node(node.op, given, name=node.name, types=node.types, output_names=node.output_names))

    form = eliminate_dead_code(from_onnx(to_onnx(alone, options)))
    sources = {stand_in.name: ref for ref, stand_in in stand_ins.items()}
    wanted = dict(zip((value.ref for value in form.outputs), node.output_names, strict=True))
    values: dict[Ref, Value] = {}
    for part in form.nodes:
        if isinstance(part.op, Input):
            values[Ref(part.id)] = result.value(sources[part.op.name])
            continue
        op = Constant(form.weights[part.op.name]) if isinstance(part.op, Param) else part.op
        read = [None if ref is None else values[ref] for ref in part.inputs]
        name = part.name if part.name.startswith(node.name) else f"{node.name}/{part.name}"
        refs = [Ref(part.id, index) for index in range(len(part.types))]
        names: list[str] | None = None  # those that `add_node` makes are free
        if not all(part.output_names) or wanted.keys() & set(refs):
            named = zip(refs, part.output_names, strict=True)
            names = [wanted.get(ref, own and f"{name}.{ref.output}") for ref, own in named]
        added = result.add_node(op, read, name=name, types=part.types, output_names=names)
        values.update(zip(refs, added, strict=True))
    return [values[value.ref] for value in form.outputs]
