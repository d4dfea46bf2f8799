"""Splits the products of a mixture of experts between a device and the host, and adds hidden outputs for its routers.

A product by experts, some of which are not resident, becomes two: one on the device with the weights of the resident
experts, and one on the host with the others; each row takes the result of the one that has its expert. The names of
the host's nodes contain `HOST_MARKER`, by which ONNX Runtime keeps them, and so their weights, on the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import GraphVerifyError
from rlx_ort.ir.core import Node, Ref, Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.ops.dequant import DequantGroupedMatMul, GroupedMatMul
from rlx_ort.ir.ops.leaf import Constant, Param
from rlx_ort.ir.ops.norm import TopK
from rlx_ort.ir.ops.onnx import OnnxNode
from rlx_ort.ir.shape import Shape
from rlx_ort.ir.tensor import TensorData, narrowed
from rlx_ort.ir.types import TensorType

if TYPE_CHECKING:
    from rlx_ort.execution.weights import WeightStore

__all__ = ["HOST_MARKER", "ExpertWeights", "Mask", "MoeGraph", "expert_nodes", "router_picks", "split_experts"]

HOST_MARKER = "@moe-host"
"""Part of the names of the nodes that run on the host."""

Mask: TypeAlias = npt.NDArray[np.bool_]
"""For each expert whether it is resident: on the device."""

_DECLARED: Mapping[str, DType] = MappingProxyType({})


class Experts(NamedTuple):
    """Some experts of the user's parameter `param`, in order."""

    param: str
    experts: tuple[int, ...]


@dataclass
class MoeGraph:
    """A graph as its session runs it.

    Attributes:
        graph: the graph.
        picks: names of the hidden outputs with the indices that each router's TopK found, in order.
        routed: names of the hidden outputs with the expert of each row of each product, in order.
        experts: new parameter -> the part of the user's parameter that it holds.
    """

    graph: Graph
    picks: tuple[str, ...] = ()
    routed: tuple[str, ...] = ()
    experts: dict[str, Experts] = field(default_factory=dict)
    on_host: bool = False
    """Whether some nodes run on the host."""


def expert_nodes(graph: Graph) -> list[Node]:
    """Return the products by experts of the main graph, in order."""
    return [node for node in graph.nodes if isinstance(node.op, (GroupedMatMul, DequantGroupedMatMul))]


def router_picks(graph: Graph, num_experts: int) -> list[Ref]:
    """Return the indices output of each TopK over exactly that many elements in the main graph, in order."""
    found = []
    for node in graph.nodes:
        if isinstance(node.op, TopK):
            axis, output = -1, 0
        elif isinstance(node.op, OnnxNode) and (node.op.domain, node.op.op_type) == ("", "TopK"):
            given = node.op.attributes.get("axis", -1)
            axis, output = given if isinstance(given, int) else -1, 1
        else:
            continue
        ref = node.inputs[0]
        kind = None if ref is None else graph.nodes[ref.node].types[ref.output]
        shape = kind.shape if isinstance(kind, TensorType) else None
        if shape is not None and -shape.rank <= axis < shape.rank and shape[axis] == num_experts:
            found.append(Ref(node.id, output))
    return found


def split_experts(graph: Graph, capture: int | None, residency: Sequence[Mask] | None, split: bool) -> MoeGraph:
    """Return a copy of a graph with hidden outputs and, if `split`, the experts that are not resident on the host.

    Args:
        graph: the user's graph.
        capture: the number of experts that identifies routers, None to capture nothing.
        residency: the mask of each product by experts; None to count nothing of them.
        split: whether experts that are not resident move to the host.

    Raises:
        GraphVerifyError: the weight of experts that are to move is neither a parameter nor a constant.
    """
    made = MoeGraph(Graph(graph.name, metadata=dict(graph.metadata), doc=graph.doc))
    made.graph.weights = dict(graph.weights)
    masks = dict(zip((node.id for node in expert_nodes(graph)), residency or (), strict=False)) if split else {}
    values: dict[Ref, Value] = {}
    for node in graph.nodes:
        inputs = [None if ref is None else values[ref] for ref in node.inputs]
        mask = masks.get(node.id)
        if mask is not None and not mask.all():
            made.on_host = True
            results: tuple[Value, ...] = (_split_product(made, graph, node, mask, inputs),)
        else:
            results = made.graph.add_node(
                node.op, inputs, name=node.name, types=node.types, output_names=node.output_names
            )
        values.update((Ref(node.id, place), value) for place, value in enumerate(results))
    picks = [] if capture is None else router_picks(graph, capture)
    routed = [] if residency is None else [node.inputs[2] for node in expert_nodes(graph)]
    made.picks = tuple(f"{HOST_MARKER}/picks/{place}" for place in range(len(picks)))
    made.routed = tuple(f"{HOST_MARKER}/routed/{place}" for place in range(len(routed)))
    outputs = [values[value.ref] for value in graph.outputs]
    hidden = [values[ref] for ref in (*picks, *routed) if ref is not None]
    made.graph.set_outputs([*outputs, *hidden], [*graph.output_names, *made.picks, *made.routed])
    return made


