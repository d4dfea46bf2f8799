"""`NodeRecord`: a node as it was written, and `Pattern`: what it shares with nodes that were written alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.converters.to_onnx.model import ModelNode, names_of
from rlx_ort.ir.core import Node

__all__ = ["NodeRecord", "Pattern"]


@dataclass(slots=True, eq=False)
class Pattern:
    """Nodes that differ by names and origin alone, told from others by identity.

    Attributes:
        like: the first of them.
        written: the opset version their form belongs to.
        imported: whether they came from a model, so that their form belongs to exactly that version.
        body: whether they stand in a subgraph.
        kind: them as an `ExportedNode` without names and origin, once the opsets of the model are chosen.
    """

    like: ModelNode
    written: int
    imported: bool
    body: bool
    kind: ExportedNode | None = None


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
    def kind(self) -> ExportedNode:
        """Operator, opset and types of the node, in an outline."""
        assert self.pattern.kind is not None  # noqa: S101  # an outline is made of patterns that have it
        return self.pattern.kind

    @property
    def op_type(self) -> str:
        """The operator."""
        return self.pattern.like.op_type

    def named(self) -> NodeRecord:
        """Return the record of a first node with the names in it."""
        like = self.pattern.like
        return self._replace(name=like.name, input_names=names_of(like.inputs), output_names=names_of(like.outputs))

    def exported(self) -> ExportedNode:
        """Return the node of an outline with its names and origin."""
        kind = self.kind
        return ExportedNode(
            *(self.name, kind.domain, kind.op_type, kind.version, self.origin, kind.inputs, kind.outputs),
            *(self.input_names, self.output_names, kind.shape_only, kind.body),
        )

    @property
    def label(self) -> str:
        """The node it was written for, as messages name it."""
        return str(self.source)
