"""Proof that the rows of a batch do not influence each other: dataflow along the batch axis, operator by operator.

Each value either is the same for every batch, or has the rows on one axis, of size batch * n, row i depending on row i
of the inputs only. Sizes are followed as products of symbols through `Shape`, arithmetic and `Reshape`. An operator
without a rule here is refused, as is one whose rule does not hold; nothing is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlx_ort.converters.row_independence import bodies, operators, sizes
from rlx_ort.converters.row_independence.facts import RefusedError
from rlx_ort.converters.row_independence.proof import UNNAMED, Batch, Proof, Rules
from rlx_ort.converters.to_onnx.exporter import drafted
from rlx_ort.errors import RlxError
from rlx_ort.ir.types import ValueType

if TYPE_CHECKING:
    import onnx

    from rlx_ort.ir.graph import Graph
    from rlx_ort.ir.tensor import TensorData
    from rlx_ort.options.compile_options import CompileOptions

__all__ = ["UNNAMED", "RowIndependence", "model_row_independence", "padding_independence", "row_independence"]

_RULES = Rules(sizes.RULES, operators.RULES, bodies.RULES, operators.SHAPED)


@dataclass(frozen=True)
class RowIndependence:
    """Whether rows are proved independent; else `node` is where the proof ends and `reason` says why.

    `axes` has the axis of the rows in each output, None for an output that is the same for every batch.
    """

    proven: bool
    node: str = ""
    reason: str = ""
    axes: tuple[int | None, ...] = ()

    def __bool__(self) -> bool:
        return self.proven

    def __str__(self) -> str:
        if self.proven:
            return "rows are independent"
        return f"{self.node}: {self.reason}" if self.node else self.reason


def row_independence(graph: Graph, dim: str, options: CompileOptions | None = None) -> RowIndependence:
    """Return whether rows along a named dim, the first of every input and output, are proved independent.

    `UNNAMED` stands for the first dim of the only input where that is open and has no name.
    The model is exported, as every provider gets it, but not run. Data of small parameters counts as constant.
    """
    return _of_graph(graph, Batch(dim), options, graph.weights)


def padding_independence(
    graph: Graph, axes: Mapping[str, int], rows: int, options: CompileOptions | None = None
) -> RowIndependence:
    """Return whether padding on an axis of some inputs is proved to change no row of the outputs that is not padding.

    Args:
        graph: exported, as every provider gets it, but not run.
        axes: name of each padded input -> axis of its rows. Other inputs count as the same for every batch.
        rows: number of rows with the padding; where the graph has a size on that axis, it is a multiple of this.
        options: how the graph is compiled.

    Data of parameters does not count as constant: it may be changed between runs.
    """
    return _of_graph(graph, Batch(None, axes, rows), options, {})


def _of_graph(
    graph: Graph, batch: Batch, options: CompileOptions | None, weights: Mapping[str, TensorData]
) -> RowIndependence:
    try:
        model = drafted(graph, options)
        exported, types = model.finished(), model.outline.types
    except RlxError as err:
        return RowIndependence(False, reason=f"the model cannot be exported: {err}")
    data = {name: tensor for name in exported.params if (tensor := weights.get(name)) is not None}
    return _proved(exported.model, batch, {**types}, {**data, **exported.constants})


def model_row_independence(model: onnx.ModelProto, dim: str) -> RowIndependence:
    """Return the same for a model; the types of its values are inferred."""
    return _proved(model, Batch(dim), None, {})


def _proved(
    model: onnx.ModelProto, batch: Batch, types: Mapping[str, ValueType] | None, data: Mapping[str, TensorData]
) -> RowIndependence:
    from onnx import inliner

    from rlx_ort.converters.protos import infer_proto

    if model.functions:
        model, types = inliner.inline_local_functions(model), None
    if types is None:
        types = infer_proto(model)
    try:
        versions = {entry.domain: entry.version for entry in model.opset_import}
        proof = Proof(_RULES, types, batch, versions, data)
        axes = proof.of_model(model)
    except RefusedError as err:
        return RowIndependence(False, err.node, str(err))
    return RowIndependence(True, axes=axes)
