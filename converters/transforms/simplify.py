"""Removes what a model can do without, with the passes of onnx-ir, and folds small constants."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlx_ort.converters.bundle import ModelBundle, graphs_of
from rlx_ort.converters.infer import skeleton
from rlx_ort.converters.onnx_ir_bridge import bundle_from_ir, bundle_to_ir
from rlx_ort.converters.protos import copied, set_items
from rlx_ort.converters.transforms.folding import fold_constants
from rlx_ort.converters.transforms.scope import typed_model
from rlx_ort.errors import ConversionError

if TYPE_CHECKING:
    import onnx

__all__ = ["SimplifyReport", "simplify"]

_MOST_ROUNDS = 4  # folding uncovers identities and the other way round; models settle in two


@dataclass(frozen=True, slots=True)
class SimplifyReport:
    """What `simplify` did.

    Attributes:
        nodes_before: nodes before, bodies included.
        nodes_after: nodes after.
        folded: values that were computed from constants or static shapes and are constants now.
        removed_ops: operator -> how many of its nodes are gone.
    """

    nodes_before: int
    nodes_after: int
    folded: tuple[str, ...]
    removed_ops: dict[str, int]


def simplify(bundle: ModelBundle) -> tuple[ModelBundle, SimplifyReport]:
    """Return a smaller model that computes the same; inputs, outputs and the names of what stays are kept.

    Identities, nodes and weights nothing reads, repeated computations, repeated small constants and constant
    computations are gone, and inferred shapes are written into the model. Fused operators are left to sessions. The
    result is checked by ONNX's checker, if the source passes it, and for the same inputs and outputs.

    Raises:
        ConversionError: onnx-ir is not installed or fails on the model, or the result is not valid.
    """
    folded: list[str] = []
    made = bundle
    for _ in range(_MOST_ROUNDS):
        made, newly = fold_constants(_passes(made))
        folded += newly
        if not newly:
            break
    proto = copied(made.proto)
    for graph, twin in zip(
        graphs_of(proto, functions=False), graphs_of(typed_model(made), functions=False), strict=True
    ):
        weights = {tensor.name for tensor in graph.initializer}
        set_items(graph.value_info, [info for info in twin.value_info if info.name not in weights])
    made = made.with_proto(proto)
    _check(bundle, made)
    gone = _ops(bundle) - _ops(made)
    return made, SimplifyReport(bundle.node_count, made.node_count, tuple(folded), dict(gone.most_common()))


def _passes(bundle: ModelBundle) -> ModelBundle:
    """Run the passes of onnx-ir, which touch no weight above a kilobyte."""
    model = bundle_to_ir(bundle)
    from onnx_ir.passes import Sequential
    from onnx_ir.passes import common as passes

    order = Sequential(
        passes.IdentityEliminationPass(),
        passes.RemoveUnusedNodesPass(),
        passes.DeduplicateInitializersPass(size_limit=1024),
        passes.CommonSubexpressionEliminationPass(),
        passes.RemoveUnusedNodesPass(),
        passes.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]  # onnx-ir types all its passes but this
    )
    try:
        model = order(model).model
    except Exception as err:  # passes raise errors of any kind
        raise ConversionError(f"{bundle.origin}: onnx-ir cannot simplify it: {type(err).__name__}: {err}") from err
    return bundle_from_ir(model, bundle.origin)


def _check(before: ModelBundle, after: ModelBundle) -> None:
    if before.input_types().keys() != after.input_types().keys() or list(before.output_types()) != list(
        after.output_types()
    ):
        raise ConversionError(f"{before.origin}: simplifying changed its inputs or outputs; convert it as it is")
    problem = _problem(after)
    if problem and not _problem(before):
        raise ConversionError(f"{before.origin}: simplifying made it invalid ({problem}); convert it as it is")


def _problem(bundle: ModelBundle) -> str:
    """Return what ONNX's checker finds wrong, or an empty string."""
    import onnx

    try:
        onnx.checker.check_model(skeleton(bundle.proto))
    except (onnx.checker.ValidationError, RuntimeError, ValueError) as err:
        return str(err).strip().splitlines()[0]
    return ""


def _ops(bundle: ModelBundle) -> Counter[str]:
    nodes: list[onnx.NodeProto] = [node for graph in graphs_of(bundle.proto) for node in graph.node]
    return Counter(node.op_type for node in nodes)
