"""`verify`: the problems of a graph, each with the node's name and a remedy."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Graph, Node, Ref
from rlx_ort.ir.op import Op
from rlx_ort.ir.ops.leaf import Capture, Input, Param
from rlx_ort.ir.ops.onnx import OnnxNode, Refused
from rlx_ort.ir.types import Shape, TensorType, UnknownType, ValueType, fits


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, with a remedy; `node` is the node's id in its graph, None for the graph as a whole."""

    message: str
    remedy: str
    node: int | None = None

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}"


def verify(graph: Graph) -> list[Problem]:
    """Return every problem of a graph and of the bodies in it, in node order; none if it is valid."""
    return list(_problems(graph, ""))


def check(graph: Graph) -> None:
    """Raise if a graph has problems.

    Raises:
        GraphVerifyError: it has; the message lists every one.
    """
    problems = verify(graph)
    if problems:
        lines = [f"graph {graph.name!r} has {len(problems)} problem{'s' if len(problems) > 1 else ''}:"]
        raise GraphVerifyError("\n".join(lines + [f"  {problem}" for problem in problems]))


def _problems(graph: Graph, owner: str) -> Iterator[Problem]:
    yield from _name_problems(graph, owner)
    kinds = {type(node.op) for node in graph.nodes}
    unsure = _unsure_places(graph, kinds)
    for place, node in enumerate(graph.nodes if unsure or Capture in kinds else ()):
        if place in unsure:
            for fault, remedy in _faults(graph, node, place):
                yield Problem(f"{owner}{node}{fault}", remedy, place)
        if isinstance(node.op, Capture) and not owner:
            yield Problem(f"{node} captures a value, but its graph is not a body", "use an input instead", place)
        for body in node.op.bodies():
            yield from _capture_problems(node, body, f"{owner}{node}")
            yield from _problems(body, f"{owner}{node}, body {body.name!r}: ")
    yield from _output_problems(graph, owner)


def _unsure_places(graph: Graph, kinds: Collection[type[Op]]) -> Collection[int]:
    """Return the places of the nodes to check: those whose types were not inferred when they were added.

    `add_node` has checked the others. If any node was changed or put in by hand, every node is checked, because the
    nodes after it may rely on its earlier type.
    """
    every = range(len(graph.nodes))
    if len(graph._added) != len(graph.nodes):
        return every
    # A body may be changed after its owner was added, and with it the types that the owner infers.
    owners = {kind for kind in kinds if kind.bodies is not Op.bodies}
    places: set[int] = set()
    for place, (node, added) in enumerate(zip(graph.nodes, graph._added, strict=True)):
        if added is None:
            return every
        as_added, op, inputs, types, inferred = added
        same = as_added is node and node.op is op and node.inputs is inputs and node.types is types
        if not same or node.id != place:
            return every
        if not inferred or len(node.output_names) != len(types) or type(op) in owners:
            places.add(place)
    return places


