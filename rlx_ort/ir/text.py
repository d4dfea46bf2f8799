"""Graphs as text for people: one line a node."""

from __future__ import annotations

from rlx_ort.ir.core import GraphCore, Ref

__all__ = ["format_graph"]


def format_graph(graph: GraphCore, indent: str = "") -> str:
    """Return a listing of a graph: each node with its result names, op, inputs and types, bodies indented below it.

    Data of weights and constants is left out.
    """
    lines = [f"{indent}graph {graph.name}"]
    for node in graph.nodes:
        results = ", ".join(f"{name or '_'}: {kind}" for name, kind in zip(node.output_names, node.types, strict=False))
        inputs = ", ".join("_" if ref is None else _name(graph, ref) for ref in node.inputs)
        lines.append(f"{indent}  {results} = {node.op.describe()}{f' ({inputs})' if inputs else ''}")
        lines += [format_graph(body, indent + "    ") for body in node.op.bodies()]
    outputs = ", ".join(
        name if name == _name(graph, ref) else f"{name} = {_name(graph, ref)}" for name, ref in graph._outputs
    )
    lines.append(f"{indent}  return {outputs}")
    return "\n".join(lines)


def _name(graph: GraphCore, ref: Ref) -> str:
    known = 0 <= ref.node < len(graph.nodes) and 0 <= ref.output < len(graph.nodes[ref.node].output_names)
    return (graph.nodes[ref.node].output_names[ref.output] if known else "") or f"%{ref.node}.{ref.output}"
