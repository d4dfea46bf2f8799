"""`section`: the part of a graph between two places in the order of its nodes, as a graph of its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Graph, Node, Ref
from rlx_ort.ir.graph import live_nodes
from rlx_ort.ir.ops.leaf import Constant, Input, Param


def section(graph: Graph, begin: int, end: int, sizes: Collection[str] = ()) -> Graph:
    """Return the nodes from `begin` to before `end`, as far as an output of the graph needs them.

    Values of earlier nodes that it reads become its inputs, and values that later nodes or the graph's outputs need its
    outputs; both keep their names. Inputs, parameters and constants come along wherever they stand, those that are an
    output of the graph themselves with the last section. Weights are shared. `sizes` names the values that nodes
    compute from sizes alone, which providers leave to the host. A node that computes one of others and constants comes
    along too: only so is the -1 known in the shape that a Reshape of PyTorch's exporter reads.

    Raises:
        GraphVerifyError: nothing between the two is needed.
    """
    live = live_nodes(graph)
    inside = [node for node in graph.nodes[begin:end] if node.id in live and not node.op.is_leaf]
    own = {node.id for node in inside}
    inside = _made_again(graph, begin, inside, sizes) + inside
    made = {node.id for node in inside}
    read = {ref for node in inside for ref in node.inputs if ref is not None and ref.node not in made}
    after = [node for node in graph.nodes[end:] if node.id in live]
    after += _made_again(graph, end, after, sizes)
    later = {ref for node in after for ref in node.inputs if ref is not None}
    results = {ref for _, ref in graph._outputs}
    if end >= len(graph.nodes):
        read |= {ref for ref in results if graph.nodes[ref.node].op.is_leaf}
    given = sorted(ref for ref in results & read if graph.nodes[ref.node].op.is_leaf and end >= len(graph.nodes))
    wanted = [ref for ref in sorted(later | results) if ref.node in own] + given
    if not wanted:
        raise GraphVerifyError(f"nothing between nodes {begin} and {end} of graph {graph.name!r} is needed behind them")
    part = type(graph)(f"{graph.name}[{begin}:{end}]")
    part.metadata, part.scopes, part._names = dict(graph.metadata), dict(graph.scopes), dict(graph._names)
    places: dict[Ref, Ref] = {}
    for ref in sorted(read):
        node, kind = graph.nodes[ref.node], graph.nodes[ref.node].types[ref.output]
        name = node.output_names[ref.output]
        places[ref] = Ref(len(part.nodes))
        op = node.op if node.op.is_leaf else Input(name, kind)
        part.nodes.append(Node(len(part.nodes), op, (), (kind,), node.name if node.op.is_leaf else name, (name,)))
    for node in inside:
        inputs = tuple(None if ref is None else places[ref] for ref in node.inputs)
        places.update({Ref(node.id, at): Ref(len(part.nodes), at) for at in range(len(node.types))})
        part.nodes.append(Node(len(part.nodes), node.op, inputs, node.types, node.name, node.output_names))
    part._outputs = [(graph.nodes[ref.node].output_names[ref.output], places[ref]) for ref in wanted]
    params = {node.op.name for node in part.nodes if isinstance(node.op, Param)}
    part.weights = {name: data for name, data in graph.weights.items() if name in params}
    part.size_inputs = frozenset(value.name for value in part.inputs).intersection(sizes)
    part.revision = 1
    return part


def _made_again(graph: Graph, begin: int, readers: Sequence[Node], sizes: Collection[str]) -> list[Node]:
    """Return the nodes before `begin` that later ones read and that compute a size from constants and other sizes."""
    asked = sorted({ref.node for node in readers for ref in node.inputs if ref is not None and ref.node < begin})
    found = []
    for node in map(graph.nodes.__getitem__, asked):
        makers = [graph.nodes[ref.node] for ref in node.inputs if ref is not None]
        others = [maker for maker in makers if not isinstance(maker.op, Constant)]
        names = {name for each in (node, *others) for name in each.output_names}
        if len(others) < len(makers) and names.issubset(sizes):
            found.append(node)
    return found
