"""Finds the lowerings of an op, and chooses between the native and the common one where there are two.

The lowerings of a family are in the file here that has the name of the family in `rlx_ort.ir.ops`; it is imported when
a graph first has an op of it, so a model pays, in time and memory, for the ops it uses. A native lowering asks for its
kernel with `Emitter.require_kernel` and raises `NoNativeForm` if the fused op cannot express the node, both before it
writes anything; then the common lowering takes over.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from rlx_ort.errors import ConversionError
from rlx_ort.ir.op import Op
from rlx_ort.ir.ops.leaf import Constant
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.options.dispatch import KernelDispatch

if TYPE_CHECKING:
    from rlx_ort.ir.core import Node
    from rlx_ort.ir.graph import Graph
    from rlx_ort.ir.tensor import TensorData

NATIVE, COMMON = "native", "common-ir"
"""The forms, as named in reports."""

O = TypeVar("O", bound=Op)  # noqa: E741
_natives: dict[type[Op], _Native] = {}
asking: dict[type[Op], Asks] = {}
"""Op class -> when its lowering asks for kernels; see `lowers`."""
_choosing: weakref.WeakKeyDictionary[Graph, tuple[object, bool]] = weakref.WeakKeyDictionary()
_OPS = "rlx_ort.ir.ops."
_WITHOUT = frozenset({"leaf"})
"""Families that are written by the emitter itself, or never."""
_ELSEWHERE = {"blocks": "control", "conv": "linalg", "dequant": "quant", "onnx": "imported", "sequence": "control"}
"""Families whose lowerings are in the file of another one."""
_Types: TypeAlias = Sequence[ValueType | None]

Lowering: TypeAlias = Callable[[Any, Any, Sequence[Any]], Any]
"""(emitter, op, ONNX values of the inputs) -> one ONNX value, or a tuple with one per result."""
Asks: TypeAlias = "Callable[[Any, TensorType, Sequence[TensorData | None]], bool]"
"""(op, type of its input 0, data of each input, None if no constant) -> whether the lowering asks `Emitter.has_kernel`.

Such an op has one form by the rules of kernel dispatch, and avoids kernels that compute something else."""


@dataclass(frozen=True, slots=True)
class KernelSet:
    """The kernels that a model is written for; two sets are equal if their name and identity are.

    `identity` identifies this list of kernels in the keys of cached models. `takes` decides about a node by domain,
    operator, opset version, input types and output types. `slow` maps (domain, operator) of fused kernels that take
    longer than the nodes they stand for to the operators of these, of ONNX's own domain.
    """

    name: str
    identity: object
    takes: Callable[[str, str, int, _Types, _Types], bool] = field(compare=False)
    slow: Mapping[tuple[str, str], Sequence[str]] = field(default_factory=dict, compare=False)


class NoNativeForm(Exception):  # noqa: N818  # an answer, caught by the dispatcher, and no error
    """A node cannot have the native form; the message has the reason."""


class _Native(NamedTuple):
    lowering: Lowering
    when: Callable[[Any], bool]
    portable: bool


def lowers_native(
    op: type[O], when: Callable[[O], bool] = lambda _: True, *, portable: bool = False
) -> Callable[[Lowering], Lowering]:
    """Declare the decorated function to be the native lowering of an op class.

    `when` limits it to ops that have two forms at all. A `portable` one is taken for a model without a kernel set too,
    because the op itself asks for it.
    """

    def declare(function: Lowering) -> Lowering:
        _natives[op] = _Native(function, when, portable)
        return function

    return declare


@dataclass(slots=True)
class Dispatcher:
    """Chooses the form of the nodes of one model, and records the choices.

    `kernels` is None for a model that any provider may get. `forms` maps the id of a user's node to the forms that it,
    or an op in its bodies, was written in; `latest` is the form of the latest node, None where it has only one.
    `refused` maps a node to the reason why it cannot have the native form that it must have.
    """

    config: KernelDispatch = field(default_factory=KernelDispatch)
    kernels: KernelSet | None = None
    forms: dict[int, set[str]] = field(default_factory=dict)
    latest: str | None = None
    refused: dict[str, str] = field(default_factory=dict)

    def native(self, emit: Any, origin: int, op: Op, inputs: Sequence[Any]) -> Any | None:
        """Return the results of the native lowering, or None when the common one is to be used."""
        load_family(type(op).__module__)
        known = _natives.get(type(op))
        self.latest = None
        if known is None or not known.when(op):
            return None
        result = None
        if not self.config.decomposes(op.kind, has_both=True, claimed=self.kernels is not None or known.portable):
            try:
                result = known.lowering(emit, op, inputs)
            except NoNativeForm as reason:
                if self.config.forces_native(op.kind):
                    self.refused.setdefault(str(emit.node), str(reason))
        self.latest = COMMON if result is None else NATIVE
        self.decide(origin, self.latest)
        return result

    def decide(self, origin: int, form: str) -> None:
        """Record the form of a node."""
        self.forms.setdefault(origin, set()).add(form)

    def check(self, graph: Graph) -> None:
        """Raise `ConversionError` with the nodes that must have the native form and cannot, if there are any."""
        if self.refused:
            listed = "\n".join(f"  {node}: {reason}" for node, reason in self.refused.items())
            raise ConversionError(
                f"graph {graph.name!r}: the native form is forced, and {len(self.refused)} node(s) cannot have it:\n"
                f"{listed}\nlet the policy be PREFER_NATIVE, or name the kind in force_common_kinds"
            )


def has_choice(graph: Graph) -> bool:
    """Return whether the model of a graph, bodies included, depends on kernels; cached until the graph grows."""
    known = _choosing.get(graph)
    if known is None or known[0] != graph.revision:
        kinds = {type(node.op) for node in graph.nodes}
        for kind in kinds:
            load_family(kind.__module__)
        choosers = {kind for kind in kinds if kind in _natives or kind.bodies is not Op.bodies}
        ops = [node.op for node in graph.nodes if type(node.op) in choosers] if choosers else []
        natives = (native.when(op) for op in ops if (native := _natives.get(type(op))) is not None)
        kernels = kinds & asking.keys() and any(_asks(graph, node) for node in graph.nodes)
        answer = any(natives) or bool(kernels) or any(has_choice(body) for op in ops for body in op.bodies())
        known = _choosing[graph] = (graph.revision, answer)
    return known[1]


def _asks(graph: Graph, node: Node) -> bool:
    when, ref = asking.get(type(node.op)), node.inputs[0] if node.inputs else None
    kind = None if ref is None else graph.nodes[ref.node].types[ref.output]
    if when is None or not isinstance(kind, TensorType):
        return False
    makers = [None if each is None else graph.nodes[each.node].op for each in node.inputs]
    return when(node.op, kind, [maker.data if isinstance(maker, Constant) else None for maker in makers])


@functools.cache
def load_family(module: str) -> None:
    """Import the lowerings, common and native, of the ops that a module defines; those from outside bring their own."""
    family = module.removeprefix(_OPS)
    if family == module or family in _WITHOUT:
        return
    importlib.import_module(f"{__package__}.{_ELSEWHERE.get(family, family)}")