def _split_product(made: MoeGraph, source: Graph, node: Node, mask: Mask, inputs: Sequence[Value | None]) -> Value:
    """Add a product by experts to a split graph, as one on the device and one on the host; keeps the node's name."""
    x, weight, experts = inputs
    if x is None or weight is None or experts is None:
        raise GraphVerifyError(f"{node} lacks an input")
    graph, name, op = made.graph, node.name, node.op
    if not mask.any():
        return graph.add_node(op, (x, weight, experts), name=f"{name}{HOST_MARKER}", types=node.types)[0]
    ids = graph.cast(experts, DType.I32)

    def product(side: Mask, label: str, suffix: str) -> Value:
        # Rows of the other side get -1: the loop over experts skips them, a copy for each row takes any matrix.
        places = np.where(side, np.cumsum(side) - 1, -1).astype(np.int32)
        local = graph.gather(graph.constant(places), ids, axis=0)
        return graph.append(op, x, _weight_part(made, source, node, side, label), local, name=f"{name}{suffix}")

    flags = graph.gather(graph.constant(mask.astype(np.int32)[:, None]), ids, axis=0)
    on_device = product(mask, "resident", "/resident")
    on_host = product(~mask, "host", HOST_MARKER)
    return graph.where_(graph.cast(flags, DType.BOOL), on_device, on_host, name=name)


def _weight_part(made: MoeGraph, source: Graph, node: Node, side: Mask, label: str) -> Value:
    """Return the weight of some experts: a parameter of `ExpertWeights`, or a constant."""
    ref = node.inputs[1]
    op = None if ref is None else source.nodes[ref.node].op
    experts = tuple(int(expert) for expert in np.flatnonzero(side))
    if isinstance(op, Param):
        name = f"{op.name}/{node.name}/{label}"
        made.experts[name] = Experts(op.name, experts)
        sizes = (op.type.shape or Shape()).static()
        return made.graph.param(name, (len(experts), *sizes[1:]), op.type.dtype)
    if isinstance(op, Constant):
        return made.graph.constant(_taken(op.data, experts), name=f"{node.name}/{label}")
    raise GraphVerifyError(
        f"{node} computes the weights of its experts in the graph; only a parameter that is not mutable, or "
        "a constant, can be kept on the host"
    )


def _taken(data: TensorData, experts: Sequence[int]) -> TensorData:
    """Return the data of some experts, which are the first axis; a contiguous range shares the memory."""
    count = data.shape[0]
    size, rest = divmod(data.buffer.nbytes, max(count, 1))
    if rest:
        raise GraphVerifyError(f"an expert of {data.dtype.value}{list(data.shape)} is not a whole number of bytes")
    shape = (len(experts), *data.shape[1:])
    first, last = experts[0], experts[-1] + 1
    if list(experts) == list(range(first, last)):
        return TensorData(data.dtype, shape, data.buffer[first * size : last * size])
    rows = data.buffer.reshape(count, size)[list(experts)]
    return TensorData(data.dtype, shape, rows.reshape(-1))


class ExpertWeights:
    """A view of a store with the parameters of a split graph; a `WeightSource` that several threads may use."""

    def __init__(self, store: WeightStore, experts: Mapping[str, Experts]) -> None:
        self._store = store
        self._experts = dict(experts)
        self._made: dict[tuple[str, DType | None], tuple[TensorData, TensorData]] = {}
        self._lock = threading.Lock()

    @property
    def version(self) -> int:
        """The store's version."""
        return self._store.version

    def snapshot(
        self, names: Iterable[str], stored_as: Mapping[str, DType] = _DECLARED
    ) -> tuple[int, Mapping[str, TensorData]]:
        """Return the version and the data of some parameters; see `WeightStore.snapshot`."""
        wanted = list(names)
        plain = {name: dtype for name, dtype in stored_as.items() if name not in self._experts}
        version, found = self._store.snapshot(self._sources(wanted), plain)
        with self._lock:
            return version, {
                name: self._part(name, found[self._experts[name].param], stored_as.get(name))
                if name in self._experts
                else found[name]
                for name in wanted
            }

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those parameters of the store that are needed and not set."""
        return self._store.missing(self._sources(names))

    def pin(self, names: Iterable[str]) -> None:
        """Note that a session uses these parameters."""
        self._store.pin(self._sources(names))

    def unpin(self, names: Iterable[str]) -> None:
        """Undo one `pin` of the same names."""
        self._store.unpin(self._sources(names))

    def _sources(self, names: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(self._experts[name].param if name in self._experts else name for name in names))

    def _part(self, name: str, data: TensorData, dtype: DType | None) -> TensorData:
        """Return some experts of the data, made once for each value of it."""
        source, made = self._made.get((name, dtype), (None, data))
        if source is not data:
            made = _taken(data, self._experts[name].experts)
            if dtype is not None and dtype is not made.dtype:
                made = narrowed(made, dtype)
            self._made[name, dtype] = (data, made)
        return made
