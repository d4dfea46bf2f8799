"""`Draft`: a graph that is lowered and not yet a model: enough to choose a device, and where the model is made from."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlx_ort.converters.collector import paused_collector
from rlx_ort.converters.to_onnx.exported import ExportedModel
from rlx_ort.converters.to_onnx.infer import inferred_types
from rlx_ort.converters.to_onnx.model import ModelGraph, WholeModel, model_proto
from rlx_ort.converters.to_onnx.opset import ir_version
from rlx_ort.converters.to_onnx.outline import Outline
from rlx_ort.converters.to_onnx.writer import ModelWriter
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import UnknownType, ValueType

if TYPE_CHECKING:
    import onnx

__all__ = ["Draft"]


class Draft:
    """The nodes of a model with the opsets they are for; `finished` makes the protobuf and what goes with it, once.

    Drafts are told apart by identity. May be used from several threads.
    """

    def __init__(
        self,
        writer: ModelWriter,
        main: ModelGraph,
        imports: Mapping[str, int],
        metadata: Mapping[str, str],
        origin_names: Mapping[int, str],
        forms: Mapping[int, frozenset[str]],
        stored_as: Mapping[str, DType],
    ) -> None:
        self._writing: tuple[ModelWriter, ModelGraph] | None = (writer, main)
        self._imports = imports
        self._metadata = metadata
        self._origin_names = origin_names
        self._forms = forms
        self._stored_as = stored_as
        self._outline: Outline | None = None
        self._finished: ExportedModel | None = None
        self._lock = threading.RLock()

    @property
    def outline(self) -> Outline:
        """What choosing a device needs to know of the model. Makes the model where only ONNX can infer some type."""
        with self._lock:
            if self._outline is None:
                self._outline = self._made_outline()
            return self._outline

    def finished(self) -> ExportedModel:
        """Return the model; the data of external weights stays outside."""
        with self._lock, paused_collector():
            if self._finished is None:
                self._finished = self._made_model()
                self._writing = None  # all of it is in the model and the outline
            return self._finished

    def _made_outline(self) -> Outline:
        assert self._writing is not None  # noqa: S101  # given up only when there is an outline
        writer, main = self._writing
        if not _all_known(writer, main):
            self.finished()
            assert self._outline is not None  # noqa: S101  # made with the model
            return self._outline
        return Outline.of_writer(writer, self._imports, main.inputs, main.outputs)

    def _made_model(self) -> ExportedModel:
        assert self._writing is not None  # noqa: S101  # given up only for a finished model
        writer, main = self._writing
        whole = WholeModel(main, writer.types, self._imports, ir_version(writer.types.values()), self._metadata)
        proto = model_proto(whole)
        if _all_known(writer, main):
            outline = self.outline
        else:
            inferred = _inferred(writer, proto)
            outline = Outline.of_writer(writer, self._imports, main.inputs, main.outputs, inferred)
            self._outline = outline
        return ExportedModel(
            model=proto,
            params=tuple(writer.params),
            nodes=tuple(outline.nodes),
            origin_names=self._origin_names,
            input_types=outline.input_types,
            output_types=outline.output_types,
            constants=dict(writer.constants),
            forms=self._forms,
            stored_as=self._stored_as,
        )


def _all_known(writer: ModelWriter, main: ModelGraph) -> bool:
    """Return whether the type of every value that a node writes or the model gives is known."""
    types, unknown = writer.types, UnknownType()
    first = [record.pattern for record in writer.records if not record.name]
    values = [value for node in first for value in node.writes if value.name]
    return not any(isinstance(types.get(value, unknown), UnknownType) for value in [*values, *main.outputs])


def _inferred(writer: ModelWriter, proto: onnx.ModelProto) -> dict[str, ValueType]:
    """Return the type of every value by name, those that the writer does not know as ONNX infers them."""
    own = {str(value.name): kind for value, kind in writer.types.items()}
    known = {name: kind for name, kind in own.items() if not isinstance(kind, UnknownType)}
    return inferred_types(proto, own) | known
