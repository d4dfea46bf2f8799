"""Nodes that ONNX Runtime adds or renames before it assigns them: whether they compute sizes, and where they come from.

Its layout rewrites move a `Transpose` past a `Shape` and put a `Gather` behind that, for instance, which then runs on
the CPU because sizes are there. Such a node has no counterpart in the exported model, so its dataflow in the rewritten
model decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

    from rlx_ort.converters.to_onnx.exported import ExportedModel, ExportedNode

_SIZE_READERS = frozenset({"Shape", "Size"})
_INTEGERS = frozenset({2, 3, 4, 5, 6, 7, 9, 12, 13})
"""TensorProto.DataType of the integers of at least 8 bits, and of bool."""
_INT64 = 7
_MOVES = frozenset({"Concat", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators whose result has the element type of the first input; a rewritten model does not type added nodes."""


@dataclass(frozen=True, slots=True)
class AddedNode:
    """A node of a rewritten model.

    Attributes:
        sizes: whether it computes integers from nothing but the sizes of tensors and constants.
        source: the exported node it is, or whose results it reads; None if there is none.
    """

    sizes: bool
    source: ExportedNode | None


def added_nodes(rewritten: onnx.ModelProto, exported: ExportedModel) -> Mapping[str, AddedNode]:
    """Return each node of a model that ONNX Runtime rewrote, by its name; those of bodies too."""
    walk = _Walk(exported)
    walk.graph(rewritten.graph)
    return walk.nodes


@dataclass
class _Walk:
    exported: ExportedModel
    nodes: dict[str, AddedNode] = field(default_factory=dict)
    sizes: set[str] = field(default_factory=set)
    constants: set[str] = field(default_factory=set)
    types: dict[str, int] = field(default_factory=dict)
    sources: dict[str, ExportedNode] = field(default_factory=dict)

    def graph(self, graph: onnx.GraphProto) -> None:
        self.constants.update(tensor.name for tensor in graph.initializer)
        self.types.update((tensor.name, tensor.data_type) for tensor in graph.initializer)
        self.types.update((value.name, value.type.tensor_type.elem_type) for value in graph.value_info)
        self.types.update((value.name, value.type.tensor_type.elem_type) for value in graph.output)
        for node in graph.node:
            for attribute in node.attribute:
                for body in (attribute.g, *attribute.graphs):
                    self.graph(body)
            self.node(node)

    def node(self, node: onnx.NodeProto) -> None:
        read = [name for name in node.input if name]
        known = self.exported.node_of(node.name)
        source = known or next((self.sources[name] for name in read if name in self.sources), None)
        if source is not None:
            self.sources.update((name, source) for name in node.output if name)
        if node.op_type == "Constant" and not node.domain:
            self.constants.update(node.output)
        measures = node.op_type in _SIZE_READERS and not node.domain
        if measures:
            self.types[node.output[0]] = _INT64
        if node.op_type in _MOVES and read and read[0] in self.types:
            self.types.setdefault(node.output[0], self.types[read[0]])
        # Of constants alone too: the layout rewrites come after the folding of constants.
        follows = bool(read) and all(name in self.sizes or name in self.constants for name in read)
        integers = all(self.types.get(name) in _INTEGERS for name in node.output if name)
        sizes = measures or (follows and integers)
        if sizes:
            self.sizes.update(name for name in node.output if name)
        self.nodes[node.name] = AddedNode(sizes, source)
