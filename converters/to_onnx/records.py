"""`NodeRecord`: a node as it was written, and `Pattern`: what it shares with equal nodes of equal types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.converters.to_onnx.model import ModelNode, names_of
from rlx_ort.ir.core import Node
from rlx_ort.ir.types import ValueType

__all__ = ["NodeRecord", "Pattern"]


@dataclass(slots=True, eq=False)
class Pattern:
    """Nodes that differ by names and origin alone, told from others by identity.

    Attributes:
        like: the first that was written like them. It may be of other sizes; element types and ranks are the same.
        written: the opset version their form belongs to.
        imported: whether they came from a model, so that their form belongs to exactly that version.
        body: whether they stand in a subgraph.
        inputs: types of their inputs, None for absent ones; told by an outline where they are those of `like`.
        outputs: types of their outputs, likewise.
        version: opset version of the domain in the model, in an outline.
        shape_only: whether they only compute shapes, in an outline.
    """

    like: ModelNode
    written: int
    imported: bool
    body: bool
    inputs: tuple[ValueType | None, ...] = ()
    outputs: tuple[ValueType | None, ...] = ()
    version: int = 0
    shape_only: bool = False

    @property
    def domain(self) -> str:
        """The domain of the operator, empty for ai.onnx."""
        return self.like.domain

    @property
    def op_type(self) -> str:
        """The operator."""
        return self.like.op_type

    def exported(
        self,
        name: str = "",
        origin: int = 0,
        input_names: tuple[str, ...] = (),
        output_names: tuple[str, ...] = (),
    ) -> ExportedNode:
        """Return such a node of an outline."""
        return ExportedNode(
            *(name, self.like.domain, self.like.op_type, self.version, origin, self.inputs, self.outputs),
            *(input_names, output_names, self.shape_only, self.body),
        )


class NodeRecord(NamedTuple):
    """A node as it was written, with what choosing an opset and reporting need to know.

    Attributes:
        pattern: what it shares with nodes that were written alike.
        origin: id of the top-level node of the user's graph that it stands for.
        source: the top-level node of the graph that it was written for.
        name: the node's name; empty where it is the first of its pattern, which has the names.
        input_names: names of the values it reads, empty for absent ones.
        output_names: names of the values it writes.
    """

    pattern: Pattern
    origin: int
    source: Node | None
    name: str = ""
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()

    @property
    def like(self) -> ModelNode:
        """The node, or the one it repeats."""
        return self.pattern.like

    @property
    def output_types(self) -> tuple[ValueType | None, ...]:
        """Types of the values it writes; empty where they are those of `like`."""
        return self.pattern.outputs

    @property
    def op_type(self) -> str:
        """The operator."""
        return self.pattern.like.op_type

    def named(self) -> NodeRecord:
        """Return the record of a first node with the names in it."""
        pattern, origin, source = self[:3]
        like = pattern.like
        return NodeRecord(pattern, origin, source, like.name, names_of(like.inputs), names_of(like.outputs))

    def exported(self) -> ExportedNode:
        """Return the node of an outline with its names and origin."""
        return self.pattern.exported(self.name, self.origin, self.input_names, self.output_names)

    @property
    def label(self) -> str:
        """The node it was written for, as messages name it."""
        return str(self.source)
