"""The graph a session is opened for, which is not quite the user's: parameters that change often are inputs of it."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlx_ort.ir.core import Node
from rlx_ort.ir.ops.leaf import Input, Param

if TYPE_CHECKING:
    from rlx_ort.ir.graph import Graph

__all__ = ["Runnable", "runnable"]


@dataclass(frozen=True)
class Runnable:
    """What a session is opened for.

    Attributes:
        graph: the graph to export.
        mutable: inputs of it that are parameters of the user's graph; sessions are fed them from the store.
        hidden: outputs that the user's graph does not have; see `rlx_ort.execution.moe`.
        host_marker: part of the names of the nodes that belong on the CPU wherever the rest is; empty for none.
    """

    graph: Graph
    mutable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    host_marker: str = ""


def runnable(graph: Graph) -> Runnable:
    """Return a graph with the parameters declared `mutable` as inputs; remembered for as long as the graph lives.

    One that is declared inside a body stays a weight there, and a change of it opens the session again.
    """
    mutable = [node for node in graph.nodes if isinstance(node.op, Param) and node.op.mutable]
    if not mutable:
        return Runnable(graph)
    with _lock:
        found = _cache.get(graph)
        if found is None or found[0] != graph.revision:
            names = tuple(node.output_names[0] for node in mutable)
            found = (graph.revision, Runnable(_with_inputs(graph), names))
            _cache[graph] = found
        return found[1]


_cache: weakref.WeakKeyDictionary[Graph, tuple[int, Runnable]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _with_inputs(graph: Graph) -> Graph:
    """Return a copy in which mutable parameters are inputs; ids and names stay."""
    result = graph.bind({})
    for place, node in enumerate(result.nodes):
        if isinstance(node.op, Param) and node.op.mutable:
            op = Input(node.op.name, node.op.type)
            result.nodes[place] = Node(node.id, op, (), node.types, node.name, node.output_names)
            result.weights.pop(node.op.name, None)
    return result