def _faults(graph: Graph, node: Node, place: int) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a node, as text after its name, each with a remedy."""
    least, most = node.op.arity
    connected = len(node.inputs) >= least and (most is None or len(node.inputs) <= most)
    if not connected:
        yield f" takes {node.op.arity_text()} inputs and has {len(node.inputs)}", "connect the right number"
    inputs: list[ValueType | None] = []
    for index, ref in enumerate(node.inputs):
        trouble = _ref_trouble(graph, ref, place) if ref is not None else ""
        if trouble:
            connected = False
            yield f": input {index} {trouble}", "refer to a result of an earlier node"
        else:
            inputs.append(None if ref is None else graph.nodes[ref.node].types[ref.output])
    if connected:
        yield from _type_faults(node, inputs)
    if node.id != place:
        yield f" stands at place {place}", "build graphs with add_node, which numbers them"


def _type_faults(node: Node, inputs: Sequence[ValueType | None]) -> Iterator[tuple[str, str]]:
    if len(node.output_names) != len(node.types):
        yield f" has {len(node.types)} results and {len(node.output_names)} names for them", "name each result"
    if isinstance(node.op, Refused):
        yield f" does not run: {node.op.reason}", node.op.remedy
        return
    try:
        inferred = node.op.infer(inputs)
    except GraphVerifyError as err:
        yield f" does not take its inputs: {err}", "change the inputs or the attributes"
        return
    if len(inferred) != len(node.types):
        yield f" declares {len(node.types)} results, the op has {len(inferred)}", "rebuild the node with its builder"
        return
    for index, (wanted, declared) in enumerate(zip(inferred, node.types, strict=True)):
        if not _agree(wanted, declared):
            fault = f" declares result {index} as {declared}, its inputs give {wanted}"
            yield fault, "correct the declared type, or rebuild the node after changing its inputs"


def _name_problems(graph: Graph, owner: str) -> Iterator[Problem]:
    where = f"{owner}graph {graph.name!r}"
    yield from _clashes(graph, where)
    params = {node.op.name: node for node in graph.nodes if isinstance(node.op, Param)} if graph.weights else {}
    for name, tensor in graph.weights.items():
        if name not in params:
            yield Problem(
                f"{where} has weight data for {name!r}, which is not a parameter", "remove it or add the param"
            )
            continue
        op = params[name].op
        if isinstance(op, Param) and (op.type.dtype is not tensor.dtype or op.type.shape != tensor.shape):
            stored = f"{tensor.dtype.value}{Shape(tensor.shape)}"
            message = f"{where}: {params[name]} is declared {op.type}, its data is {stored}"
            yield Problem(message, "give it data of the declared type", params[name].id)


def _clashes(graph: Graph, where: str) -> Iterator[Problem]:
    """Yield a problem for each name that two nodes, two results, or two inputs or parameters have."""
    nodes: dict[str, int] = {}
    values: dict[str, int] = {}
    leaves: dict[str, int] = {}
    for node in graph.nodes:
        if nodes.setdefault(node.name, node.id) != node.id or not node.name:
            other = f"node {nodes[node.name]} has the same name" if node.name else "it has no name"
            yield Problem(f"{where}: node {node.id} {node.name!r}: {other}", "give it a name of its own", node.id)
        for name in node.output_names:
            if name in values:
                message = f"{where}: {node} and node {values[name]} both have a result named {name!r}"
                yield Problem(message, "give each result a name of its own", node.id)
            elif name:
                values[name] = node.id
        if isinstance(node.op, (Input, Param)) and leaves.setdefault(node.op.name, node.id) != node.id:
            message = f"{where}: {node} and node {leaves[node.op.name]} are both fed as {node.op.name!r}"
            yield Problem(message, "rename one of them", node.id)


def _ref_trouble(graph: Graph, ref: Ref, before: int) -> str:
    if not 0 <= ref.node < len(graph.nodes):
        return f"is node {ref.node}, which does not exist"
    if ref.node >= before:
        return f"is node {ref.node}, which comes no earlier"
    results = len(graph.nodes[ref.node].types)
    return f"is result {ref.output} of node {ref.node}, which has {results}" if not 0 <= ref.output < results else ""


def _agree(inferred: ValueType, declared: ValueType) -> bool:
    """Return whether a declared type fits the inferred one; shapes may leave dims open, and a scalar may be (1,)."""
    if inferred is declared or isinstance(inferred, UnknownType):
        return True
    if not isinstance(inferred, TensorType) or not isinstance(declared, TensorType):
        return inferred == declared
    if inferred.dtype is not declared.dtype:
        return False
    if inferred.shape is None or declared.shape is None or fits(inferred.shape, declared.shape):
        return True
    return {tuple(inferred.shape), tuple(declared.shape)} == {(), (1,)}


def _capture_problems(node: Node, body: Graph, label: str) -> Iterator[Problem]:
    first = node.op.formal_inputs if isinstance(node.op, OnnxNode) else 0
    for inner in body.nodes:
        if not isinstance(inner.op, Capture):
            continue
        index = inner.op.index
        if not first <= index < len(node.inputs) or node.inputs[index] is None:
            message = f"{label}, body {body.name!r}: {inner} captures input {index}, which the node does not have"
            yield Problem(message, "append the captured value to the node's inputs", node.id)


def _output_problems(graph: Graph, owner: str) -> Iterator[Problem]:
    where = f"{owner}graph {graph.name!r}"
    if not graph._outputs:
        yield Problem(f"{where} has no outputs", "set graph.outputs to the values it should return")
    names = graph.output_names
    for place, (name, ref) in enumerate(graph._outputs):
        if not name or name in names[:place]:
            yield Problem(f"{where}: output {place} is named {name!r} like another", "give each output its own name")
        trouble = _ref_trouble(graph, ref, len(graph.nodes))
        if trouble:
            yield Problem(f"{where}: output {place} {name!r} {trouble}", "set graph.outputs to values of this graph")
